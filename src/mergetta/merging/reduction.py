"""How a group's task vectors are reduced: trimmed (NWS), to few directions (RR), of a rank that is chosen (ARS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.merging.low_rank import Matrix, adaptive_rank, factorise
from mergetta.merging.members import MOST
from mergetta.merging.trim import keep_largest

MOMENT_TOLERANCE = 1e-4
"""Share of the experts' differences in moments that a bundle may leave out."""


@dataclass(frozen=True)
class Reduction:
    """The fields are arguments of `build_bundle`, which says what they mean."""

    keep: float | None = 0.4
    max_rank: int | None = 5
    tolerance: float | None = 1e-2
    tolerance_per_entry: bool = True
    moment_tolerance: float = MOMENT_TOLERANCE
    reduce: bool = True

    def __post_init__(self) -> None:
        if self.max_rank is not None and self.max_rank < 1:
            raise MergettaError(f"max_rank must be at least 1, not {self.max_rank}.")
        if self.tolerance is not None and not 0 <= self.tolerance < np.inf:
            raise MergettaError(f"tolerance must be zero or positive, not {self.tolerance}.")

    def limits(self, size: int, moves: bool) -> tuple[float | None, int | None]:
        """The recovery error that decides the rank of a group, and the highest rank. Moments do not move."""
        if not moves:
            return self.moment_tolerance, MOST
        per_entry = size if self.tolerance_per_entry else 1
        return None if self.tolerance is None else self.tolerance * per_entry, self.max_rank

    def apply(self, tasks: Matrix, start: Matrix, shares: Matrix, moves: bool) -> tuple[Matrix, Matrix]:
        """The directions that are kept of a group's task vectors, (N, D), and where the merge starts in them, if it is
        `start` of each. Experts have shares, which weigh what their directions tell.
        """
        if moves and self.keep is not None:
            tasks = keep_largest(tasks, self.keep)
        threshold, most = self.limits(tasks.shape[1], moves)
        if moves and not self.reduce:
            return largest_tasks(tasks, start, threshold, most)
        roots = np.sqrt(shares)
        factors = factorise(tasks * roots[:, None])
        rank = chosen_rank(factors.energies, threshold, most)
        return factors.basis[:rank], start / roots @ factors.coordinates[:, :rank]

    def recorded(self) -> dict[str, Any]:
        """What a bundle says of it."""
        return {
            "keep": None if self.keep is None else float(self.keep),
            "max_rank": None if self.max_rank is None else int(self.max_rank),
            "tolerance": None if self.tolerance is None else float(self.tolerance),
            "tolerance_per_entry": bool(self.tolerance_per_entry),
            "moment_tolerance": float(self.moment_tolerance),
            "reduce": bool(self.reduce),
        }


def chosen_rank(energies: Matrix, threshold: float | None, max_rank: int | None) -> int:
    rank = len(energies) if threshold is None else adaptive_rank(energies, threshold)
    return rank if max_rank is None else min(rank, max_rank)


def largest_tasks(tasks: Matrix, start: Matrix, threshold: float | None, max_rank: int | None) -> tuple[Matrix, Matrix]:
    """Without RR: all task vectors as they are, unless there is a threshold. ARS without RR is in the paper's ablation,
    which does not define it. Our reading: ARS' rule on the task vectors themselves. The fewest of them (at most
    `max_rank`) whose left-out share of the energy is below the threshold keep a coefficient each; all others share one,
    so that the merge starts where it would with all of them.
    """
    if threshold is None:
        return tasks, start
    energies = (tasks**2).sum(axis=1)
    order = np.argsort(-energies, kind="stable")
    rank = chosen_rank(energies[order], threshold, max_rank) if energies.any() else 0
    alone, together = order[:rank], order[rank:]
    rest = start[together] @ tasks[together]
    if not rest.any():
        return tasks[alone], start[alone]
    return np.vstack([tasks[alone], rest]), np.append(start[alone], 1.0)
