"""Public merging recipes: values worked out by hand, small and degenerate groups, and the bundles made of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mergetta import Bundle, Expert, MergettaError, ZOMerge
from mergetta.merging import RECIPE_NAMES, RECIPES, merge_by_recipe
from mergetta.merging.recipes import average, breadcrumbs, dare, knots, task_arithmetic, ties
from mergetta.merging.trim import drop_at_random, keep_middle

from .numpy_runtime import NumpyRuntime

EVERY = pytest.mark.parametrize("name", RECIPES)
ORDERLESS = pytest.mark.parametrize("name", ["average", "task-arithmetic", "ties", "breadcrumbs"])
CERTAIN = pytest.mark.parametrize("name", [name for name in RECIPES if name != "dare"])  # no chance of losing it all


@st.composite
def small_matrices(draw: st.DrawFn) -> np.ndarray:
    """Small integers: ties, zero rows, duplicates and rows of opposite sign are common, and sums are exact."""
    count, size = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return (rng.integers(-3, 4, size=(count, size)) * rng.integers(0, 2, size=(count, 1))).astype(float)


@st.composite
def real_matrices(draw: st.DrawFn) -> np.ndarray:
    count, size = draw(st.integers(1, 15)), draw(st.one_of(st.integers(1, 8), st.integers(9, 130)))
    return np.random.default_rng(draw(st.integers(0, 2**32))).normal(size=(count, size))


# By hand


def test_average_and_task_arithmetic_by_hand() -> None:
    tasks = np.array([[1.0, 2.0, -3.0], [3.0, -2.0, 0.0]])
    assert average(tasks).tolist() == [2.0, 0.0, -1.5]
    assert task_arithmetic(tasks, scale=0.5).tolist() == [2.0, 0.0, -1.5]
    np.testing.assert_allclose(task_arithmetic(tasks), [1.2, 0.0, -0.9])  # 0.3 × the sum


def test_ties_by_hand() -> None:
    tasks = np.array([[4, -1, 0.5, 3, 0], [2, -5, 0.1, -1, 0], [1, 6, 0.2, -4, 0]])
    # two of five are kept: [4 . . 3 .], [2 -5 . . .], [. 6 . -4 .]; sums 6, 1, 0, -1, 0 elect +, +, none, -, none
    assert ties(tasks, keep=0.4).tolist() == [3.0, 6.0, 0.0, -4.0, 0.0]
    assert ties(tasks, keep=0.4, scale=0.5).tolist() == [1.5, 3.0, 0.0, -2.0, 0.0]
    # by default one of five: [4 …], [. -5 …], [. 6 …]
    assert ties(tasks).tolist() == [4.0, 6.0, 0.0, 0.0, 0.0]


def test_ties_with_equal_masses_elects_nothing() -> None:
    assert ties(np.array([[2.0], [-1.0], [-1.0]])).tolist() == [0.0]


def test_dare_by_hand() -> None:
    tasks = np.array([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]])
    # generator(0, 0, "dare/g") draws .22 .96 .97 .10 and .69 .79 .58 .35: at 0.5, [. 4 6 .] and [20 40 60 .] are left
    assert dare(tasks, drop=0.5, group="g").tolist() == [10.0, 22.0, 33.0, 0.0]
    assert dare(tasks, drop=0.5, scale=2.0, group="g").tolist() == [20.0, 44.0, 66.0, 0.0]
    np.testing.assert_allclose(dare(tasks, group="g"), [0, 10, 15, 0])  # 0.9 leaves [. 20 30 .] and nothing


def test_breadcrumbs_by_hand() -> None:
    tasks = np.array([[9.0, -4.0, 3.0, 1.0, -2.0], [1.0, 2.0, -3.0, 8.0, 5.0]])
    # one largest and two smallest go: [. -4 3 . .] and [. . -3 . 5]
    assert breadcrumbs(tasks, drop_largest=0.2, drop_smallest=0.4, scale=0.5).tolist() == [0.0, -2.0, 0.0, 0.0, 2.5]
    # by default no outlier (0.05 entries) and four smallest (4.25): [9 …] and [… 8 .]
    np.testing.assert_allclose(breadcrumbs(tasks), [2.7, 0, 0, 2.4, 0])


def test_knots_by_hand() -> None:
    basis = np.array([[0.6, 0.8], [0.8, -0.6]])
    coordinates = np.array([[3.0, 1.0], [6.0, -0.5]])  # orthogonal columns: this is U Σ
    tasks = coordinates @ basis
    # all coordinates: mean of 3 and 6 along the first; + is elected along the second: 4.5 (.6, .8) + 1 (.8, -.6)
    np.testing.assert_allclose(knots(tasks, keep=1.0, scale=1.0), [3.5, 3.0])
    np.testing.assert_allclose(knots(tasks, keep=0.5, scale=1.0), [2.7, 3.6])  # the first coordinate alone
    np.testing.assert_allclose(knots(tasks), [1.62, 2.16])  # 0.6 of it
    assert not np.allclose(knots(tasks, keep=1.0, scale=1.0), ties(tasks, keep=1.0))


# The sparsifiers


def middle_directly(vector: np.ndarray, drop_largest: float, drop_smallest: float) -> np.ndarray:
    """One vector, by sorting."""
    falling = sorted(map(abs, vector), reverse=True)
    top = min(int(drop_largest * len(vector) + 0.5), len(vector) - 1)
    while top and not falling[top]:  # nothing but outliers
        top -= 1
    bottom = min(int(drop_smallest * len(vector) + 0.5), len(vector) - top - 1)
    highest, lowest = falling[top], falling[len(falling) - bottom - 1]
    return np.array([value if lowest <= abs(value) <= highest else 0.0 for value in vector])


@settings(max_examples=300, deadline=None)
@given(small_matrices(), st.floats(0, 0.5), st.floats(0, 0.49))
def test_middle_of_small_vectors(vectors: np.ndarray, drop_largest: float, drop_smallest: float) -> None:
    result = keep_middle(vectors, drop_largest, drop_smallest)
    for row, vector in zip(result, vectors, strict=True):
        np.testing.assert_array_equal(row, middle_directly(vector, drop_largest, drop_smallest))
    assert (result.any(axis=1) == vectors.any(axis=1)).all()


def test_middle_keeps_ties_and_the_last_entry() -> None:
    np.testing.assert_array_equal(keep_middle(np.array([[5.0]]), 0.5, 0.49), [[5.0]])
    np.testing.assert_array_equal(keep_middle(np.full((1, 4), -2.0), 0.25, 0.5), np.full((1, 4), -2.0))
    np.testing.assert_array_equal(keep_middle(np.array([[7.0, 0, 0, 0]]), 0.25, 0.5), [[7.0, 0, 0, 0]])


def test_random_drop_is_unbiased() -> None:
    vectors = np.array([[1.0, -2.0], [0.0, 4.0]])
    many = np.tile(vectors, (20_000, 1, 1)).reshape(-1, 2)
    dropped = drop_at_random(many, 0.9, np.random.default_rng(0)).reshape(-1, 2, 2)
    np.testing.assert_allclose(dropped.mean(axis=0), vectors, atol=0.43)  # five deviations of 3 · 4 / √20000
    assert set(np.unique(dropped[:, 0, 1]).round(9)) == {-20.0, 0.0}


# What every recipe must hold


@EVERY
@settings(max_examples=100, deadline=None)
@given(tasks=st.one_of(small_matrices(), real_matrices()))
def test_shape_finite_and_odd(name: str, tasks: np.ndarray) -> None:
    before = tasks.copy()
    merged = RECIPES[name](tasks)
    assert merged.shape == tasks.shape[1:]
    assert merged.dtype == np.float64
    assert np.isfinite(merged).all()
    np.testing.assert_array_equal(tasks, before)
    if name != "knots":  # there, equal singular values make the basis arbitrary
        np.testing.assert_array_equal(RECIPES[name](-tasks), -merged)
    unmoved = ~tasks.any(axis=0)
    np.testing.assert_allclose(merged[unmoved], 0, atol=1e-12)


@ORDERLESS
@settings(max_examples=100, deadline=None)
@given(tasks=small_matrices(), seed=st.integers(0, 2**32))
def test_order_of_experts_and_of_entries_does_not_matter(name: str, tasks: np.ndarray, seed: int) -> None:
    rng = np.random.default_rng(seed)
    merged = RECIPES[name](tasks)
    np.testing.assert_array_equal(RECIPES[name](rng.permutation(tasks)), merged)
    columns = rng.permutation(tasks.shape[1])
    np.testing.assert_array_equal(RECIPES[name](tasks[:, columns]), merged[columns])


@settings(max_examples=100, deadline=None)
@given(real_matrices(), st.integers(0, 2**32))
def test_order_of_experts_does_not_matter_to_knots(tasks: np.ndarray, seed: int) -> None:
    sigma = np.linalg.svd(tasks, compute_uv=False)
    assume(len(sigma) == 1 or np.diff(sigma).max() < -1e-4 * sigma[0])
    shuffled = np.random.default_rng(seed).permutation(tasks)
    np.testing.assert_allclose(knots(shuffled), knots(tasks), atol=1e-8)


@settings(max_examples=100, deadline=None)
@given(st.one_of(small_matrices(), real_matrices()))
def test_single_expert(tasks: np.ndarray) -> None:
    alone = tasks[:1]
    for merged in (
        average(alone),
        task_arithmetic(alone, scale=1.0),
        ties(alone, keep=1.0),
        dare(alone, drop=0.0),
        breadcrumbs(alone, drop_largest=0.0, drop_smallest=0.0, scale=1.0),
    ):
        np.testing.assert_array_equal(merged, alone[0])
    np.testing.assert_allclose(knots(alone, scale=1.0), alone[0], atol=1e-12)


@CERTAIN
@pytest.mark.parametrize("size", range(1, 9))
def test_no_group_is_too_small(name: str, size: int) -> None:
    """Public code keeps int(0.2 · 4) = 0 entries here."""
    merged = RECIPES[name](np.arange(1.0, size + 1)[None])
    assert merged[-1] > 0
    tied = RECIPES[name](np.full((3, size), -1.0))
    assert (tied < 0).all()


@EVERY
@pytest.mark.parametrize("size", range(1, 9))
def test_nothing_merges_to_nothing(name: str, size: int) -> None:
    np.testing.assert_array_equal(RECIPES[name](np.zeros((3, size))), np.zeros(size))


@EVERY
@pytest.mark.parametrize(
    ("tasks", "sentence"),
    [
        (np.array([[1.0, np.nan]]), "NaN or infinite"),
        (np.array([[1.0], [-np.inf]]), "NaN or infinite"),
        (np.ones(3), r"the shape \(3,\)"),
        (np.ones((0, 3)), r"the shape \(0, 3\)"),
        (np.ones((3, 0)), r"the shape \(3, 0\)"),
    ],
)
def test_bad_tasks(name: str, tasks: np.ndarray, sentence: str) -> None:
    with pytest.raises(MergettaError, match=sentence):
        RECIPES[name](tasks)


def test_dare_draws_by_seed_group_and_expert() -> None:
    tasks = np.random.default_rng(0).normal(size=(3, 50))
    merged = dare(tasks, drop=0.5, seed=1, group="a")
    np.testing.assert_array_equal(merged, dare(tasks, drop=0.5, seed=1, group="a"))
    assert not np.array_equal(merged, dare(tasks, drop=0.5, seed=2, group="a"))
    assert not np.array_equal(merged, dare(tasks, drop=0.5, seed=1, group="b"))
    more = dare(np.vstack([tasks, np.zeros(50)]), drop=0.5, seed=1, group="a")
    np.testing.assert_allclose(4 * more, 3 * merged)  # a new expert changes nobody's draw


# Bundles

BASE = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([0.5, -0.5])}
MOVED = [
    {"a": np.array([2.0, 2.0, 3.5]), "b": BASE["b"]},
    {"a": np.array([1.0, 4.0, 2.5]), "b": BASE["b"]},
]


@EVERY
def test_bundle_merges_to_base_plus_task_vector(name: str) -> None:
    options = {"drop": 0.25} if name == "dare" else {}
    draw = {"seed": 3, "group": "a"} if name == "dare" else {}
    bundle = Bundle.from_bytes(merge_by_recipe(BASE, MOVED, name, seed=3, **options).to_bytes())
    tasks = np.array([expert["a"] - BASE["a"] for expert in MOVED])
    expected = RECIPES[name](tasks, **options, **draw)
    assert expected.any()
    np.testing.assert_allclose(bundle.merge()["a"], BASE["a"] + expected, rtol=1e-6)
    np.testing.assert_array_equal(bundle.merge()["b"], BASE["b"])
    assert bundle.basis["a"].shape == (1, 3)
    assert bundle.coefficients["a"].tolist() == [1.0]
    assert bundle.basis["b"].shape == (0, 2)  # nobody moved it: nothing to merge, nothing to tune
    assert bundle.moving == ("a",)
    assert bundle.settings["recipe"] == name
    assert bundle.settings["options"].items() >= options.items()
    assert bundle.settings["experts"] == 2


def test_settings_say_how_it_was_built() -> None:
    pairs = zip(MOVED, "xy", strict=True)
    experts = [Expert(groups, "f", domain=d, provenance={"method": "tent"}) for groups, d in pairs]
    bundle = merge_by_recipe(BASE, experts, "ties", frozen=["a"], keep=1)
    assert bundle.family == "f"
    assert bundle.frozen == ("a",)
    assert bundle.dimension == 0
    assert bundle.settings == {
        "experts": 2,
        "loss": "entropy",
        "domains": ["x", "y"],
        "recipe": "ties",
        "options": {"keep": 1.0, "scale": 1.0},
        "seed": 0,
    }


@pytest.mark.parametrize("experts", [[], MOVED])
def test_direct_coefficients_are_the_weights_themselves(experts: list) -> None:
    bundle = merge_by_recipe(BASE, experts, "direct", frozen=["b"])
    for name, values in BASE.items():
        np.testing.assert_array_equal(bundle.basis[name], np.eye(len(values)))
        np.testing.assert_array_equal(bundle.coefficients[name], np.zeros(len(values)))
        np.testing.assert_array_equal(bundle.merge()[name], values)
    assert bundle.dimension == 3
    np.testing.assert_allclose(bundle.merge(np.array([0.5, 0.0, -1.0]))["a"], [1.5, 2.0, 2.0])


@pytest.mark.parametrize("recipe", ["direct", "ties"])
def test_zeroth_order_steps_on_a_recipe(recipe: str, rng: np.random.Generator) -> None:
    runtime = NumpyRuntime()
    moved = [{n: v + 0.1 * rng.normal(size=v.shape) for n, v in runtime.groups.items()} for _ in range(3)]
    bundle = merge_by_recipe(runtime.groups, moved, recipe, family=runtime.family)
    adapter = ZOMerge(runtime, bundle, loss="entropy")
    before = bundle.flatten()
    logits = adapter.predict(rng.random((8, 1, 6, 6)).astype(np.float32))
    assert np.isfinite(logits).all()
    moved_to = bundle.flatten(adapter.coefficients)
    assert (moved_to != before).all()
    size = sum(v.size for v in runtime.groups.values())
    assert len(moved_to) == (size if recipe == "direct" else len(runtime.groups))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "soup"}, f"no recipe 'soup'; choose one of {', '.join(RECIPE_NAMES)}"),
        ({"recipe": "ties", "kepe": 0.2}, "'ties' has no option 'kepe'; its options are keep, scale"),
        ({"recipe": "average", "scale": 0.2}, "'average' has no option 'scale'; it has no options"),
        ({"recipe": "direct", "scale": 0.2}, "'direct' has no option 'scale'; it has no options"),
        ({"recipe": "dare", "group": 1}, "'dare' has no option 'group'; its options are drop, scale"),
        ({"recipe": "ties", "scale": float("nan")}, "'scale' must be one finite number, not nan"),
        ({"recipe": "ties", "scale": "1"}, "'scale' must be one finite number, not '1'"),
        ({"recipe": "ties", "keep": 0.0}, "keep must be a share"),
        ({"recipe": "dare", "drop": 1.0}, "drop must be a probability below 1"),
        ({"recipe": "dare", "drop": -0.1}, "drop must be a probability below 1"),
        ({"recipe": "breadcrumbs", "drop_largest": 0.2}, "add up to less than 1, not 0.2 and 0.85"),
        ({"recipe": "breadcrumbs", "drop_smallest": -0.1}, "add up to less than 1"),
        ({"experts": []}, "at least one expert"),
        ({"frozen": ["x"]}, "no such group"),
        ({"experts": [{"a": np.ones(3)}]}, "lacks the group 'b'"),
        ({"experts": [{"a": np.ones(3), "b": np.array([np.nan, 1])}]}, "Expert 1 holds NaN or infinite values"),
        ({"base": {"a": np.ones(3), "b": np.array([np.nan, 1])}}, "The base holds NaN or infinite values"),
        ({"experts": [Expert(MOVED[0], "f")], "family": "g"}, "different families"),
    ],
)
def test_bad_input(arguments: dict, sentence: str) -> None:
    with pytest.raises(MergettaError, match=sentence):
        merge_by_recipe(**{"base": BASE, "experts": MOVED, "recipe": "average", **arguments})
