"""Algorithm 1: experts → bundle, one group at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import GroupValues, check_groups
from mergetta.merging.low_rank import Matrix, adaptive_rank, factorise
from mergetta.merging.trim import keep_largest

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
    family: str | None = None,
) -> Bundle:
    """Trim (NWS), reduce (RR) and choose ranks (ARS): all that a weak device needs of the experts.

    Each step can be switched off: `keep=None` trims nothing, `tolerance=None` gives every group the rank
    `max_rank` (`max_rank=None`: no limit), `reduce=False` keeps one coefficient per expert and group.
    `initial` is the paper's c_init, the same for every expert, or one number per expert. The rank is the
    smallest with a recovery error below tolerance × D, or below plain tolerance with `tolerance_per_entry=False`.

    >>> bundle = build_bundle({"g": np.zeros(3)}, [{"g": np.array([2.0, 0.0, 0.1])}], initial=0.5)
    >>> bundle.merge()["g"].tolist()
    [1.0, 0.0, 0.0]
    """
    experts = list(experts)
    if not experts:
        raise MergettaError("A bundle needs at least one expert.")
    if max_rank is not None and max_rank < 1:
        raise MergettaError(f"max_rank must be at least 1, not {max_rank}.")
    if tolerance is not None and not 0 <= tolerance < np.inf:
        raise MergettaError(f"tolerance must be zero or positive, not {tolerance}.")
    start = np.asarray(initial, dtype=np.float64)
    if start.ndim == 0:
        start = np.full(len(experts), start)
    if start.shape != (len(experts),) or not np.isfinite(start).all():
        raise MergettaError(f"initial must be one finite number, or one for each of the {len(experts)} experts.")
    check_groups(base, base, "The base")
    family = common_family(experts, family)
    for i, expert in enumerate(experts):
        check_groups(values_of(expert), base, f"Expert {i + 1}{describe(expert)}")

    basis: dict[str, Matrix] = {}
    coefficients: dict[str, Matrix] = {}
    for name, source in base.items():
        origin = np.asarray(source, dtype=np.float32).astype(np.float64)  # as experts and bundles hold it
        tasks: Matrix = np.stack(
            [np.asarray(values_of(expert)[name], dtype=np.float32).astype(np.float64) - origin for expert in experts]
        )
        if keep is not None:
            tasks = keep_largest(tasks, keep)
        if not reduce:
            basis[name], coefficients[name] = tasks, start
            continue
        factors = factorise(tasks)
        rank = len(factors.energies)
        if tolerance is not None:
            rank = adaptive_rank(factors.energies, tolerance * (origin.size if tolerance_per_entry else 1))
        if max_rank is not None:
            rank = min(rank, max_rank)
        basis[name] = factors.basis[:rank]
        coefficients[name] = start @ factors.coordinates[:, :rank]
    methods = {str(e.provenance.get("method", "")) for e in experts if isinstance(e, Expert)}
    settings = {
        "experts": len(experts),
        "loss": LOSS_OF.get(methods.pop()) if len(methods) == 1 else None,
        "domains": [expert.domain for expert in experts if isinstance(expert, Expert)],
        "keep": None if keep is None else float(keep),
        "max_rank": None if max_rank is None else int(max_rank),
        "tolerance": None if tolerance is None else float(tolerance),
        "tolerance_per_entry": bool(tolerance_per_entry),
        "reduce": bool(reduce),
        "initial": float(start[0]) if np.ndim(initial) == 0 else start.tolist(),
    }
    return Bundle(base, basis, coefficients, tuple(frozen), family, settings)


def values_of(expert: Expert | Mapping[str, np.ndarray]) -> GroupValues:
    return expert.groups if isinstance(expert, Expert) else expert


def describe(expert: Expert | Mapping[str, np.ndarray]) -> str:
    return f" ({expert.domain})" if isinstance(expert, Expert) and expert.domain else ""


def common_family(experts: Sequence[Expert | Mapping[str, np.ndarray]], family: str | None) -> str:
    """The one family that all experts belong to."""
    found = {expert.family for expert in experts if isinstance(expert, Expert)}
    if family is not None:
        found.add(family)
    if len(found) > 1:
        raise MergettaError(f"Experts of different families cannot be merged: {', '.join(sorted(found))}.")
    return found.pop() if found else ""
