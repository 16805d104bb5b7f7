"""The streaming pool against `build_bundle` on the same experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergetta import Bundle, MergettaError, build_bundle
from mergetta.merging import scatter
from mergetta.merging.eigenvectors import lanczos, leading_directions
from mergetta.merging.low_rank import factorise
from mergetta.merging.scatter import Pool
from mergetta.merging.trim import keep_largest

Experts = list[dict[str, np.ndarray]]


def filled(base: dict, experts: Sequence[dict], keep: float | None = 0.4) -> Pool:
    """Experts under the keys 0, 1, …"""
    pool = Pool(base, keep)
    pool.add_many(dict(enumerate(experts)))
    return pool


def assert_same(found: Bundle, expected: Bundle, tolerance: float = 1e-5) -> None:
    """Same ranks, same merged groups; rows and coefficients too, so only for spectra without equal energies."""
    assert {n: len(b) for n, b in found.basis.items()} == {n: len(b) for n, b in expected.basis.items()}
    merged = expected.merge()
    for name, values in found.merge().items():
        np.testing.assert_allclose(values, merged[name], atol=tolerance)
        np.testing.assert_allclose(found.basis[name], expected.basis[name], atol=tolerance)
        np.testing.assert_allclose(found.coefficients[name], expected.coefficients[name], atol=tolerance)


def assert_same_members(found: Bundle, expected: Bundle, tolerance: float = 1e-4) -> None:
    mine, theirs = found.members, expected.members
    assert mine is not None and theirs is not None
    assert mine.listed() == theirs.listed()
    for name, tasks in expected.member_tasks.items():
        assert mine.further[name].shape == theirs.further[name].shape
        np.testing.assert_allclose(found.member_tasks[name], tasks, atol=tolerance)


def normal(rng: np.random.Generator, base: dict, count: int) -> Experts:
    """Experts of a few kinds, so that energies differ."""
    kinds = [{name: rng.normal(size=v.shape) for name, v in base.items()} for _ in range(3)]
    return [
        {
            name: (v + kinds[i % 3][name] * (1 + i % 3) + 0.5 * rng.normal(size=v.shape)).astype(np.float32)
            for name, v in base.items()
        }
        for i in range(count)
    ]


@pytest.fixture
def base(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: rng.normal(size=size).astype(np.float32) for name, size in (("a", 1), ("b", 6), ("c", 24))}


@pytest.fixture
def wide() -> dict[str, np.ndarray]:
    return {"g": np.zeros(200, np.float32)}


@pytest.fixture
def decompositions(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the matrices that np.linalg.eigh was given: 200 means that the Krylov search was not used or failed."""
    sizes: list[int] = []
    eigh = np.linalg.eigh

    def counted(matrix: np.ndarray) -> Any:
        sizes.append(len(matrix))
        return eigh(matrix)

    monkeypatch.setattr(np.linalg, "eigh", counted)
    yield sizes


@st.composite
def pools(draw: st.DrawFn) -> dict:
    count, sizes = draw(st.integers(1, 20)), draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base, stacked = {}, {}
    for i, size in enumerate(sizes):
        if draw(st.booleans()):  # small integers: ties, zero vectors and duplicates are common
            origin = rng.integers(-2, 3, size=size)
            experts = origin + rng.integers(-2, 3, size=(count, size)) * rng.integers(0, 2, size=(count, 1))
            experts = experts[rng.integers(0, count, size=count)]
        else:
            origin = rng.normal(size=size)
            experts = origin + rng.normal(size=(count, size)) * rng.uniform(0.01, 1, size=(count, 1))
        base[f"g{i}"], stacked[f"g{i}"] = origin.astype(np.float32), experts.astype(np.float32)
    return {
        "base": base,
        "experts": [{name: rows[i] for name, rows in stacked.items()} for i in range(count)],
        "keep": draw(st.sampled_from([None, 0.05, 0.4, 0.7, 1.0])),
        "max_rank": draw(st.sampled_from([None, 1, 2, 5])),
        "tolerance": draw(st.sampled_from([None, 0.0, 1e-3, 1e-2, 0.1])),
        "tolerance_per_entry": draw(st.booleans()),
        "initial": draw(st.sampled_from([0.05, 0.35, 1.0])),
    }


@settings(max_examples=250, deadline=None)
@given(pools(), st.data())
def test_equals_build_bundle(case: dict, data: st.DataObject) -> None:
    """In any order, one by one or at once, with others that have come and gone."""
    base, experts, keep = case.pop("base"), case.pop("experts"), case.pop("keep")
    expected = build_bundle(base, experts, keep, reduce=True, **case)
    split = data.draw(st.integers(0, len(experts)))
    visitors = experts[: data.draw(st.integers(0, len(experts)))]
    pool = filled(base, [*visitors, *experts[split:]], keep)
    for i, expert in enumerate(experts[:split]):
        pool.add(f"late {i}", expert)
    for i, visitor in enumerate(visitors):
        pool.remove(i, visitor)
    assert pool.count == len(experts)
    found = pool.bundle(**case)
    assert found.settings == expected.settings
    for name, origin in base.items():
        tasks = np.stack([e[name].astype(float) for e in experts]) - origin.astype(float)
        tasks = tasks if keep is None else keep_largest(tasks, keep)
        energies = np.append(factorise(tasks).energies, 0.0)
        threshold = (case["tolerance"] or 0.0) * (origin.size if case["tolerance_per_entry"] else 1)
        errors = 1 - np.cumsum(energies) / max(energies.sum(), 1e-30)
        if threshold and np.abs(errors - threshold).min() < 1e-9:
            continue  # a coin toss at the threshold
        rows, exact = found.basis[name].astype(float), expected.basis[name].astype(float)
        rank = len(exact)
        assert len(rows) == rank
        if not rank:
            continue
        gaps = np.abs(np.diff(energies)) / energies[0]
        if gaps[rank - 1] > 1e-6:  # else which of equal directions survives is arbitrary
            scale = max(1.0, float(np.abs(tasks).sum(axis=0).max()))
            np.testing.assert_allclose(found.merge()[name], expected.merge()[name], atol=1e-5 * scale)
        for i in range(rank):
            if min(gaps[i], gaps[i - 1] if i else 1.0) > 1e-6:
                np.testing.assert_allclose(rows[i], exact[i], atol=1e-5)
        np.testing.assert_allclose(rows @ rows.T, np.eye(rank), atol=1e-6)


def test_by_hand() -> None:
    pool = Pool({"g": np.zeros(3)}, keep=0.4)  # one of three entries is kept
    pool.add("a", {"g": np.array([0.0, -4.0, 1.0])})
    pool.add("b", {"g": np.array([0.0, -2.0, 1.0])})
    pool.add("c", {"g": np.array([3.0, 1.0, 1.0])})
    bundle = pool.bundle(initial=0.5, tolerance=None, frozen=["g"], family="f", settings={"loss": "roid"})
    np.testing.assert_allclose(bundle.basis["g"], [[0, 1, 0], [1, 0, 0]], atol=1e-7)  # energies 4² + 2² and 3²
    np.testing.assert_allclose(bundle.coefficients["g"], [-3, 1.5], atol=1e-7)
    assert (bundle.frozen, bundle.family, bundle.settings["loss"]) == (("g",), "f", "roid")


@pytest.mark.parametrize("options", [{}, {"tolerance": None}, {"tolerance": 0.0, "max_rank": None}])
def test_leaving_out_and_removing_equal_a_rebuild(base: dict, rng: np.random.Generator, options: dict) -> None:
    experts = normal(rng, base, 12)
    pool = filled(base, experts)
    everything = build_bundle(base, experts, initial=0.1, **options)
    assert_same(pool.bundle(initial=0.1, **options), everything)
    for gone in ([3], [0, 5, 11], list(range(9)), list(range(1, 12))):
        rest = build_bundle(base, [e for i, e in enumerate(experts) if i not in gone], initial=0.1, **options)
        left_out = pool.bundle(initial=0.1, without={i: experts[i] for i in gone}, **options)
        assert_same(left_out, rest)
        assert left_out.settings["experts"] == 12 - len(gone)
        assert_same(pool.bundle(initial=0.1, **options), everything)  # only for that once
        for i in gone:
            pool.remove(i, experts[i])
        assert_same(pool.bundle(initial=0.1, **options), rest)
        pool.add_many({i: experts[i] for i in gone})


def test_chunks_give_what_single_experts_give(
    base: dict, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scatter, "CHUNK", 3)
    experts = normal(rng, base, 10)
    single = Pool(base)
    for i, expert in enumerate(experts):
        single.add(i, expert)
    many = filled(base, experts)
    assert single.count == many.count == 10
    assert_same(many.bundle(initial=0.1), single.bundle(initial=0.1), 1e-6)


@pytest.mark.parametrize(("count", "keep"), [(1, None), (3, 0.4), (30, 0.4), (120, None), (250, 0.4)])
@pytest.mark.parametrize("noise", [False, True])
def test_krylov(
    wide: dict, rng: np.random.Generator, decompositions: list[int], count: int, keep: float | None, noise: bool
) -> None:
    """Fewer and more experts than dimensions, kinds of experts or pure noise; cold, then warm after each change."""
    experts = [{"g": rng.normal(size=200).astype(np.float32)} for _ in range(count + 1)]
    experts = experts if noise else normal(rng, wide, count + 1)
    options: dict = {"initial": 1 / count, "tolerance": 0.3 if noise else 1e-3, "tolerance_per_entry": False}
    pool = filled(wide, experts[:count], keep)
    assert_same(pool.bundle(**options), build_bundle(wide, experts[:count], keep, **options))
    pool.add(count, experts[count])
    assert_same(pool.bundle(**options), build_bundle(wide, experts, keep, **options))
    rest = build_bundle(wide, experts[1:], keep, **options)
    assert_same(pool.bundle(**options, without={0: experts[0]}), rest)
    pool.remove(0, experts[0])
    assert_same(pool.bundle(**options), rest)
    assert max(decompositions) < 200


def test_full_spectrum_when_no_rank_limits_it(wide: dict, rng: np.random.Generator, decompositions: list[int]) -> None:
    experts = normal(rng, wide, 9)
    pool = filled(wide, experts)
    for options in ({"tolerance": None}, {"tolerance": 1e-4, "tolerance_per_entry": False}):
        found = pool.bundle(initial=0.1, max_rank=None, **options)
        assert_same(found, build_bundle(wide, experts, initial=0.1, max_rank=None, **options))
        assert found.dimension == 9
    assert decompositions == [200, 200]
    assert pool.bundle(initial=0.1, max_rank=None).dimension == 1  # 0.01 × 200 > 1: rank 1 whatever the spectrum
    assert max(decompositions[2:]) < 200


@pytest.mark.parametrize("count", [1, 2, 40])
def test_rounding_of_the_decomposition_is_no_direction(wide: dict, rng: np.random.Generator, count: int) -> None:
    pool = filled(wide, normal(rng, wide, count), keep=None)
    assert pool.bundle(initial=0.1, max_rank=None, tolerance=0.0).dimension == count


def axes(energies: Sequence[float], size: int = 200) -> Experts:
    """Experts along the coordinate axes: the energies are the eigenvalues of G."""
    return [{"g": np.sqrt(energy) * np.eye(size)[i]} for i, energy in enumerate(energies)]


@pytest.mark.parametrize("others", [[0.5, 0.5], np.linspace(0.5, 0.05, 120)])
def test_multiple_eigenvalues_are_all_found(wide: dict, others: Sequence[float]) -> None:
    """A Krylov space holds one direction of each, so one search finds a single 4 and then the 2."""
    pool = filled(wide, axes([4, 4, 2, *others]), keep=None)
    for rank, expected in ((2, [1, 1, 0, 0]), (3, [1, 1, 0.5**0.5, 0])):
        bundle = pool.bundle(initial=0.5, tolerance=None, max_rank=rank)
        np.testing.assert_allclose(bundle.merge()["g"][:4], expected, atol=1e-5)


def test_warm_start_sees_a_direction_orthogonal_to_all_before(wide: dict) -> None:
    experts = axes([9, 8, 7, 6, 5, 4, 8.5])
    pool = filled(wide, experts[:6], keep=None)
    pool.bundle(initial=1.0, tolerance=None, max_rank=3)
    pool.add(6, experts[6])
    found = pool.bundle(initial=1.0, tolerance=None, max_rank=3)
    assert np.argmax(np.abs(found.basis["g"]), axis=1).tolist() == [0, 6, 1]
    pool.remove(0, experts[0])  # the third now is one that was not in the last bundle
    found = pool.bundle(initial=1.0, tolerance=None, max_rank=3)
    assert np.argmax(np.abs(found.basis["g"]), axis=1).tolist() == [6, 1, 2]


@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
def test_nearly_equal_energies_at_the_cut(wide: dict, rng: np.random.Generator, gap: float) -> None:
    energies = np.concatenate([[3, 2, 1 + gap, 1], np.linspace(0.9, 0.1, 60)])
    rotation = np.linalg.qr(rng.normal(size=(200, 64)))[0].T
    tasks = np.linalg.qr(rng.normal(size=(64, 64)))[0] @ (np.sqrt(energies)[:, None] * rotation)
    matrix = tasks.T @ tasks
    found = leading_directions(matrix, 0.0, 3, None, start=tasks[:1], angle=1e-6)
    np.testing.assert_allclose(found.T @ found, rotation[:3].T @ rotation[:3], atol=1e-6)


def test_all_energies_equal(wide: dict) -> None:
    bundle = filled(wide, axes([1.0] * 200), keep=None).bundle(initial=1.0, tolerance=None)
    assert bundle.dimension == 5
    np.testing.assert_allclose(np.linalg.norm(bundle.basis["g"], axis=1), 1, atol=1e-6)


def test_a_search_that_takes_too_long_gives_way_to_the_full_decomposition(rng: np.random.Generator) -> None:
    energies = 1 - 1e-9 * np.arange(160.0) ** 2  # crowded at the upper end
    rotation = np.linalg.qr(rng.normal(size=(160, 160)))[0].T
    matrix = rotation.T @ (energies[:, None] * rotation)
    assert lanczos(matrix, 5, rotation[:1], 1e-6) is None
    found = leading_directions(matrix, 0.0, 5, None, start=rotation[:1], angle=1e-6)
    np.testing.assert_allclose(found.T @ found, rotation[:5].T @ rotation[:5], atol=1e-4)


def test_rounding_left_by_removed_experts_is_no_direction(rng: np.random.Generator) -> None:
    base = {name: rng.normal(size=size).astype(np.float32) for name, size in (("g", 7), ("h", 150), ("i", 7))}
    large = [{n: v + 1e3 * rng.normal(size=v.size) * (n != "i") for n, v in base.items()} for _ in range(8)]
    small = {n: v + np.where(np.arange(v.size) == 3, 0.5, 0.0) for n, v in base.items()}
    pool = filled(base, [*large, base, small])  # one expert has not moved at all
    for i in (*range(0, 8, 2), *range(1, 8, 2)):
        pool.remove(i, large[i])
    options: dict = {"initial": 1.0, "tolerance": 0.0, "max_rank": None}
    assert_same(pool.bundle(**options), build_bundle(base, [base, small], **options))
    assert_same(pool.bundle(initial=1.0, tolerance=None), build_bundle(base, [base, small], initial=1.0))
    for bundle in (pool.bundle(**options, without={9: small}), pool.bundle(initial=1.0, without={9: small})):
        assert bundle.dimension == 0
    pool.remove(9, small)
    assert all(np.abs(pool._scatter[name].matrix).max() > 0 for name in "gh")  # there is rounding left
    assert pool.bundle(**options).dimension == 0
    np.testing.assert_array_equal(pool.bundle(**options).merge()["g"], base["g"])


def test_hundreds_of_changes_do_not_drift(base: dict, rng: np.random.Generator) -> None:
    kept, passing = normal(rng, base, 5), normal(rng, base, 300)
    pool = filled(base, [*kept, *passing[:10]])
    for i in range(290):
        pool.add(15 + i, passing[10 + i])
        pool.remove(5 + i, passing[i])
    for i in range(290, 300):
        pool.remove(5 + i, passing[i])
    for options in ({}, {"tolerance": 0.0, "max_rank": None}):
        assert_same(pool.bundle(initial=0.1, **options), build_bundle(base, kept, initial=0.1, **options), 1e-6)
    assert 0 < pool.drift < 1e-9
    giant = {name: 1e5 * expert for name, expert in passing[0].items()}
    pool.add("giant", giant)
    pool.remove("giant", giant)
    assert pool.drift > 1e-9


def test_empty_pool(base: dict, rng: np.random.Generator) -> None:
    first, second = normal(rng, base, 2)
    pool = Pool(base)
    assert pool.drift == 0
    with pytest.raises(MergettaError, match="at least one expert"):
        pool.bundle(initial=0.1)
    with pytest.raises(MergettaError, match="no expert 0"):
        pool.remove(0, first)
    pool.add_many({})
    pool.add_many({0: first, 1: second})
    with pytest.raises(MergettaError, match="at least one expert"):
        pool.bundle(initial=0.1, without={0: first, 1: second})
    pool.remove(0, first)
    pool.remove(1, second)
    assert pool.count == 0
    with pytest.raises(MergettaError, match="at least one expert"):
        pool.bundle(initial=0.1)
    pool.add(0, first)
    assert pool.drift == filled(base, [first]).drift
    assert pool.bundle(initial=0.1).to_bytes() == filled(base, [first]).bundle(initial=0.1).to_bytes()


def test_memory_does_not_grow_with_the_experts(wide: dict, rng: np.random.Generator) -> None:
    few, many = (filled(wide, normal(rng, wide, count)) for count in (16, 300))
    assert few.nbytes == many.nbytes == 200 * 4 + 200 * 200 * 8 + 200 * 8 + 17 * 200 * 8
    few.bundle(initial=0.1, tolerance=None, max_rank=2)
    assert few.nbytes == many.nbytes + 2 * 200 * 8


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"a": np.ones(2)}, "lacks the group 'b'"),
        ({"a": np.ones(2), "b": np.ones(3)}, r"shape \(3,\) in group 'b'"),
        ({"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}, "unknown group 'c'"),
        ({"a": np.ones(2), "b": np.array([1, np.nan])}, "NaN or infinite values in group 'b'"),
        ({"a": np.ones(2), "b": np.array([1, 1e39])}, "NaN or infinite values in group 'b'"),  # too large for float32
    ],
)
def test_an_expert_that_does_not_fit_changes_nothing(values: dict, sentence: str) -> None:
    good = {"a": np.array([1.0, 0.0]), "b": np.array([0.0, 2.0])}
    pool = filled({"a": np.zeros(2), "b": np.zeros(2)}, [good, good])
    before = pool.bundle(initial=0.1).to_bytes()
    with pytest.raises(MergettaError, match=f"The expert .*{sentence}"):
        pool.add(2, values)
    with pytest.raises(MergettaError, match=f"Expert 2 .*{sentence}"):
        pool.add_many({2: good, 3: values})
    with pytest.raises(MergettaError, match=sentence):
        pool.remove(0, values)
    with pytest.raises(MergettaError, match=sentence):
        pool.bundle(initial=0.1, without={0: values})
    assert pool.count == 2
    assert pool.bundle(initial=0.1).to_bytes() == before


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_rank": 0}, "max_rank must be at least 1"),
        ({"tolerance": -1.0}, "tolerance must be zero or positive"),
        ({"tolerance": float("nan")}, "tolerance must be zero or positive"),
        ({"initial": float("nan")}, "initial must be one finite number"),
        ({"frozen": ["x"]}, "no such group"),
    ],
)
def test_bad_options(options: dict, sentence: str) -> None:
    pool = filled({"g": np.zeros(2)}, [{"g": np.ones(2)}])
    with pytest.raises(MergettaError, match=sentence):
        pool.bundle(**{"initial": 0.1, **options})


@pytest.mark.parametrize(("base", "keep"), [({}, 0.4), ({"g": np.zeros((2, 2))}, 0.4), ({"g": np.zeros(2)}, 0.0)])
def test_bad_pool(base: dict, keep: float) -> None:
    with pytest.raises(MergettaError):
        Pool(base, keep)


def with_moments(rng: np.random.Generator, count: int, size: int = 12) -> tuple[dict[str, np.ndarray], Experts]:
    """A BatchNorm layer and experts of a few kinds, whose moments differ."""
    base = {
        "bn.weight": np.ones(size, np.float32),
        "bn.running_mean": rng.normal(size=size).astype(np.float32),
        "bn.running_var": rng.uniform(0.5, 2, size).astype(np.float32),
    }
    experts = normal(rng, base, count)
    return base, [{**e, "bn.running_var": base["bn.running_var"] * np.exp(e["bn.weight"] / 4)} for e in experts]


@pytest.mark.parametrize("count", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("initial", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("keep", [None, 0.4])
def test_moments_as_in_build_bundle(rng: np.random.Generator, count: int, initial: float, keep: float | None) -> None:
    """Untrimmed, of any rank, with the shares of a mixture that depend on how many experts there are."""
    base, experts = with_moments(rng, count)
    pool = filled(base, experts, keep)
    expected = build_bundle(base, experts, keep, initial=initial)
    assert_same(pool.bundle(initial=initial), expected, 1e-4)
    assert pool.bundle(initial=initial).settings == expected.settings
    assert len(expected.basis["bn.running_mean"]) == min(count, 12) or count > 5
    if count > 1:
        rest = build_bundle(base, experts[1:], keep, initial=initial)
        assert_same(pool.bundle(initial=initial, without={0: experts[0]}), rest, 1e-4)
        pool.remove(0, experts[0])
        assert_same(pool.bundle(initial=initial), rest, 1e-4)


def test_moments_of_wide_layers(rng: np.random.Generator) -> None:
    """Where weights are searched in a Krylov space and moments, whose rank nothing limits, cannot be."""
    base, experts = with_moments(rng, 9, 200)
    found, expected = filled(base, experts).bundle(initial=0.1), build_bundle(base, experts, initial=0.1)
    assert_same(found, expected, 1e-4)
    assert len(found.basis["bn.running_mean"]) == 9


@pytest.mark.parametrize("tolerance", [0.0, 1e-3, 0.3])
def test_the_tolerance_of_moments(rng: np.random.Generator, tolerance: float) -> None:
    base, experts = with_moments(rng, 9)
    found = filled(base, experts).bundle(initial=0.1, moment_tolerance=tolerance)
    assert_same(found, build_bundle(base, experts, initial=0.1, moment_tolerance=tolerance), 1e-4)


@pytest.mark.parametrize("count", [1, 5, 16, 17, 60])
def test_members_as_in_build_bundle(rng: np.random.Generator, count: int) -> None:
    """Experts themselves, or clusters of them; one by one or at once."""
    base, experts = with_moments(rng, count)
    pool = filled(base, experts[: count // 2])
    for i in range(count // 2, count):
        pool.add(i, experts[i])
    expected = build_bundle(base, experts, initial=0.1)
    assert_same_members(pool.bundle(initial=0.1), expected)
    assert_same_members(filled(base, experts).bundle(initial=0.1), expected)
    assert pool.bundle(initial=0.1).to_bytes() == pool.bundle(initial=0.1).to_bytes()


def test_members_of_the_rest(rng: np.random.Generator) -> None:
    base, experts = with_moments(rng, 12)
    pool = filled(base, experts)
    rest = build_bundle(base, [*experts[:3], *experts[5:]], initial=0.1)
    gone = {i: experts[i] for i in (3, 4)}
    assert_same_members(pool.bundle(initial=0.1, without=gone), rest)
    assert_same_members(pool.bundle(initial=0.1), build_bundle(base, experts, initial=0.1))  # only for that once
    for i, expert in gone.items():
        pool.remove(i, expert)
    assert_same_members(pool.bundle(initial=0.1), rest)


def test_clusters_of_the_rest(rng: np.random.Generator) -> None:
    """Whoever leaves, by either way, leaves the others where they are: their cluster's mean is that of the rest."""
    base, experts = with_moments(rng, 40)
    pool = filled(base, experts)
    gone = {i: experts[i] for i in range(0, 40, 3)}
    once = pool.bundle(initial=0.1, without=gone)
    for i, expert in gone.items():
        pool.remove(i, expert)
    found = pool.bundle(initial=0.1)
    assert_same_members(found, once)
    assert found.members is not None and found.members.experts.sum() == 26
    total = found.members.experts @ found.member_tasks["bn.weight"]
    left = [expert["bn.weight"] - base["bn.weight"] for i, expert in enumerate(experts) if i not in gone]
    np.testing.assert_allclose(total, np.sum(left, axis=0), atol=0.5)  # members are kept within 1e-3 of the energy


def test_contributors(rng: np.random.Generator) -> None:
    base, experts = with_moments(rng, 3)
    pool = Pool(base, members=1)
    pool.add_many(dict(enumerate(experts[:2])), {0: "ann", 1: "ann"})
    pool.add(2, experts[2], "bob")

    def counted(without: dict | None = None) -> list[int]:
        members = pool.bundle(initial=0.1, without=without).members
        assert members is not None
        return members.contributors.tolist()

    assert (counted(), counted({2: experts[2]}), counted({0: experts[0]})) == ([2], [1], [2])
    pool.remove(2, experts[2])
    assert counted() == [1]
    assert Pool(base, members=0).members == 0


def test_without_members(rng: np.random.Generator) -> None:
    base, experts = with_moments(rng, 20)
    pool = Pool(base, members=0)
    pool.add_many(dict(enumerate(experts)))
    found = pool.bundle(initial=0.1, without={0: experts[0]})
    assert found.members is None and found.settings == build_bundle(base, experts[1:], members=0).settings
    assert pool.nbytes < filled(base, experts).nbytes
    with pytest.raises(MergettaError, match="at least one member"):
        Pool(base, members=-1)


@pytest.mark.parametrize("members", [0, 16])
def test_keys_tell_experts_apart(base: dict, rng: np.random.Generator, members: int) -> None:
    first, second = normal(rng, base, 2)
    pool = Pool(base, members=members)
    pool.add("a", first)
    pool.add("b", first)  # the same content may come twice
    before = pool.bundle(initial=0.1).to_bytes()
    with pytest.raises(MergettaError, match="has an expert 'b' already"):
        pool.add_many({"c": second, "b": second})
    with pytest.raises(MergettaError, match="has no expert 'c'"):
        pool.remove("c", second)
    with pytest.raises(MergettaError, match="has no expert 'c'"):
        pool.bundle(initial=0.1, without={"c": second})
    assert pool.count == 2
    assert pool.bundle(initial=0.1).to_bytes() == before


def test_moments_too_large_to_be_squared(rng: np.random.Generator) -> None:
    base, experts = with_moments(rng, 3)
    pool = filled(base, experts)
    before = pool.bundle(initial=0.1).to_bytes()
    for size in (1e30, 2e9):
        huge = {**experts[0], "bn.running_mean": np.full(12, size, np.float32)}
        with pytest.raises(MergettaError, match="The expert has moments that are too large"):
            pool.add("x", huge)
        with pytest.raises(MergettaError, match="Expert 4 has moments that are too large"):
            build_bundle(base, [*experts, huge])
    assert pool.bundle(initial=0.1).to_bytes() == before


def test_wrong_moments_do_not_get_into_a_pool(rng: np.random.Generator) -> None:
    base, experts = with_moments(rng, 3)
    pool = filled(base, experts)
    before = pool.bundle(initial=0.1).to_bytes()
    with pytest.raises(MergettaError, match="negative variances"):
        pool.add("x", {**experts[0], "bn.running_var": -experts[0]["bn.running_var"]})
    with pytest.raises(MergettaError, match="belong together"):
        Pool({"bn.running_mean": np.zeros(2)})
    assert pool.count == 3
    assert pool.bundle(initial=0.1).to_bytes() == before
