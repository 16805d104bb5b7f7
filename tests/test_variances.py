"""How moments vary between images and domains: experts measure it, bundles carry it, by either way to build."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mergetta import Bundle, Expert, MergettaError, TorchRuntime, build_bundle, load_family
from mergetta.adapters.backprop.expert_training import train_expert
from mergetta.adapters.forward_only.normaliser import Normaliser
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.files import decode, encode
from mergetta.groups import layer_sizes, moments_of
from mergetta.merging.scatter import Pool
from mergetta.streams.variances import Variances

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


def told_by(bundle: Bundle) -> np.ndarray:
    assert bundle.variances is not None
    return np.stack([bundle.variances.images, bundle.variances.domains])


def test_by_hand() -> None:
    """One expert, whose means are 2 from the source's with the same variance: τ² is 1 of means."""
    groups = {**BASE, "a.running_mean": np.array([2.0, 2.0]), "b.running_mean": np.array([3.0, 3.0, 3.0])}
    spread = np.array([[9.0, 1.0], [16.0, 5.0]])
    found = told_by(build_bundle(BASE, [Expert(groups, spread=spread)]))
    np.testing.assert_allclose(found[0], spread)
    # second moments: 1 and 5 in layer a, 3 and 11 in layer b
    np.testing.assert_allclose(found[1], [[1.0, 1.0], [4.0, 16.0]])


def test_experts_that_do_not_tell() -> None:
    assert build_bundle(BASE, [expert(0, None)]).variances is None
    assert build_bundle(BASE, [expert(0).groups]).variances is None
    pool = Pool(BASE)
    pool.add(0, expert(0, None))
    assert pool.bundle(initial=0.1).variances is None
    plain = {"a.weight": np.ones(2, np.float32)}
    assert build_bundle(plain, [Expert(plain, spread=np.ones((2, 1)))]).variances is None


@pytest.mark.parametrize("tells", [[True] * 5, [True, False, True, True, False]])
def test_both_ways_to_build_agree(tells: list[bool]) -> None:
    experts = [expert(i, 0.2 * (i + 1) if told else None) for i, told in enumerate(tells)]
    pool = Pool(BASE)
    pool.add_many(dict(enumerate(experts[:3])))
    for i, each in enumerate(experts[3:], 3):
        pool.add(i, each)
    np.testing.assert_allclose(told_by(pool.bundle(initial=0.1)), told_by(build_bundle(BASE, experts)), rtol=1e-4)
    without = told_by(build_bundle(BASE, experts[:-1]))
    np.testing.assert_allclose(told_by(pool.bundle(initial=0.1, without={4: experts[4]})), without, rtol=1e-4)
    pool.remove(4, experts[4])
    np.testing.assert_allclose(told_by(pool.bundle(initial=0.1)), without, rtol=1e-4)


def test_a_spread_of_other_layers_is_refused_and_changes_nothing() -> None:
    wrong, pool = replace(expert(0), spread=np.ones((2, 5))), Pool(BASE)
    with pytest.raises(MergettaError, match="another model's layers"):
        build_bundle(BASE, [wrong])
    pool.add(1, expert(1))
    before = pool.bundle(initial=0.1).to_bytes()
    with pytest.raises(MergettaError, match="another model's layers"):
        pool.add_many({2: expert(2), 3: wrong})
    assert pool.count == 1
    assert pool.bundle(initial=0.1).to_bytes() == before


def test_roundtrip() -> None:
    bundle = build_bundle(BASE, [expert(i) for i in range(3)])
    np.testing.assert_array_equal(told_by(Bundle.from_bytes(bundle.to_bytes())), told_by(bundle))


@pytest.mark.parametrize("wrong", [np.full((2, 2), -1.0), np.full((2, 2), np.nan), np.ones((2, 3)), np.ones(2)])
@pytest.mark.parametrize("kind", ["images", "domains"])
def test_hostile_files_are_refused(kind: str, wrong: np.ndarray) -> None:
    data = build_bundle(BASE, [expert(0)]).to_bytes()
    tensors, header = decode(data, "mergetta.bundle", 3, "x", "")
    header = {k: v for k, v in header.items() if k not in ("format", "version")}
    hostile = {**tensors, f"variances/{kind}": wrong.astype(np.float32)}
    with pytest.raises(MergettaError):
        Bundle.from_bytes(encode(hostile, "mergetta.bundle", 3, header))


def test_variances_of_other_layers_are_refused() -> None:
    bundle = build_bundle(BASE, [expert(0)])
    with pytest.raises(MergettaError, match="other layers"):
        replace(bundle, variances=Variances(np.ones((2, 3)), np.ones((2, 3))))


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

    def test_race_merge_goes_by_what_the_bundle_says(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        experts = [train_expert(bn_runtime, [np.clip(images * f, 0, 1)], domain=str(f)) for f in (1.0, 0.6, 0.3)]
        bundle = build_bundle(bn_runtime.groups, experts)
        normalise = Normaliser.of_bundle(bn_runtime, bundle)
        adapter = RaceMerge(bn_runtime, bundle)
        assert isinstance(normalise, Normaliser) and isinstance(adapter.normalise, Normaliser)
        assert adapter.normalise.moments.variances is not None
        np.testing.assert_allclose(told_by(bundle)[0], adapter.normalise.moments.variances.images, rtol=1e-6)
        np.testing.assert_allclose(told_by(bundle)[1], adapter.normalise.moments.variances.domains, rtol=1e-6)
        prior = moments_of(bundle.merge(), tuple(bn_runtime.groups))
        worth = normalise.moments.worth(prior, np.zeros_like(prior), 0)
        assert worth.min() < worth.max()

    def test_some_experts_do_not_tell(self, bn_runtime: TorchRuntime, images: np.ndarray) -> None:
        """Those that do speak for all."""
        experts = [train_expert(bn_runtime, [np.clip(images * f, 0, 1)], domain=str(f)) for f in (1.0, 0.3)]
        experts[1] = replace(experts[1], spread=None)
        bundle = build_bundle(bn_runtime.groups, experts)
        normalise = Normaliser.of_bundle(bn_runtime, bundle)
        adapter = RaceMerge(bn_runtime, bundle)
        assert isinstance(normalise, Normaliser) and isinstance(adapter.normalise, Normaliser)
        assert normalise.moments.variances is not None and adapter.normalise.moments.variances is not None
        assert experts[0].spread is not None
        for found in (normalise, adapter.normalise):
            assert found.moments.variances is not None
            np.testing.assert_allclose(found.moments.variances.images, experts[0].spread, rtol=1e-6)
