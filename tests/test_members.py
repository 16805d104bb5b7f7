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
from mergetta.merging.scatter import Pool

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
            ("members/weights", np.zeros(3, np.float32)),
            ("members/weights", np.full(3, np.nan, np.float32)),
            ("members/weights", np.full(3, 1.5, np.float32)),
            ("members/signatures", np.ones((3, 3, 3), np.float32)),
            ("members/signatures", -np.ones((3, 2, 3), np.float32)),
            ("members/features", np.ones(3, np.float32)),
            ("members/experts", None),
        ],
    )
    def test_hostile_files_are_refused(self, name: str, value: Any) -> None:
        tensors, header = decode(build_bundle(BASE, [expert(i) for i in range(3)]).to_bytes(), "mergetta.bundle", 3)
        header = {key: entry for key, entry in header.items() if key not in ("format", "version")}
        changed = {**tensors, name: value} if value is not None else {k: v for k, v in tensors.items() if k != name}
        with pytest.raises(MergettaError, match="members"):
            Bundle.from_bytes(encode(changed, "mergetta.bundle", 3, header))

    @pytest.mark.parametrize("names", [3, ["a"], [1, 2, 3], ["a", "b", "c", "d"]])
    def test_hostile_names_are_refused(self, names: Any) -> None:
        tensors, header = decode(build_bundle(BASE, [expert(i) for i in range(3)]).to_bytes(), "mergetta.bundle", 3)
        header = {key: entry for key, entry in header.items() if key not in ("format", "version")}
        with pytest.raises(MergettaError, match="members"):
            Bundle.from_bytes(encode(tensors, "mergetta.bundle", 3, {**header, "members": names}))


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

    def test_neither_many_uploads_nor_many_who_are_alike_count_more(self) -> None:
        apart = [expert(i, 5 * i) for i in range(4)]
        alone = build_bundle(BASE, apart, contributors=["a", "b", "c", "c"]).known_members
        assert alone.weights.tolist() == [1, 1, 0.5, 0.5]
        assert build_bundle(BASE, apart, contributors=["a"] * 4).known_members.weights.tolist() == [1] * 4
        alike = build_bundle(BASE, [*apart, *(expert(9 + i) for i in range(3))], members=4).known_members
        assert sorted(alike.experts.tolist()) == [1, 1, 1, 4]
        assert alike.weights.tolist() == [1] * 4

    def test_contributors_are_counted_once_each(self) -> None:
        clusters = Clusters(BASE, 1)
        for i, token in enumerate("aab"):
            clusters.add(i, expert(i), token)
        found = build_bundle(BASE, [expert(0)], members=0)
        members = clusters.members(found.basis)
        assert (members.experts.tolist(), members.contributors.tolist()) == ([3], [2])
        clusters.remove(2, expert(2))
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
        other = clusters.without({0: experts[0], 3: experts[3]})
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

    def test_one_expert_does_not_take_the_others_signatures(self) -> None:
        """By having none, or one of another size, which also stops no union; its member has those of all together."""
        experts = [expert(i, i) for i in range(4)]
        for odd in (None, np.ones((2, 7))):
            told = [*experts, replace(expert(9, 9), signature=odd)]
            members = build_bundle(BASE, told).members
            assert members is not None and members.signatures is not None
            for i, each in enumerate(experts):
                np.testing.assert_allclose(members.signatures[i], each.signature, atol=1e-5)
            means = np.mean([each.signature[0] for each in experts if each.signature is not None], axis=0)
            np.testing.assert_allclose(members.signatures[4, 0], means, atol=1e-5)
            together = build_bundle(BASE, told, members=1).members
            assert together is not None and together.signatures is not None
            np.testing.assert_allclose(together.signatures[0, 0], means, atol=1e-5)

    def test_a_signature_comes_back_when_who_has_none_retires(self) -> None:
        clusters, silent = Clusters(BASE, 1), [replace(expert(i), signature=None) for i in (0, 1)]
        basis = build_bundle(BASE, silent, members=0).basis
        for i, each in enumerate([*silent, expert(2), expert(3)]):
            clusters.add(i, each)
        assert clusters.members(basis).signatures is None  # half of them do not tell
        clusters.remove(0, silent[0])
        found = clusters.members(basis).signatures
        known = [each.signature[0] for each in (expert(2), expert(3)) if each.signature is not None]
        assert found is not None
        np.testing.assert_allclose(found[0, 0], np.mean(known, axis=0), atol=1e-5)

    def test_memory_does_not_grow_with_wrong_signatures(self) -> None:
        clusters = Clusters(BASE, 2)
        for i in range(50):
            clusters.add(i, replace(expert(i), signature=np.ones((2, 100 + i)), features=np.ones((2, 100 + i))))
        assert clusters.nbytes < 2 * 2 * 4 * 2 * 104 * 8 + 3 * 16 * 8
        for i in range(49):
            clusters.remove(i, replace(expert(i), signature=np.ones((2, 100 + i)), features=np.ones((2, 100 + i))))
        assert len(clusters) == 1

    def test_keys_tell_experts_apart(self) -> None:
        clusters = Clusters(BASE, 2)
        clusters.add("a", expert(0))
        with pytest.raises(MergettaError, match="an expert 'a' already"):
            clusters.add("a", expert(1))
        with pytest.raises(MergettaError, match="no expert 'b' to remove"):
            clusters.remove("b", expert(0))

    def test_at_least_one(self) -> None:
        with pytest.raises(MergettaError, match="at least one member"):
            build_bundle(BASE, [expert(0)], members=-1)


def changed(seed: int, **values: float) -> Expert:
    """An expert of whose groups some are full of one value."""
    groups = {f"a.{kind}": np.full(4, value, np.float32) for kind, value in values.items()}
    return replace(expert(seed), groups={**expert(seed).groups, **groups})


HOSTILE = {
    "another signature": replace(expert(99), signature=np.ones((2, 5))),
    "no signature": replace(expert(99), signature=None),
    "features that nobody has": replace(expert(99), features=np.ones((2, 6))),
    "extreme weights": changed(99, weight=1e30, bias=-1e30),
    "extreme moments": changed(99, running_mean=9e8, running_var=1e17),
    "extreme signature": replace(expert(99), signature=np.stack([np.full(3, 3e38), np.full(3, 3e38)])),
    "extreme features": replace(expert(99), features=np.stack([np.full(6, -1e30), np.full(6, 1e30)])),
    "the source itself": replace(expert(99), groups=BASE),
}


class TestHostileExperts:
    """A bundle with any of them is valid, wherever it comes in the sequence, and is the old one when it has left."""

    @pytest.mark.parametrize("others", [1, 5, 40])
    @pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
    def test_one(self, hostile: Expert, others: int) -> None:
        experts = [expert(i, i % 3) for i in range(others)]
        for sequence in ([hostile, *experts], [*experts, hostile]):
            for most in (1, 4):
                bundle = Bundle.from_bytes(build_bundle(BASE, sequence, members=most).to_bytes())
                assert bundle.members is not None and bundle.members.experts.sum() == others + 1
                count = len(bundle.members.names)
                for w in (np.full(count, 1 / count), np.zeros(count)):
                    assert all(np.isfinite(value).all() for value in bundle.mixture(w).values())

    @pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE.keys())
    def test_a_pool_that_it_leaves(self, hostile: Expert) -> None:
        experts = [expert(i, i % 3) for i in range(10)]
        pool = Pool(BASE)
        pool.add_many({"x": hostile, **dict(enumerate(experts))})
        Bundle.from_bytes(pool.bundle(initial=0.1).to_bytes())
        pool.remove("x", hostile)
        wanted, found = build_bundle(BASE, experts).members, pool.bundle(initial=0.1).members
        assert wanted is not None and found is not None
        assert found.listed() == wanted.listed()
        np.testing.assert_allclose(found.signatures, wanted.signatures, atol=1e-5)

    def test_nothing_but_the_source(self) -> None:
        bundle = build_bundle(BASE, [BASE] * 20, members=4)
        assert bundle.members is not None and bundle.members.experts.sum() == 20
        for name, value in bundle.mixture(np.ones(4)).items():
            np.testing.assert_allclose(value, BASE[name], atol=1e-6)

    def test_a_thousand_of_the_same(self) -> None:
        """They share one direction and leave room for others."""
        clusters = Clusters(BASE, 4)
        for i in range(1000):
            clusters.add(i, expert(1), "ann")
        for i, about in enumerate((5.0, -5.0, 9.0)):
            clusters.add(f"other {i}", expert(i, about))
        members = clusters.members(build_bundle(BASE, [expert(1)], members=0).basis)
        assert sorted(zip(members.names, members.experts.tolist(), strict=True)) == [
            ("d-5", 1), ("d0", 1000), ("d5", 1), ("d9", 1),
        ]  # fmt: skip
        assert members.contributors.tolist() == [1] * 4


class TestOneWeightPerContributor:
    def test_by_hand(self) -> None:
        """One expert of `a` weighs as much as three of `b`, in the start and in a cluster's mean."""
        values = [4.0, 1.0, 2.0, 3.0]
        experts = [{"g": np.array([value])} for value in values]
        bundle = build_bundle({"g": np.zeros(1)}, experts, initial=0.25, members=1, contributors=["a", "b", "b", "b"])
        assert bundle.merge()["g"].tolist() == pytest.approx([3.0])  # (4 + (1 + 2 + 3) / 3) / 2
        assert bundle.member_tasks["g"].tolist() == [[pytest.approx(3.0)]]
        assert bundle.members is not None
        assert bundle.members.listed() == [{"member": "", "experts": 4, "contributors": 2}]
        with pytest.raises(MergettaError, match="2 contributors for 4 experts"):
            build_bundle({"g": np.zeros(1)}, experts, contributors=["a", "b"])

    def test_many_uploads_of_one_do_not_outvote_the_others(self) -> None:
        """Fifty of one token are one voice, and leave the others' members alone."""
        honest, evil = [expert(i, i / 10) for i in range(5)], [expert(100 + i, -5.0) for i in range(50)]
        names = [*range(5), *["evil"] * 50]
        exact: dict[str, Any] = {"keep": None, "tolerance": 0.0, "members": 6}
        few = build_bundle(BASE, [*honest, evil[0]], initial=1 / 6, **exact)
        many = build_bundle(BASE, [*honest, *evil], initial=1 / 55, contributors=names, **exact)
        for name, value in few.merge().items():
            np.testing.assert_allclose(many.merge()[name], value, atol=0.15)
        assert many.members is not None
        assert many.members.experts.tolist() == [1] * 5 + [50]

    def test_weighed_as_they_come_and_go(self) -> None:
        """Expert by expert, each contributor weighed anew, is what `build_bundle` makes of all at once."""
        experts = [expert(i, i % 3) for i in range(8)]
        names = ["a", "b", "a", "c", "a", "b", "d", "a"]
        pool = Pool(BASE, keep=None)
        for last in range(9):
            held = [i for i in range(last) if i != 2] if last == 8 else list(range(last))
            if last < 8:
                pool.add_many({last: experts[last]}, {last: names[last]})
                held = list(range(last + 1))
            else:
                pool.remove(2, experts[2])
            for name in set(names[: last + 1]):
                mine = {i: experts[i] for i in held if names[i] == name}
                pool.reweigh(mine, 1 / len(mine))
        kept = [experts[i] for i in held]
        wanted = build_bundle(BASE, kept, keep=None, initial=0.1, contributors=[names[i] for i in held])
        found = pool.bundle(initial=0.1)
        assert found.variances is not None and wanted.variances is not None
        np.testing.assert_allclose(found.variances.images, wanted.variances.images, atol=1e-6)
        np.testing.assert_allclose(found.variances.domains, wanted.variances.domains, atol=1e-5)
        for name, value in wanted.merge().items():
            np.testing.assert_allclose(found.merge()[name], value, atol=1e-5)
            np.testing.assert_allclose(found.member_tasks[name], wanted.member_tasks[name], atol=1e-4)
        assert found.members is not None and wanted.members is not None
        assert found.members.listed() == wanted.members.listed()
        with pytest.raises(MergettaError, match="no expert 2"):
            pool.reweigh({2: experts[2]}, 1.0)
