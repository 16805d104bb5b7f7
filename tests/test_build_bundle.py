"""Algorithm 1 against an independent, entry-by-entry computation, and its edge cases; moments as mixtures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mergetta import Bundle, Expert, MergettaError, build_bundle
from mergetta.groups import SMALLEST, kind_of, mixture_shares
from mergetta.merging.low_rank import adaptive_rank, factorise
from mergetta.merging.trim import keep_largest


def trimmed_directly(vector: np.ndarray, keep: float) -> np.ndarray:
    """NWS by sorting one vector."""
    wanted = max(1, int(keep * len(vector) + 0.5))
    threshold = sorted(map(abs, vector), reverse=True)[wanted - 1]
    return np.array([value if abs(value) >= threshold else 0.0 for value in vector])


def merged_directly(
    base: np.ndarray, experts: np.ndarray, keep: float, max_rank: int, tolerance: float, initial: float
) -> tuple[int, np.ndarray]:
    """(rank, merged weights) by way of the scatter matrix: θ₀ + c (Σ τ̂) P, P the projector on its top eigenvectors."""
    tasks = np.array([trimmed_directly(expert - base, keep) for expert in experts])
    scatter = sum(np.outer(task, task) for task in tasks)
    values, vectors = np.linalg.eigh(scatter)
    values, vectors = np.clip(values[::-1], 0, None), vectors[:, ::-1]
    if np.trace(scatter) == 0:
        return 0, base
    errors = 1 - np.cumsum(values) / values.sum()
    assume(np.abs(errors - tolerance * len(base)).min() > 1e-9 or tolerance == 0)  # no coin toss at the threshold
    possible = int(np.sum(values > values[0] * 1e-13))
    rank = next(
        (r for r in range(1, possible + 1) if 1 - values[:r].sum() / values.sum() < tolerance * len(base)), possible
    )
    rank = min(rank, max_rank)
    # with equal energies on both sides of the cut, which direction survives is arbitrary
    assume(rank == len(values) or values[rank - 1] - values[rank] > 1e-6 * values[0])
    projector = vectors[:, :rank] @ vectors[:, :rank].T
    return rank, base + initial * tasks.sum(axis=0) @ projector


@st.composite
def pools(draw: st.DrawFn) -> dict:
    count, size = draw(st.integers(1, 15)), draw(st.one_of(st.integers(1, 8), st.integers(9, 70)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):  # small integers: ties, zero vectors and duplicates are common
        base = rng.integers(-2, 3, size=size).astype(float)
        experts = base + rng.integers(-2, 3, size=(count, size)) * rng.integers(0, 2, size=(count, 1))
        experts = experts[rng.integers(0, count, size=count)]
    else:
        base = rng.normal(size=size).astype(np.float32).astype(float)
        experts = base + rng.normal(size=(count, size)) * rng.uniform(0.01, 1, size=(count, 1))
        experts = experts.astype(np.float32).astype(float)
    return {
        "base": base,
        "experts": experts,
        "keep": draw(st.sampled_from([0.05, 0.2, 0.4, 0.7, 1.0])),
        "max_rank": draw(st.integers(1, 8)),
        "tolerance": draw(st.sampled_from([0.0, 1e-4, 1e-3, 1e-2, 0.1])),
        "initial": draw(st.sampled_from([0.05, 0.1, 0.35, 1.0])),
    }


@settings(max_examples=300, deadline=None)
@given(pools())
def test_against_direct_computation(pool: dict) -> None:
    rank, merged = merged_directly(**pool)
    bundle = build_bundle(
        {"g": pool["base"]},
        [{"g": expert} for expert in pool["experts"]],
        pool["keep"],
        pool["max_rank"],
        pool["tolerance"],
        pool["initial"],
    )
    basis, coefficients = bundle.basis["g"].astype(float), bundle.coefficients["g"].astype(float)
    tasks = np.array([trimmed_directly(expert - pool["base"], pool["keep"]) for expert in pool["experts"]])
    assert len(basis) == rank
    np.testing.assert_allclose(basis @ basis.T, np.eye(rank), atol=1e-6)
    scale = max(1.0, float(np.abs(tasks).sum(axis=0).max()))  # float32 out: relative to the size of the sums
    np.testing.assert_allclose(
        coefficients, pool["initial"] * tasks.sum(axis=0) @ basis.T, atol=1e-6 * scale * len(tasks)
    )
    np.testing.assert_allclose(bundle.merge()["g"], merged, atol=1e-6 * scale * len(tasks))
    assert bundle.dimension == rank
    assert all(row[np.argmax(np.abs(row) > 0.999 * np.abs(row).max())] > 0 for row in basis)


@settings(max_examples=100, deadline=None)
@given(pools())
def test_factors_agree_with_the_definition_to_1e6(pool: dict) -> None:
    """In float64, before the rounding to float32: U Σ V = T, coefficients = c·1 U Σ."""
    tasks = keep_largest(pool["experts"] - pool["base"], pool["keep"])
    factors = factorise(tasks)
    np.testing.assert_allclose(factors.coordinates @ factors.basis, tasks, atol=1e-9)
    sigma = np.linalg.svd(tasks, compute_uv=False)[: len(factors.energies)]
    np.testing.assert_allclose(np.sqrt(factors.energies), sigma, atol=1e-9)
    np.testing.assert_allclose(np.linalg.norm(factors.coordinates, axis=0), sigma, atol=1e-9)


def test_a_matrix_that_lapack_cannot_factorise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as 98 experts' residuals of rank 45 in 64 channels; its transpose can be."""
    tasks = np.random.default_rng(0).normal(size=(9, 3)) @ np.random.default_rng(1).normal(size=(3, 6))
    expected, original = factorise(tasks), np.linalg.svd

    def stubborn(matrix: np.ndarray, **options: bool) -> tuple[np.ndarray, ...]:
        if len(matrix) == 9:
            raise np.linalg.LinAlgError("SVD did not converge")
        return original(matrix, **options)

    monkeypatch.setattr(np.linalg, "svd", stubborn)
    found = factorise(tasks)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.integers(1, 6), st.floats(0.01, 1.0), st.integers(0, 2**32))
def test_trim_on_small_vectors(size: int, rows: int, keep: float, seed: int) -> None:
    vectors = np.random.default_rng(seed).integers(-2, 3, size=(rows, size)).astype(float)  # many ties and zeros
    result = keep_largest(vectors, keep)
    for row, expected in zip(result, (trimmed_directly(vector, keep) for vector in vectors), strict=True):
        np.testing.assert_array_equal(row, expected)
    assert (np.abs(result).max(axis=1) == np.abs(vectors).max(axis=1)).all()


def test_trim_by_hand() -> None:
    vectors = np.array([[0.1, -0.5, 0.3, 0.2, -0.4], [1.0, 1.0, 1.0, 0.5, 0.0], [0.0] * 5])
    expected = [[0, -0.5, 0, 0, -0.4], [1, 1, 1, 0, 0], [0] * 5]  # 2 of 5; ties are all kept; zeros stay
    np.testing.assert_array_equal(keep_largest(vectors, 0.4), expected)


def test_rank_by_hand() -> None:
    energies = np.array([6.0, 3.0, 1.0])  # recovery errors 0.4, 0.1, 0.0 at ranks 1, 2, 3
    assert [adaptive_rank(energies, t) for t in (0.5, 0.4, 0.1001, 0.1, 1e-9, 0.0)] == [1, 2, 2, 3, 3, 3]
    assert adaptive_rank(np.array([]), 0.5) == 0


def test_threshold_scales_with_the_size_unless_told_otherwise() -> None:
    base = {"g": np.zeros(4)}
    experts = [{"g": np.array([3.0, 0, 0, 0])}, {"g": np.array([0, 1.0, 0, 0])}]  # error at rank 1: 1/10
    assert build_bundle(base, experts, keep=None, tolerance=0.05).dimension == 1  # 0.1 < 0.05 × 4
    assert build_bundle(base, experts, keep=None, tolerance=0.05, tolerance_per_entry=False).dimension == 2


def test_steps_can_be_switched_off(rng: np.random.Generator) -> None:
    base = {"g": np.zeros(20)}
    vectors = rng.normal(size=(6, 20))
    experts = [{"g": vector} for vector in vectors]
    plain = build_bundle(base, experts, keep=None, tolerance=None, max_rank=None, initial=0.1)
    assert plain.dimension == 6
    np.testing.assert_allclose(plain.merge()["g"], 0.1 * vectors.sum(axis=0), atol=1e-6)
    assert build_bundle(base, experts, tolerance=None, max_rank=3).dimension == 3
    per_expert = build_bundle(base, experts, keep=None, reduce=False, tolerance=None)
    assert per_expert.dimension == 6
    np.testing.assert_allclose(per_expert.basis["g"], vectors, atol=1e-6)
    np.testing.assert_allclose(per_expert.coefficients["g"], 0.1, atol=1e-7)


def test_all_zero_single_and_duplicate_experts() -> None:
    base = {"g": np.array([1.0, 2.0, 3.0])}
    nothing = build_bundle(base, [{"g": base["g"]}] * 3)
    assert nothing.dimension == 0
    np.testing.assert_array_equal(nothing.merge()["g"], base["g"])
    moved = {"g": np.array([1.0, 2.5, 3.0])}
    single = build_bundle(base, [moved], initial=1.0)
    np.testing.assert_allclose(single.merge()["g"], moved["g"], atol=1e-7)
    double = build_bundle(base, [moved, moved], initial=0.5, tolerance=0.0)
    assert double.dimension == 1
    np.testing.assert_allclose(double.merge()["g"], moved["g"], atol=1e-7)


def test_initial_per_expert() -> None:
    base = {"g": np.zeros(2)}
    experts = [{"g": np.array([1.0, 0.0])}, {"g": np.array([0.0, 1.0])}]
    bundle = build_bundle(base, experts, keep=None, tolerance=0.0, initial=[0.2, 0.7])
    np.testing.assert_allclose(bundle.merge()["g"], [0.2, 0.7], atol=1e-7)


def test_frozen_groups_are_merged_but_do_not_move() -> None:
    base = {"a": np.zeros(2), "b": np.zeros(2)}
    bundle = build_bundle(base, [{"a": np.ones(2), "b": np.ones(2)}], initial=1.0, frozen=["b"])
    assert bundle.moving == ("a",)
    assert bundle.dimension == 1
    np.testing.assert_allclose(bundle.merge({"a": np.zeros(1)})["b"], [1, 1], atol=1e-6)


def test_same_input_same_bytes_in_any_order_of_groups(rng: np.random.Generator) -> None:
    base = {name: rng.normal(size=9) for name in "abc"}
    experts = [{name: rng.normal(size=9) for name in "abc"} for _ in range(4)]
    first = build_bundle(base, experts)
    again = build_bundle(base, [dict(reversed(e.items())) for e in experts])
    assert first.to_bytes() == again.to_bytes()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"experts": []}, "at least one expert"),
        ({"keep": 0.0}, "keep must be a share"),
        ({"keep": 1.5}, "keep must be a share"),
        ({"max_rank": 0}, "max_rank must be at least 1"),
        ({"tolerance": -1.0}, "tolerance must be zero or positive"),
        ({"tolerance": float("nan")}, "tolerance must be zero or positive"),
        ({"initial": float("nan")}, "initial must be one finite number"),
        ({"initial": [0.1, 0.2]}, "one for each of the 1 experts"),
        ({"frozen": ["x"]}, "no such group"),
        ({"experts": [{"a": np.ones(2)}]}, "lacks the group 'b'"),
        ({"experts": [{"a": np.ones(2), "b": np.ones(3)}]}, r"shape \(3,\) in group 'b'"),
        ({"experts": [{"a": np.ones(2), "b": np.ones(2), "c": np.ones(2)}]}, "unknown group 'c'"),
        ({"experts": [{"a": np.ones(2), "b": np.array([1, np.nan])}]}, "NaN or infinite values in group 'b'"),
    ],
)
def test_bad_input(options: dict, sentence: str) -> None:
    arguments = {"base": {"a": np.zeros(2), "b": np.zeros(2)}, "experts": [{"a": np.ones(2), "b": np.ones(2)}]}
    with pytest.raises(MergettaError, match=sentence):
        build_bundle(**{**arguments, **options})


def test_experts_of_different_families() -> None:
    experts = [Expert({"g": np.ones(2)}, family=family) for family in ("one", "two")]
    with pytest.raises(MergettaError, match="different families"):
        build_bundle({"g": np.zeros(2)}, experts)
    assert build_bundle({"g": np.zeros(2)}, experts[:1]).family == "one"


def test_ars_without_rr_keeps_the_largest_task_vectors_and_lumps_the_rest() -> None:
    base = {"g": np.zeros(4)}
    experts = [{"g": np.array(v, float)} for v in ([3, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0.5, 0])]
    bundle = build_bundle(base, experts, keep=None, reduce=False, tolerance=0.05, initial=0.5)  # 0.05 · 4 entries
    # energies 9, 1, 0.25: leaving out 1.25 / 10.25 = 0.12 of them is below 0.2, so the first has its own coefficient
    assert bundle.basis["g"].tolist() == [[3, 0, 0, 0], [0, 0.5, 0.25, 0]]
    assert bundle.coefficients["g"].tolist() == [0.5, 1.0]
    whole = build_bundle(base, experts, keep=None, reduce=False, tolerance=None, initial=0.5)
    assert np.allclose(bundle.merge()["g"], whole.merge()["g"])
    nothing = build_bundle(base, [base, base], reduce=False)
    assert nothing.dimension == 0


NORM = {
    "bn.weight": np.ones(12, np.float32),
    "bn.bias": np.zeros(12, np.float32),
    "bn.running_mean": np.linspace(-1, 1, 12).astype(np.float32),
    "bn.running_var": np.linspace(0.5, 2, 12).astype(np.float32),
}


def domain_expert(seed: int, spread: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (value * np.exp(0.5 * spread * noise) if kind_of(name) == "variance" else value + spread * noise).astype(
            np.float32
        )
        for name, value in NORM.items()
        for noise in [rng.normal(size=value.shape)]
    }


def mixture(experts: list[dict[str, np.ndarray]], shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of a mixture of domains, with the source for what is left, by the law of total variance."""
    pool = [NORM, *experts]
    weights = np.array([1 - shares.sum(), *shares])
    means, variances = (np.array([e[f"bn.{k}"] for e in pool], float) for k in ("running_mean", "running_var"))
    mean = weights @ means
    return mean, weights @ (variances + (means - mean) ** 2)


@pytest.mark.parametrize("initial", [0.1, 1 / 14, 0.02, 0.5, [0.3, *[0.0] * 13], [0.05 * i for i in range(14)]])
def test_moments_merge_as_a_mixture_of_domains(initial: float | list[float]) -> None:
    experts = [domain_expert(i) for i in range(14)]
    merged = build_bundle(NORM, experts, initial=initial, moment_tolerance=0.0).merge()
    start = np.full(14, initial) if np.ndim(initial) == 0 else np.array(initial)
    mean, variance = mixture(experts, start / max(1.0, start.sum()))
    np.testing.assert_allclose(merged["bn.running_mean"], mean, atol=1e-4)
    np.testing.assert_allclose(merged["bn.running_var"], variance, atol=1e-3, rtol=1e-3)


def test_moments_are_not_trimmed_and_may_have_a_higher_rank() -> None:
    experts = [domain_expert(i) for i in range(9)]
    bundle = build_bundle(NORM, experts, keep=0.1, max_rank=2, tolerance=0.3)
    assert {name: len(bundle.basis[name]) <= 2 for name in NORM} == {
        "bn.weight": True,
        "bn.bias": True,
        "bn.running_mean": False,
        "bn.running_var": False,
    }
    for name in ("bn.running_mean", "bn.running_var"):
        assert np.count_nonzero(bundle.basis[name]) == bundle.basis[name].size
    same = build_bundle(NORM, experts, keep=None, max_rank=None, tolerance=None, reduce=False)
    for name in ("bn.running_mean", "bn.running_var"):  # whatever is done to the weights
        np.testing.assert_array_equal(bundle.basis[name], same.basis[name])
        np.testing.assert_array_equal(bundle.coefficients[name], same.coefficients[name])


def test_the_rank_of_moments_goes_by_their_own_tolerance() -> None:
    experts = [domain_expert(i) for i in range(9)]
    ranks = [
        len(build_bundle(NORM, experts, moment_tolerance=tolerance).basis["bn.running_mean"])
        for tolerance in (0.9, 0.2, 1e-2, 0.0)
    ]
    assert ranks == sorted(ranks)
    assert ranks[0] == 1
    assert ranks[-1] == 9
    assert build_bundle(NORM, experts).settings["moment_tolerance"] == 1e-4


def test_no_coefficient_of_a_moment_moves() -> None:
    bundle = build_bundle(NORM, [domain_expert(i) for i in range(5)], frozen=["bn.bias"])
    assert bundle.moving == ("bn.weight",)
    assert bundle.dimension == bundle.coefficients["bn.weight"].size == bundle.flatten().size
    assert list(bundle.unflatten(bundle.flatten())) == ["bn.weight"]
    start, moved = bundle.merge(), bundle.merge(bundle.flatten() + 3)
    assert (start["bn.weight"] != moved["bn.weight"]).any()
    for name in ("bn.bias", "bn.running_mean", "bn.running_var"):
        np.testing.assert_array_equal(start[name], moved[name])


def test_given_coefficients_of_moments_are_used() -> None:
    """By name they may be given: zero of all of them is the source."""
    bundle = build_bundle(NORM, [domain_expert(i) for i in range(5)])
    nothing = {name: np.zeros_like(w) for name, w in bundle.coefficients.items()}
    for name, value in bundle.merge(nothing).items():
        np.testing.assert_allclose(value, NORM[name], atol=1e-6)


def test_one_expert_in_full_is_that_expert() -> None:
    expert = domain_expert(3)
    merged = build_bundle(NORM, [expert], keep=None, initial=1.0, tolerance=0.0).merge()
    for name, value in expert.items():
        np.testing.assert_allclose(merged[name], value, atol=1e-5)


def test_experts_that_change_no_moments() -> None:
    experts = [{**NORM, "bn.weight": domain_expert(i)["bn.weight"]} for i in range(3)]
    bundle = build_bundle(NORM, experts)
    assert bundle.coefficients["bn.running_mean"].size == bundle.coefficients["bn.running_var"].size == 0
    for name in ("bn.running_mean", "bn.running_var"):
        np.testing.assert_allclose(bundle.merge()[name], NORM[name], rtol=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    st.floats(0.01, 30),
    st.floats(-2, 2),
    st.sampled_from([0.0, 1e-4, 0.1, 0.9]),
    st.integers(0, 2**32),
)
def test_merged_groups_can_always_be_used(
    seeds: list[int], spread: float, initial: float, tolerance: float, seed: int
) -> None:
    """However far the experts lie apart and whatever the coefficients: finite, and no variance below the floor."""
    experts = [domain_expert(s, min(spread, 10.0)) for s in seeds]
    bundle = build_bundle(NORM, experts, initial=initial, moment_tolerance=tolerance)
    moved = bundle.flatten() + np.random.default_rng(seed).normal(size=bundle.dimension)
    again = Bundle.from_bytes(bundle.to_bytes())
    for merged in (bundle.merge(), bundle.merge(moved), again.merge(moved)):
        assert all(np.isfinite(value).all() for value in merged.values())
        assert (merged["bn.running_var"] >= 0.999 * SMALLEST * NORM["bn.running_var"]).all()
    shares = np.abs(mixture_shares(np.full(len(experts), initial)))
    assert shares.sum() <= 1 + 1e-9


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bn.running_var": -NORM["bn.running_var"]}, "negative variances"),
        ({"bn.running_mean": np.full(12, np.nan)}, "NaN or infinite"),
    ],
)
def test_experts_with_wrong_moments(changes: dict, sentence: str) -> None:
    with pytest.raises(MergettaError, match=f"Expert 2.*{sentence}"):
        build_bundle(NORM, [domain_expert(0), {**domain_expert(1), **changes}])


def test_a_base_with_a_mean_alone() -> None:
    alone = {name: value for name, value in NORM.items() if name != "bn.running_var"}
    with pytest.raises(MergettaError, match="belong together"):
        build_bundle(alone, [alone])
