"""Shared fixtures: a model made of NumPy alone, the embedded families, small batches."""

from __future__ import annotations

import os

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))  # tests run on all cores already

import numpy as np
import pytest
import torch
from hypothesis import settings

from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.models.family import Family, load_family
from mergetta.runtimes.torch_runtime import TorchRuntime

from .numpy_runtime import NumpyRuntime

torch.set_num_threads(1)
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

# timm imports torchvision, whose compiled operators do not load beside the CPU build of torch; timm needs only
# that these two are declared.
_library = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGETTA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session", params=["fashion-bn", "fashion-vit"])
def family(request: pytest.FixtureRequest) -> Family:
    return load_family(request.param)


@pytest.fixture
def runtime(family: Family) -> TorchRuntime:
    return TorchRuntime(family)


@pytest.fixture
def bn_runtime() -> TorchRuntime:
    return TorchRuntime(load_family("fashion-bn"))


@pytest.fixture
def numpy_runtime() -> NumpyRuntime:
    return NumpyRuntime()


@pytest.fixture(scope="session")
def images() -> np.ndarray:
    return as_input(load_fashion()[0][:48])


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)
