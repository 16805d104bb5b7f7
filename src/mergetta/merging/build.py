"""Algorithm 1: experts → bundle, one group at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.bundle import Bundle, Members
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import (
    GroupValues,
    as_float32,
    as_mixed,
    check_groups,
    layer_sizes,
    learnable,
    mixture_shares,
    moment_pairs,
    moments_of,
)
from mergetta.merging.low_rank import Matrix
from mergetta.merging.members import MOST, Clusters
from mergetta.merging.reduction import MOMENT_TOLERANCE, Reduction
from mergetta.streams.variances import Variances, between_domains

LARGEST_SECOND = 1e18
"""Most that a second moment may be: how it varies between domains, its square, is a float32 too."""
LOSS_OF = {"roid": "roid", "deyo": "deyo", "tent": "entropy"}
"""The loss a device should use: the one its experts were adapted with."""


def build_bundle(
    base: GroupValues,
    experts: Sequence[Expert | Mapping[str, np.ndarray]],
    keep: float | None = 0.4,
    max_rank: int | None = 5,
    tolerance: float | None = 1e-2,
    initial: float | Sequence[float] = 0.1,
    frozen: Collection[str] = (),
    *,
    reduce: bool = True,
    tolerance_per_entry: bool = True,
    moment_tolerance: float = MOMENT_TOLERANCE,
    members: int = MOST,
    family: str | None = None,
    contributors: Sequence[Hashable] | None = None,
) -> Bundle:
    """Trim (NWS), reduce (RR) and choose ranks (ARS): all that a weak device needs of the experts.

    Parameters
    ----------
    base
        The source model's groups: `runtime.groups`.
    experts
        What strong devices share, of one family.
    keep
        The share of each task vector that NWS keeps, by magnitude; None trims nothing.
    max_rank
        Most directions per group; None: no limit.
    tolerance
        A group's rank is the smallest with a recovery error below tolerance × D; None gives every group `max_rank`.
    initial
        The paper's c_init, the same for every expert, or one number per expert.
    frozen
        Groups that are merged and that no step moves.
    reduce
        False does without the SVD: the basis is the task vectors themselves (with `tolerance=None` all of them; else
        see `largest_tasks`).
    tolerance_per_entry
        False compares with plain tolerance instead of tolerance × D.
    moment_tolerance
        Moments of BatchNorm layers are never trimmed, and get the smallest rank with a recovery error below this, at
        most 16: they are what a device normalises with, and no step mends them.
    members
        How many members the bundle has at most, which stand for one expert each or for a cluster of similar ones
        (`members.py`). With 0 it has none, as in the paper, and without `reduce` neither.
    family
        The fingerprint of the source model (default: the experts').
    contributors
        Who each expert comes from: then all that come from one have together the weight of one.

    Examples
    --------
    >>> bundle = build_bundle({"g": np.zeros(3)}, [{"g": np.array([2.0, 0.0, 0.1])}], initial=0.5)
    >>> bundle.merge()["g"].tolist()
    [1.0, 0.0, 0.0]
    """
    experts = list(experts)
    if not experts:
        raise MergettaError("A bundle needs at least one expert.")
    reduction = Reduction(keep, max_rank, tolerance, tolerance_per_entry, moment_tolerance, reduce)
    family = check_experts(base, experts, family)
    shares = contributor_shares(contributors or range(len(experts)), len(experts))
    start, moving = start_of(initial, len(experts)) * shares, set(learnable(base))

    basis: dict[str, Matrix] = {}
    coefficients: dict[str, Matrix] = {}
    adapted = [as_mixed(as_float32(values_of(expert))) for expert in experts]
    for name, source in as_mixed(base).items():
        tasks, moves = task_matrix(source, [values[name] for values in adapted]), name in moving
        first = start if moves else mixture_shares(start)
        basis[name], coefficients[name] = reduction.apply(tasks, first, shares, moves)
    members = members if reduce else 0
    settings = {**facts_of(experts), **reduction.recorded(), "initial": np.asarray(initial, dtype=float).tolist()}
    settings["members"] = members
    kept = members_of(base, experts, basis, members, contributors, shares) if members else None
    variances = variances_of(base, experts, shares) or feature_variances(mean_spread(experts, shares), kept)
    return Bundle(base, basis, coefficients, tuple(frozen), family, variances, settings, kept)


def start_of(initial: float | Sequence[float], count: int) -> Matrix:
    """(N,): where the merge starts, of each expert."""
    start = np.asarray(initial, dtype=np.float64)
    start = np.full(count, start) if start.ndim == 0 else start
    if start.shape != (count,) or not np.isfinite(start).all():
        raise MergettaError(f"initial must be one finite number, or one for each of the {count} experts.")
    return start


def contributor_shares(contributors: Sequence[Hashable], count: int) -> Matrix:
    """(N,): weights of experts, 1 on average, such that all contributors have the same.

    >>> contributor_shares(["a", "b", "b", "b"], 4).round(2).tolist()
    [2.0, 0.67, 0.67, 0.67]
    """
    if len(contributors) != count:
        raise MergettaError(f"There are {len(contributors)} contributors for {count} experts: name one for each.")
    each = Counter(contributors)
    return np.array([count / (len(each) * each[name]) for name in contributors])


def members_of(
    base: GroupValues,
    experts: Sequence[Expert | GroupValues],
    basis: GroupValues,
    most: int,
    contributors: Sequence[Hashable] | None,
    shares: Matrix,
) -> Members:
    """Experts in the order given, or clusters of them; each counts as a contributor of its own, unless told."""
    clusters = Clusters(base, most)
    for number, expert in enumerate(experts):
        clusters.add(number, expert, contributors[number] if contributors else None, float(shares[number]))
    return clusters.members(basis)


def mean_spread(experts: Sequence[Expert | GroupValues], shares: Matrix) -> np.ndarray | None:
    """Of those that tell."""
    told = [
        (e.spread, w) for e, w in zip(experts, shares, strict=True) if isinstance(e, Expert) and e.spread is not None
    ]
    return np.average([s for s, _ in told], axis=0, weights=[w for _, w in told]) if told else None


def feature_variances(spread: np.ndarray | None, members: Members | None) -> Variances | None:
    """How the moments of features vary, for models without BatchNorm; None if no expert tells."""
    if spread is None or spread.shape[1] != 1 or members is None or members.features is None:
        return None
    return Variances(spread, between_domains(members.features, members.features.shape[2:]))


def variances_of(
    base: GroupValues, experts: Sequence[Expert | GroupValues], shares: Matrix | None = None
) -> Variances | None:
    """How moments vary between images and domains, the source among them; None if no expert tells."""
    shares = np.ones(len(experts)) if shares is None else shares
    spread = mean_spread(experts, shares)
    if not moment_pairs(base) or spread is None:
        return None
    domains = np.stack([moments_of(values, base) for values in (*map(values_of, experts), base)])
    return Variances(spread, between_domains(domains, layer_sizes(base), np.append(shares, 1.0)))


def check_experts(base: GroupValues, experts: Sequence[Expert | GroupValues], family: str | None) -> str:
    """Raise unless all experts fit the base and one another; their family."""
    check_groups(base, base, "The base")
    found = common_family(experts, family)
    for i, expert in enumerate(experts):
        mixed_values(expert, base, f"Expert {i + 1}{describe(expert)}")
    return found


def mixed_values(expert: Expert | GroupValues, base: GroupValues, what: str) -> dict[str, Matrix]:
    """Raise unless an expert fits the base; its values as they mix."""
    values = as_float32(values_of(expert))
    check_groups(values, base, what)
    layers = len(moment_pairs(base)) or 1
    if isinstance(expert, Expert) and expert.spread is not None and expert.spread.shape != (2, layers):
        raise MergettaError(f"{what} has a spread of another model's layers.")
    with np.errstate(over="ignore"):
        mixed = as_mixed(values)
    if any(np.abs(mixed[name]).max() > LARGEST_SECOND for pair in moment_pairs(base) for name in pair):
        raise MergettaError(f"{what} has moments that are too large to be merged.")
    return mixed


def task_matrix(source: Matrix, adapted: Sequence[Matrix]) -> Matrix:
    """Rounded to float32 first, as experts and bundles hold their values; then in float64."""
    rows: Matrix = np.asarray(adapted, dtype=np.float32).astype(np.float64)
    return rows - np.asarray(source, dtype=np.float32)


def facts_of(experts: Sequence[Expert | GroupValues]) -> dict[str, Any]:
    """What a bundle says about its experts."""
    methods = {str(e.provenance.get("method", "")) for e in experts if isinstance(e, Expert)}
    return {
        "experts": len(experts),
        "loss": LOSS_OF.get(methods.pop()) if len(methods) == 1 else None,
        "domains": [expert.domain for expert in experts if isinstance(expert, Expert)],
    }


def values_of(expert: Expert | GroupValues) -> GroupValues:
    return expert.groups if isinstance(expert, Expert) else expert


def describe(expert: Expert | GroupValues) -> str:
    return f" ({expert.domain})" if isinstance(expert, Expert) and expert.domain else ""


def common_family(experts: Sequence[Expert | GroupValues], family: str | None) -> str:
    """The one family that all experts belong to."""
    found = {expert.family for expert in experts if isinstance(expert, Expert)}
    if family is not None:
        found.add(family)
    if len(found) > 1:
        raise MergettaError(f"Experts of different families cannot be merged: {', '.join(sorted(found))}.")
    return found.pop() if found else ""
