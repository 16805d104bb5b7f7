"""Members of a bundle: experts themselves, or clusters of similar ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mergetta import Bundle, Expert, MergettaError, build_bundle
from mergetta.files import decode, encode
from mergetta.groups import mixture_shares
from mergetta.merging.members import Clusters

from .moving import moved

BASE = {
    "a.weight": np.ones(4, np.float32),
    "a.bias": np.zeros(4, np.float32),
    "a.running_mean": np.zeros(4, np.float32),
    "a.running_var": np.ones(4, np.float32),
}


def expert(seed: int, about: float = 0.0, scale: float = 0.2) -> Expert:
    rng = np.random.default_rng(seed)
    groups = moved(BASE, rng, scale)
    groups["a.weight"] = groups["a.weight"] + np.float32(about)
    signature = np.stack([rng.normal(about, 0.1, 3), np.ones(3)])
    return Expert(groups, "f", f"d{about:g}", signature, spread=np.ones((2, 1)))


class TestMembers:
    def test_few_experts_are_members_themselves(self) -> None:
        experts = [expert(i, i) for i in range(5)]
        bundle = build_bundle(BASE, experts, max_rank=2)
        assert bundle.members is not None and bundle.members.signatures is not None
        assert bundle.members.names == ("d0", "d1", "d2", "d3", "d4")
        assert bundle.members.experts.tolist() == bundle.members.contributors.tolist() == [1] * 5
        for i, each in enumerate(experts):
            found = bundle.mixture(np.eye(5)[i])
            for name, value in each.groups.items():
                np.testing.assert_allclose(found[name], value, atol=0.06)
            np.testing.assert_allclose(bundle.members.signatures[i], each.signature, atol=1e-5)

    def test_a_mixture_by_hand(self) -> None:
        """Scales and shifts add up; moments are those of the mixture of domains, the source among them."""
        experts = [expert(i) for i in range(2)]
        bundle = build_bundle(BASE, experts, keep=None, tolerance=0, max_rank=None, moment_tolerance=0.0)
        w = np.array([0.5, 0.25])
        found = bundle.mixture(w)
        tasks = [each.groups["a.weight"] - 1 for each in experts]
        np.testing.assert_allclose(found["a.weight"], 1 + 0.5 * tasks[0] + 0.25 * tasks[1], atol=1e-5)
        means = [each.groups["a.running_mean"] for each in experts]
        seconds = [e.groups["a.running_var"] + m**2 for e, m in zip(experts, means, strict=True)]
        mean = 0.5 * means[0] + 0.25 * means[1]
        np.testing.assert_allclose(found["a.running_mean"], mean, atol=1e-5)
        second = 0.5 * seconds[0] + 0.25 * seconds[1] + 0.25 * 1
        np.testing.assert_allclose(found["a.running_var"], second - mean**2, atol=1e-5)
        far = bundle.mixture(4 * w)  # further than any domain: scales go there, moments cannot
        np.testing.assert_allclose(far["a.weight"], 1 + 2 * tasks[0] + 1 * tasks[1], atol=1e-4)
        shares = mixture_shares(4 * w)
        np.testing.assert_allclose(far["a.running_mean"], shares[0] * means[0] + shares[1] * means[1], atol=1e-5)

    def test_the_papers_bundle_has_none(self) -> None:
        experts = [expert(i) for i in range(3)]
        for bundle in (build_bundle(BASE, experts, members=0), build_bundle(BASE, experts, reduce=False)):
            assert bundle.members is None
            with pytest.raises(MergettaError, match="no members"):
                bundle.mixture(np.ones(3))
        whole = build_bundle(BASE, experts)
        for name, value in build_bundle(BASE, experts, members=0).merge().items():
            np.testing.assert_array_equal(whole.merge()[name], value)

    def test_roundtrip(self) -> None:
        bundle = build_bundle(BASE, [expert(i, i) for i in range(3)])
        again = Bundle.from_bytes(bundle.to_bytes())
        assert again.members is not None and again.members.names == ("d0", "d1", "d2")
        for name, value in bundle.mixture(np.array([0.2, 0.3, 0.4])).items():
            np.testing.assert_array_equal(again.mixture(np.array([0.2, 0.3, 0.4]))[name], value)
        assert again.to_bytes() == bundle.to_bytes()

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("members/coordinates/a.weight", np.ones((2, 1), np.float32)),
            ("members/further/a.weight", np.ones((1, 9), np.float32)),
            ("members/experts", np.zeros(3, np.int64)),
            ("members/contributors", np.ones(2, np.int64)),
            ("members/signatures", np.ones((3, 3, 3), np.float32)),
            ("members/signatures", -np.ones((3, 2, 3), np.float32)),
            ("members/features", np.ones(3, np.float32)),
            ("members/experts", None),
        ],
    )
    def test_hostile_files_are_refused(self, name: str, value: Any) -> None:
        tensors, header = decode(build_bundle(BASE, [expert(i) for i in range(3)]).to_bytes(), "mergetta.bundle", 2)
        header = {key: entry for key, entry in header.items() if key not in ("format", "version")}
        changed = {**tensors, name: value} if value is not None else {k: v for k, v in tensors.items() if k != name}
        with pytest.raises(MergettaError, match="members"):
            Bundle.from_bytes(encode(changed, "mergetta.bundle", 2, header))

    @pytest.mark.parametrize("names", [3, ["a"], [1, 2, 3], ["a", "b", "c", "d"]])
    def test_hostile_names_are_refused(self, names: Any) -> None:
        tensors, header = decode(build_bundle(BASE, [expert(i) for i in range(3)]).to_bytes(), "mergetta.bundle", 2)
        header = {key: entry for key, entry in header.items() if key not in ("format", "version")}
        with pytest.raises(MergettaError, match="members"):
            Bundle.from_bytes(encode(tensors, "mergetta.bundle", 2, {**header, "members": names}))


class TestClusters:
    def test_similar_experts_share_a_member_which_is_their_mean(self) -> None:
        experts = [expert(10 * place + i, 5.0 * place, 0.05) for i in range(4) for place in range(3)]
        bundle = build_bundle(BASE, experts, members=3)
        assert bundle.members is not None
        assert sorted(bundle.members.names) == ["d0", "d10", "d5"]
        assert bundle.members.experts.tolist() == [4, 4, 4]
        for i, name in enumerate(bundle.members.names):
            own = [each.groups["a.weight"] for each in experts if each.domain == name]
            np.testing.assert_allclose(bundle.mixture(np.eye(3)[i])["a.weight"], np.mean(own, axis=0), atol=0.05)

    def test_contributors_are_counted_once_each(self) -> None:
        clusters = Clusters(BASE, 1)
        for i, token in enumerate("aab"):
            clusters.add(i, expert(i), token)
        found = build_bundle(BASE, [expert(0)], members=0)
        members = clusters.members(found.basis)
        assert (members.experts.tolist(), members.contributors.tolist()) == ([3], [2])
        clusters.remove(2, expert(2), "b")
        assert clusters.members(found.basis).contributors.tolist() == [1]

    def test_retiring_undoes_adding(self) -> None:
        experts = [expert(i, 5.0 * (i % 3), 0.05) for i in range(9)]
        basis = build_bundle(BASE, experts, members=0).basis
        clusters, expected = Clusters(BASE, 3), Clusters(BASE, 3)
        for i, each in enumerate(experts):
            clusters.add(i, each)
        for i, each in enumerate(experts[:6]):
            expected.add(i, each)
        for i in (8, 7, 6):
            clusters.remove(i, experts[i])
        found, wanted = clusters.members(basis), expected.members(basis)
        assert found.experts.tolist() == wanted.experts.tolist()
        for name, value in wanted.coordinates.items():
            k = len(basis[name])
            np.testing.assert_allclose(found.coordinates[name][:, :k], value[:, :k], atol=1e-5)
        for i in range(6):
            clusters.remove(i, experts[i])
        assert not len(clusters) and not clusters.clusters

    def test_some_out_for_once(self) -> None:
        experts = [expert(i, 5.0 * (i % 3), 0.05) for i in range(6)]
        clusters = Clusters(BASE, 3)
        for i, each in enumerate(experts):
            clusters.add(i, each)
        other = clusters.without([(0, experts[0], ""), (3, experts[3], "")])
        assert (len(other), len(other.clusters)) == (4, 2)
        assert (len(clusters), len(clusters.clusters)) == (6, 3)

    def test_the_same_sequence_gives_the_same_bundle(self) -> None:
        experts = [expert(i, i % 7) for i in range(40)]
        one, two = (build_bundle(BASE, experts).to_bytes() for _ in range(2))
        assert one == two

    def test_experts_without_a_signature(self) -> None:
        experts = [replace(expert(i, i), signature=None) if i % 2 else expert(i, i) for i in range(20)]
        bundle = build_bundle(BASE, experts, members=4)
        assert bundle.members is not None and bundle.members.signatures is None
        assert bundle.members.experts.sum() == 20

    def test_at_least_one(self) -> None:
        with pytest.raises(MergettaError, match="at least one member"):
            build_bundle(BASE, [expert(0)], members=-1)
