"""The hybrid between zeroth-order merging and back-propagation, and how much of it fits a budget of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mergetta import Bundle, Expert, MergettaError, TorchRuntime, build_bundle, create_adapter, load_family
from mergetta.bench.budget import largest
from mergetta.bench.cost import Model, peak_memory, some_images
from mergetta.groups import learnable
from mergetta.models.family import Family

from .moving import moved
from .test_cli import mergetta


@pytest.fixture(scope="module")
def family() -> Family:
    return load_family("fashion-bn")


@pytest.fixture(scope="module")
def bundle(family: Family) -> Bundle:
    rng, base = np.random.default_rng(0), TorchRuntime(family).groups
    experts = [Expert(moved(base, rng, 0.05), family.fingerprint)] * 3
    return build_bundle(base, experts, initial=0.2)


@pytest.fixture(scope="module")
def batches() -> list[np.ndarray]:
    return [np.random.default_rng(i).random((30, 1, 28, 28)).astype(np.float32) for i in range(3)]


def test_no_layer_is_the_papers_method(family: Family, bundle: Bundle, batches: list[np.ndarray]) -> None:
    mine = create_adapter("hybrid", TorchRuntime(family), bundle=bundle, layers=0, seed=3)
    paper = create_adapter("zo-merge", TorchRuntime(family), bundle=bundle, loss="roid", seed=3)
    for images in batches:
        np.testing.assert_allclose(mine.predict(images), paper.predict(images), atol=1e-5)


def test_all_layers_from_the_source_are_roid(family: Family, batches: list[np.ndarray]) -> None:
    runtime = TorchRuntime(family)
    nothing = build_bundle(runtime.groups, [Expert(runtime.groups, family.fingerprint)])
    mine = create_adapter("hybrid", runtime, bundle=nothing, layers=15, seed=3)
    roid = create_adapter("roid", TorchRuntime(family), optimizer="sgd", seed=3)
    for images in batches:
        np.testing.assert_allclose(mine.predict(images), roid.predict(images), atol=1e-5)


def test_the_last_layers_learn_and_the_others_stay_in_the_span(
    family: Family, bundle: Bundle, batches: list[np.ndarray]
) -> None:
    runtime = TorchRuntime(family)
    adapter = create_adapter("hybrid", runtime, bundle=bundle, layers=2, lr=0.1)
    for images in batches:
        adapter.predict(images)
    now, start = adapter.groups, bundle.merge()
    names = learnable(now)
    for name in names[-4:]:  # scale and shift of two layers
        assert np.abs(now[name] - start[name]).max() > 1e-4
    moved_by = 0.0
    for name in names[:-4]:
        change, basis = now[name] - start[name], bundle.basis[name]
        np.testing.assert_allclose(change @ basis.T @ basis, change, atol=1e-5)
        moved_by += np.abs(change).max()
    assert moved_by > 0
    for name in set(now) - set(names):  # no step touches a moment
        np.testing.assert_array_equal(now[name], start[name])
    assert not any(parameter.requires_grad for parameter in adapter.learnt.values())


def test_what_is_refused(family: Family, bundle: Bundle) -> None:
    with pytest.raises(MergettaError, match="layers must be 0 to 15"):
        create_adapter("hybrid", TorchRuntime(family), bundle=bundle, layers=16)
    result = mergetta("adapt", "fashion:fog@5", "--out", "x", "--method", "hybrid")
    assert result.returncode == 2
    assert "give --bundle FILE" in result.stderr
    result = mergetta("adapt", "fashion:fog@5", "--out", "x", "--memory-budget", 300)
    assert "are for --method hybrid" in result.stderr


@pytest.mark.parametrize(("budget", "layers"), [(100, 0), (119, 1), (120, 2), (249, 14), (250, 15), (9999, 15)])
def test_the_most_layers_within_a_budget(budget: float, layers: int) -> None:
    asked = []

    def peak(count: int) -> float:
        asked.append(count)
        return 100 + 10 * count

    assert largest(15, budget, peak) == layers
    assert len(asked) <= 5
    with pytest.raises(MergettaError, match="99 MB are not enough"):
        largest(15, 99, peak)


def test_fewer_layers_take_less_memory(family: Family, tmp_path: Path) -> None:
    family.save(tmp_path / "family.safetensors")
    np.save(tmp_path / "images.npy", some_images(family, 200))
    place = str(tmp_path / "family.safetensors")
    few, all_ = (peak_memory("torch", f"hybrid-{n}", Model(place), tmp_path, 1) for n in (1, 15))
    assert few < all_ - 20
