"""How many images merged moments count for: experts measure it, bundles carry it, by either way to build."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mergetta import Bundle, Expert, MergettaError, TorchRuntime, build_bundle, load_family
from mergetta.adapters.backprop.expert_training import train_expert
from mergetta.adapters.forward_only.normaliser import Normaliser
from mergetta.adapters.forward_only.zo_merge_plus import ZOMergePlus
from mergetta.files import decode, encode
from mergetta.groups import layer_sizes
from mergetta.merging.scatter import Pool
from mergetta.streams.domain import MomentSettings

from .moving import moved

BASE = {
    "a.weight": np.ones(2, np.float32),
    "a.running_mean": np.zeros(2, np.float32),
    "a.running_var": np.ones(2, np.float32),
    "b.running_mean": np.ones(3, np.float32),
    "b.running_var": np.full(3, 2.0, np.float32),
}


def expert(seed: int, spread: Any = 1.0) -> Expert:
    rng = np.random.default_rng(seed)
    told = None if spread is None else np.full((2, 2), spread) * rng.uniform(0.5, 2, (2, 2))
    return Expert(moved(BASE, rng, 0.2), "f", str(seed), spread=told)


def test_by_hand() -> None:
    """One expert, whose means are 2 from the source's with the same variance: τ² is 1 of means, 4 of second moments."""
    groups = {**BASE, "a.running_mean": np.array([2.0, 2.0]), "b.running_mean": np.array([3.0, 3.0, 3.0])}
    bundle = build_bundle(BASE, [Expert(groups, spread=np.array([[9.0, 1.0], [16.0, 1e9]]))])
    # layer a: second moments 1 and 5, τ² = 4: 2 √(9 · 4) = 12; layer b: 3 and 11, τ² = 16: more than there may be
    assert bundle.worth == pytest.approx({"a.running_mean": 12.0, "b.running_mean": MomentSettings().most})


def test_experts_that_do_not_tell() -> None:
    assert build_bundle(BASE, [expert(0, None)]).worth == {}
    assert build_bundle(BASE, [expert(0).groups]).worth == {}
    pool = Pool(BASE)
    pool.add(expert(0, None))
    assert pool.bundle(initial=0.1).worth == {}
    plain = {"a.weight": np.ones(2, np.float32)}
    assert build_bundle(plain, [Expert(plain, spread=np.ones((2, 1)))]).worth == {}


@pytest.mark.parametrize("tells", [[True] * 5, [True, False, True, True, False]])
def test_both_ways_to_build_agree(tells: list[bool]) -> None:
    experts = [expert(i, 0.2 * (i + 1) if told else None) for i, told in enumerate(tells)]
    expected = build_bundle(BASE, experts).worth
    pool = Pool(BASE)
    pool.add_many(experts[:3])
    for each in experts[3:]:
        pool.add(each)
    assert pool.bundle(initial=0.1).worth == pytest.approx(expected, rel=1e-4)
    assert set(expected) == {"a.running_mean", "b.running_mean"}
    assert all(MomentSettings().least < images < MomentSettings().most for images in expected.values())
    without = build_bundle(BASE, experts[:-1]).worth
    assert pool.bundle(initial=0.1, without=experts[-1:]).worth == pytest.approx(without, rel=1e-4)
    pool.remove(experts[-1])
    assert pool.bundle(initial=0.1).worth == pytest.approx(without, rel=1e-4)


def test_a_spread_of_other_layers_is_refused_and_changes_nothing() -> None:
    wrong, pool = replace(expert(0), spread=np.ones((2, 5))), Pool(BASE)
    with pytest.raises(MergettaError, match="another model's layers"):
        build_bundle(BASE, [wrong])
    pool.add(expert(1))
    before = pool.bundle(initial=0.1).to_bytes()
    with pytest.raises(MergettaError, match="another model's layers"):
        pool.add_many([expert(2), wrong])
    assert pool.count == 1
    assert pool.bundle(initial=0.1).to_bytes() == before


def test_roundtrip() -> None:
    bundle = build_bundle(BASE, [expert(i) for i in range(3)])
    assert bundle.worth
    assert Bundle.from_bytes(bundle.to_bytes()).worth == bundle.worth


@pytest.mark.parametrize(
    "worth",
    [
        {"a.running_mean": 0.0},
        {"a.running_mean": -1.0},
        {"a.running_mean": float("nan")},
        {"a.running_mean": float("inf")},
        {"a.running_var": 3.0},
        {"a.weight": 3.0},
        {"c.running_mean": 3.0},
    ],
)
def test_what_is_refused(worth: dict[str, float]) -> None:
    bundle = build_bundle(BASE, [expert(0)])
    with pytest.raises(MergettaError, match="positive numbers of images"):
        replace(bundle, worth=worth)


@pytest.mark.parametrize("worth", [3, ["a"], {"a.running_mean": "3"}, {"a.running_mean": True}, {"a.running_mean": -2}])
def test_hostile_files_are_refused(worth: Any) -> None:
    data = build_bundle(BASE, [expert(0)]).to_bytes()
    tensors, header = decode(data, "mergetta.bundle", 2, "x", "")
    header = {k: v for k, v in header.items() if k not in ("format", "version")}
    with pytest.raises(MergettaError):
        Bundle.from_bytes(encode(tensors, "mergetta.bundle", 2, {**header, "worth": worth}))


def spread_of(each: np.ndarray, sizes: list[int]) -> np.ndarray:
    """(B, 2, C) → (2, layers), layer by layer."""
    means, seconds = each[:, 0].astype(float), each[:, 1] + each[:, 0].astype(float) ** 2
    found, start = [], 0
    for size in sizes:
        where = slice(start, start + size)
        found.append([values[:, where].var(axis=0).mean() for values in (means, seconds)])
        start += size
    return np.array(found).T


class TestRealExperts:
    def test_spread_of_one_batch_is_that_of_its_images(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        trained = train_expert(bn_runtime, [images])
        moments = bn_runtime(images, moments=True).moments
        assert moments is not None and trained.spread is not None
        np.testing.assert_allclose(trained.spread, spread_of(moments, layer_sizes(bn_runtime.groups)), rtol=1e-3)

    def test_spread_of_features(self, images: np.ndarray) -> None:
        runtime = TorchRuntime(load_family("fashion-vit"))
        trained = train_expert(runtime, [images])
        features = runtime(images).features
        each = np.stack([features, np.zeros_like(features)], axis=1)
        assert trained.spread is not None and trained.features is not None
        np.testing.assert_allclose(trained.spread, spread_of(each, [features.shape[1]]), rtol=1e-3)
        np.testing.assert_allclose(trained.features, [features.mean(axis=0), features.var(axis=0)], atol=1e-3)

    def test_a_bundle_and_the_experts_themselves_say_the_same(
        self, bn_runtime: TorchRuntime, images: np.ndarray
    ) -> None:
        experts = [train_expert(bn_runtime, [np.clip(images * f, 0, 1)], domain=str(f)) for f in (1.0, 0.6, 0.3)]
        bundle = build_bundle(bn_runtime.groups, experts)
        normalise = Normaliser.of_bundle(bn_runtime, bundle)
        adapter = ZOMergePlus(bn_runtime, experts)
        assert isinstance(normalise, Normaliser) and isinstance(adapter.normalise, Normaliser)
        np.testing.assert_allclose(normalise.moments.worth, adapter.normalise.moments.worth, rtol=1e-6)
        worth = np.array(list(bundle.worth.values()))
        assert worth.min() < worth.max()

    def test_some_experts_do_not_tell(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """Those that do speak for all, in a bundle as among experts."""
        experts = [train_expert(bn_runtime, [np.clip(images * f, 0, 1)], domain=str(f)) for f in (1.0, 0.3)]
        experts[1] = replace(experts[1], spread=None)
        normalise = Normaliser.of_bundle(bn_runtime, build_bundle(bn_runtime.groups, experts))
        adapter = ZOMergePlus(bn_runtime, experts)
        assert isinstance(normalise, Normaliser) and isinstance(adapter.normalise, Normaliser)
        np.testing.assert_allclose(normalise.moments.worth, adapter.normalise.moments.worth, rtol=1e-6)
