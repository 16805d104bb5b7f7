"""Public merging recipes beside the paper's own: each turns the task matrix of one group into one merged task vector.

A task matrix has one row per expert, τ_m = θ_m − θ₀. Recipes that trim do so per group, as NWS does; TIES and KnOTS as
published trim over the whole model, but a bundle is built group by group, and groups differ in scale.
Defaults are published values. Scales of sums were tuned for about eight experts: with more of them, use less.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from math import isfinite
from numbers import Real
from typing import Any

import numpy as np

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import GroupValues, as_mixed, learnable
from mergetta.merging.build import check_experts, facts_of, task_matrix, values_of, variances_of
from mergetta.merging.low_rank import Matrix, factorise
from mergetta.merging.trim import drop_at_random, keep_largest, keep_middle
from mergetta.seeds import generator


def average(tasks: Matrix) -> Matrix:
    """The mean of the experts.

    >>> average(np.array([[2.0, 0.0], [4.0, -1.0]])).tolist()
    [3.0, -0.5]
    """
    mean: Matrix = checked(tasks).mean(axis=0)
    return mean


def task_arithmetic(tasks: Matrix, *, scale: float = 0.3) -> Matrix:
    """scale · Σ τ_m.

    >>> task_arithmetic(np.array([[2.0, 0.0], [4.0, -1.0]]), scale=0.5).tolist()
    [3.0, -0.5]
    """
    total: Matrix = scale * checked(tasks).sum(axis=0)
    return total


def ties(tasks: Matrix, *, keep: float = 0.2, scale: float = 1.0) -> Matrix:
    """Trim to the largest entries, elect the sign of larger total mass per entry, average the entries that have it.

    Where both signs have the same mass none is elected, and the entry stays as in the source model.

    >>> ties(np.array([[3.0, 1.0], [-1.0, 1.0], [1.0, -2.0]]), keep=1.0).tolist()
    [2.0, 0.0]
    """
    trimmed = keep_largest(checked(tasks), keep)
    agreeing = np.sign(trimmed) == np.sign(trimmed.sum(axis=0))
    merged: Matrix = scale * np.where(agreeing, trimmed, 0.0).sum(axis=0) / np.maximum(agreeing.sum(axis=0), 1)
    return merged


def dare(tasks: Matrix, *, drop: float = 0.9, scale: float = 1.0, seed: int = 0, group: str = "") -> Matrix:
    """Drop entries at random, rescale the others by 1/(1 − drop), take scale · the mean of the experts.

    The published drop of 0.9 relies on layers that add up thousands of entries. Each entry of a norm layer acts on its
    own channel, where nothing averages the noise out (standard deviation 3|τ|/√M at 0.9, |τ|/√M at 0.5): prefer 0.5
    or less there. Draws depend on the seed and the group's name alone; another expert at the end changes no other's.

    >>> dare(np.array([[2.0, 0.0], [4.0, -1.0]]), drop=0.0).tolist()
    [3.0, -0.5]
    """
    rng = generator(seed, 0, f"dare/{group}")
    return scale * average(drop_at_random(checked(tasks), drop, rng))


def breadcrumbs(
    tasks: Matrix, *, drop_largest: float = 0.01, drop_smallest: float = 0.85, scale: float = 0.3
) -> Matrix:
    """Model Breadcrumbs: scale · the sum of task vectors without their outliers and their negligible entries.

    The two shares are named by what they drop, for publications disagree on which is β and which γ. The authors' search
    is around 0.85 of the smallest and up to 0.01 of the largest; the scale is that of task arithmetic.

    >>> breadcrumbs(np.array([[9.0, -4.0, 2.0, 0.5]]), drop_largest=0.25, drop_smallest=0.25, scale=0.5).tolist()
    [0.0, -2.0, 1.0, 0.0]
    """
    return task_arithmetic(keep_middle(checked(tasks), drop_largest, drop_smallest), scale=scale)


def knots(tasks: Matrix, *, keep: float = 0.2, scale: float = 0.6) -> Matrix:
    """KnOTS: TIES on the experts' coordinates in the basis that they share.

    KnOTS is defined for weight matrices: updates side by side, an SVD, and a merge of each expert's part of the right
    factor. Our reading takes a group as a matrix of one column: then the columns side by side are Tᵀ, the shared basis
    is V of T = U Σ Vᵀ, and an expert's part is its row of U Σ (the singular values go with the experts, as in the
    authors' settings). Where singular values are equal, the basis and so the result are arbitrary.

    >>> knots(np.array([[3.0, 0.0], [1.0, 0.0]]), scale=1.0).round(9).tolist()
    [2.0, 0.0]
    """
    tasks = checked(tasks)
    factors = factorise(tasks)
    if not factors.energies.size:  # no expert moved, so there is no basis
        return np.zeros(tasks.shape[1])
    merged: Matrix = ties(factors.coordinates, keep=keep, scale=scale) @ factors.basis
    return merged


def checked(tasks: Matrix) -> Matrix:
    found = np.asarray(tasks, dtype=np.float64)
    if found.ndim != 2 or not found.size:
        raise MergettaError(f"Task vectors come as a matrix with one row per expert, not with the shape {found.shape}.")
    if not np.isfinite(found).all():
        raise MergettaError("The task vectors hold NaN or infinite values.")
    return found


RECIPES: dict[str, Callable[..., Matrix]] = {
    "average": average,
    "task-arithmetic": task_arithmetic,
    "ties": ties,
    "dare": dare,
    "breadcrumbs": breadcrumbs,
    "knots": knots,
}
"""Name → function of a task matrix; its keywords are the options of `merge_by_recipe`."""

DIRECT = "direct"
"""No merge at all: coefficients that are the weights' own changes. The paper's naive baseline (Figure 3)."""

RECIPE_NAMES = (*RECIPES, DIRECT)


def merge_by_recipe(
    base: GroupValues,
    experts: Sequence[Expert | Mapping[str, np.ndarray]],
    recipe: str,
    *,
    family: str | None = None,
    frozen: Collection[str] = (),
    seed: int = 0,
    **options: float,
) -> Bundle:
    """A bundle that merges by one of `RECIPE_NAMES`: per group, the merged task vector with the coefficient 1.

    A group that the recipe leaves as it is has no coefficient. With "direct" a group has one coefficient per weight,
    all of them zero, and experts are not needed. `seed` is for recipes that draw at random. Moments of BatchNorm layers
    are the experts' average, whatever the recipe.

    >>> merge_by_recipe({"g": np.ones(2)}, [{"g": np.array([3.0, 1.0])}], "average").merge()["g"].tolist()
    [3.0, 1.0]
    """
    experts = list(experts)
    chosen = chosen_options(recipe, options)
    if not experts and recipe != DIRECT:
        raise MergettaError("A bundle needs at least one expert.")
    family = check_experts(base, experts, family)
    basis: dict[str, Matrix] = {}
    coefficients: dict[str, Matrix] = {}
    mixed, adapted = as_mixed(base), [as_mixed(values_of(expert)) for expert in experts]
    weights = set(learnable(base))
    for name, source in mixed.items():
        if recipe == DIRECT and name in weights:
            basis[name], coefficients[name] = np.eye(len(source), dtype=np.float32), np.zeros(len(source))
            continue
        tasks = task_matrix(source, [values[name] for values in adapted]) if experts else np.zeros((1, len(source)))
        draw = {"seed": seed, "group": name} if recipe == "dare" else {}
        merged = RECIPES[recipe](tasks, **chosen, **draw) if name in weights else average(tasks)
        row = np.asarray(merged, dtype=np.float32)[None]  # as bundles hold it, so that what rounds to zero is zero
        basis[name] = row[row.any(axis=1)]
        coefficients[name] = np.ones(len(basis[name]))
    settings = {
        **facts_of(experts),
        "recipe": recipe,
        "options": chosen,
        "seed": int(seed),
    }
    return Bundle(base, basis, coefficients, tuple(frozen), family, variances_of(base, experts), settings)


def chosen_options(recipe: str, options: Mapping[str, Any]) -> dict[str, float]:
    """All options of a recipe, as given or by default."""
    if recipe not in RECIPE_NAMES:
        raise MergettaError(f"There is no recipe {recipe!r}; choose one of {', '.join(RECIPE_NAMES)}.")
    keywords = signature(RECIPES[recipe]).parameters.values() if recipe in RECIPES else ()
    defaults = {k.name: k.default for k in keywords if k.name not in {"tasks", "seed", "group"}}
    unknown = [name for name in options if name not in defaults]
    if unknown:
        choices = f"its options are {', '.join(defaults)}" if defaults else "it has no options"
        raise MergettaError(f"The recipe {recipe!r} has no option {unknown[0]!r}; {choices}.")
    wrong = [name for name, value in options.items() if not (isinstance(value, Real) and isfinite(value))]
    if wrong:
        raise MergettaError(f"The option {wrong[0]!r} must be one finite number, not {options[wrong[0]]!r}.")
    return {name: float(options.get(name, default)) for name, default in defaults.items()}
