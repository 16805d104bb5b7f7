"""Shared fixtures: a model made of NumPy alone, the embedded families, small batches."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))  # tests run on all cores already

import numpy as np
import pytest
import torch
from hypothesis import settings

from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.device import hub_client
from mergetta.device.hub_client import HubClient
from mergetta.device.hub_link import HubLink
from mergetta.models.family import Family, load_family
from mergetta.runtimes.export import export_onnx
from mergetta.runtimes.torch_runtime import TorchRuntime

from .confidence import each_in_turn
from .numpy_runtime import NumpyRuntime
from .stub_hub import FAMILY, StubHub

if TYPE_CHECKING:
    from .fleet import Fleet

torch.set_num_threads(1)
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGETTA_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def evenly() -> np.ndarray:
    return each_in_turn()


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


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The device model of an embedded family, with its plain graph beside it. Made once, because that takes seconds."""
    pytest.importorskip("onnxscript")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exported"
    folder.mkdir(exist_ok=True)

    def file(name: str) -> Path:
        path = folder / f"{name}.onnx"
        if not path.exists():
            export_onnx(load_family(name), path)
        return path

    return file


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubHub]:
    """Which a client need not wait for."""
    monkeypatch.setattr(hub_client, "BACKOFF", 0.001)
    hub = StubHub()
    yield hub
    hub.down()


@pytest.fixture
def link(hub: StubHub, tmp_path: Path) -> Callable[..., HubLink]:
    def make(**options: Any) -> HubLink:
        options = {"refresh": None, "groups": NumpyRuntime().groups, **options}
        client = options.pop("client", None) or HubClient(hub.url, retries=0, timeout=2)
        return HubLink(client, FAMILY, tmp_path / "hub", "camera-7", **options)

    return make


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    from .fleet import Fleet  # needs the hub's dependencies

    fleet = Fleet(tmp_path)
    with fleet.client:
        yield fleet


@pytest.fixture
def pool(fleet: Fleet) -> Fleet:
    from .hub_parts import honest

    fleet.register()
    for seed in range(6):
        fleet.upload(honest(seed))
    fleet.settle()
    return fleet
