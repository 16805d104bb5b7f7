"""A pool of experts as one scatter matrix per group: `build_bundle` for a hub that never stops collecting.

With the same initial coefficient c for every expert, the merged group is θ₀ + c (Σ τ̂) V_rᵀ V_r, and V_r, the leading
right singular vectors of the stacked task vectors, are the leading eigenvectors of G = Σ τ̂ᵀτ̂. So G, Σ τ̂ and the count
say all that the experts do: adding one is a rank-one update, retiring one a downdate.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import GroupValues, as_mixed, check_groups, learnable, mixture_shares, moment_pairs
from mergetta.merging.build import MOMENT_TOLERANCE, values_of
from mergetta.merging.low_rank import Matrix, adaptive_rank, signs
from mergetta.merging.trim import keep_largest
from mergetta.streams.domain import Variances

EPSILON = float(np.finfo(np.float64).eps)
ACCURACY = 1e-6
"""How far a merged group and an entry of its basis may be from the exact ones: a tenth of what is promised."""
CHUNK = 256
"""Experts per matrix product in `add_many`: enough for BLAS-3, and little memory."""


class Pool:
    """Per group: the scatter matrix G (float64), the sum of the trimmed task vectors and their count.

    Cost and memory do not depend on the number of experts. Bundles equal those of `build_bundle`, except that a
    direction weaker than about 1e-7 of the strongest one is rounding in G and counts as none.

    >>> pool = Pool({"g": np.zeros(3)})
    >>> pool.add({"g": np.array([2.0, 0.0, 0.1])})
    >>> pool.bundle(initial=0.5).merge()["g"].tolist()
    [1.0, 0.0, 0.0]
    """

    def __init__(self, base: GroupValues, keep: float | None = 0.4) -> None:
        self._groups = as_float32(base)
        self._base = as_mixed(self._groups)
        self._weights = frozenset(learnable(self._base))
        if not self._base:
            raise MergettaError("A pool needs at least one group.")
        check_groups(self._groups, self._groups, "The base")
        if keep is not None:
            keep_largest(np.zeros((1, 1)), keep)  # refuses a wrong share now rather than at the first expert
        self.keep = keep
        self._clear()

    def _clear(self) -> None:
        self.count = 0
        self._spread: list[Matrix | float] = [0.0, 0.0]  # sum over the experts that have one, and how many
        self._scatter = {name: np.zeros((origin.size, origin.size)) for name, origin in self._base.items()}
        self._sum = {name: np.zeros(origin.size) for name, origin in self._base.items()}
        self._dust = dict.fromkeys(self._base, 0.0)  # bound on the rounding error in G, which downdates leave behind
        self._last: dict[str, Matrix] = {}  # the last bundle's directions: where the next search starts

    @property
    def nbytes(self) -> int:
        """Memory of the pool's arrays."""
        arrays = (self._base, self._scatter, self._sum, self._last)
        return sum(array.nbytes for values in arrays for array in values.values())

    @property
    def drift(self) -> float:
        """Bound on the rounding error relative to what the pool holds; infinite if a group holds nothing else.

        It grows when much larger experts have come and gone. Above 1e-9, fill a new pool with `add_many`.
        """
        traces = {name: matrix.trace() for name, matrix in self._scatter.items()}
        ratios = [dust / traces[name] if traces[name] > dust else np.inf for name, dust in self._dust.items() if dust]
        return float(max(ratios, default=0.0))

    def add(self, expert: Expert | GroupValues) -> None:
        self.add_many([expert])

    def add_many(self, experts: Sequence[Expert | GroupValues]) -> None:
        """Add all experts, or none if one of them does not fit. One by one or at once gives the same up to rounding."""
        self._update(self._checked(experts), 1)
        self._spread = self._with_spreads(experts, 1)

    def remove(self, expert: Expert | GroupValues) -> None:
        """Undo `add` of the same expert."""
        if not self.count:
            raise MergettaError("The pool is empty: there is no expert to remove.")
        experts = self._checked([expert])
        if self.count == 1:
            self._clear()  # nothing is left, not even rounding
        else:
            self._update(experts, -1)
            self._spread = self._with_spreads([expert], -1)

    def _with_spreads(self, experts: Sequence[Expert | GroupValues], sign: int) -> list[Matrix | float]:
        found = [e.spread.astype(np.float64) for e in experts if isinstance(e, Expert) and e.spread is not None]
        return [self._spread[0] + sign * sum(found, start=np.zeros(())), self._spread[1] + sign * len(found)]

    def bundle(
        self,
        *,
        max_rank: int | None = 5,
        tolerance: float | None = 1e-2,
        tolerance_per_entry: bool = True,
        initial: float,
        frozen: Collection[str] = (),
        family: str = "",
        settings: Mapping[str, Any] | None = None,
        moment_tolerance: float = MOMENT_TOLERANCE,
        without: Sequence[Expert | GroupValues] = (),
    ) -> Bundle:
        """What `build_bundle` makes of the experts in the pool; `without` leaves some of them out, for this once.

        `settings` are added to the bundle's own, for what only the experts know: the loss and the domains.
        """
        count = self.count - len(without)
        if count < 1:
            raise MergettaError("A bundle needs at least one expert.")
        if max_rank is not None and max_rank < 1:
            raise MergettaError(f"max_rank must be at least 1, not {max_rank}.")
        if tolerance is not None and not 0 <= tolerance < np.inf:
            raise MergettaError(f"tolerance must be zero or positive, not {tolerance}.")
        if not np.isfinite(initial):
            raise MergettaError(f"initial must be one finite number, not {initial}.")
        total_spread, spreads = self._with_spreads(without, -1)
        without = self._checked(without)
        between: dict[str, float] = {}
        basis: dict[str, Matrix] = {}
        coefficients: dict[str, Matrix] = {}
        for name, origin in self._base.items():
            matrix, total, dust = self._scatter[name], self._sum[name], self._dust[name]
            if without:
                matrix, total = matrix.copy(), total.copy()
                dust += shift(matrix, total, self._tasks(name, without), -1)
            threshold = None if tolerance is None else tolerance * (origin.size if tolerance_per_entry else 1)
            moves = name in self._weights
            if not moves:  # the source model is one of the domains
                apart = matrix.trace() / (count + 1) - float(np.vdot(total, total)) / (count + 1) ** 2
                between[name] = max(apart, 0.0) / origin.size
            each = initial if moves else float(mixture_shares(np.full(count, initial))[0])
            directions = leading_directions(
                matrix,
                dust,
                max_rank if moves else None,
                threshold if moves else moment_tolerance,
                start=self._last.get(name, total[None]),
                angle=ACCURACY / (1 + abs(each) * float(np.linalg.norm(total))),
            )
            basis[name], coefficients[name] = directions, each * directions @ total
        if not without:
            self._last = {name: directions for name, directions in basis.items() if len(directions)}
        pairs = moment_pairs(self._base)
        variances = None
        if pairs and spreads:
            apart = np.array([[between[pair[row]] for pair in pairs] for row in (0, 1)])
            variances = Variances(np.asarray(total_spread) / spreads, apart)
        facts: dict[str, Any] = {
            "experts": count,
            "loss": None,
            "domains": [],
            "keep": None if self.keep is None else float(self.keep),
            "max_rank": None if max_rank is None else int(max_rank),
            "tolerance": None if tolerance is None else float(tolerance),
            "tolerance_per_entry": bool(tolerance_per_entry),
            "reduce": True,
            "moment_tolerance": float(moment_tolerance),
            "initial": float(initial),
        }
        return Bundle(
            self._groups, basis, coefficients, tuple(frozen), family, variances, {**facts, **(settings or {})}
        )

    def energy_kept(self, bundle: Bundle) -> dict[str, float]:
        """Share of each group's energy that a bundle's directions keep: 1 − R of the paper; 1 where there is none."""
        kept = {}
        for name, basis in bundle.basis.items():
            trace = float(self._scatter[name].trace())
            kept[name] = float(np.vdot(basis @ self._scatter[name], basis)) / trace if trace > 0 else 1.0
        return kept

    def _checked(self, experts: Sequence[Expert | GroupValues]) -> list[dict[str, Matrix]]:
        """All of them before any is used: a pool cannot forget half an expert, or an infinite value."""
        found = [as_float32(values_of(expert)) for expert in experts]
        layers = len(moment_pairs(self._base)) or 1
        if any(isinstance(e, Expert) and e.spread is not None and e.spread.shape != (2, layers) for e in experts):
            raise MergettaError("The expert has a spread of another model's layers.")
        for i, expert in enumerate(found):
            check_groups(expert, self._groups, f"Expert {i + 1}" if len(found) > 1 else "The expert")
        return [as_mixed(expert) for expert in found]

    def _tasks(self, name: str, experts: Sequence[GroupValues]) -> Matrix:
        """(n, D): trimmed task vectors, as `build_bundle` makes them."""
        tasks: Matrix = np.stack([expert[name] for expert in experts]).astype(np.float64) - self._base[name]
        return tasks if self.keep is None or name not in self._weights else keep_largest(tasks, self.keep)

    def _update(self, experts: Sequence[GroupValues], sign: int) -> None:
        for first in range(0, len(experts), CHUNK):
            chunk = experts[first : first + CHUNK]
            for name, matrix in self._scatter.items():
                self._dust[name] += shift(matrix, self._sum[name], self._tasks(name, chunk), sign)
        self.count += sign * len(experts)


def as_float32(values: GroupValues) -> dict[str, Matrix]:
    """As experts and bundles hold them; what is too large becomes infinite, and is refused as such."""
    with np.errstate(over="ignore"):
        return {name: np.asarray(vector, dtype=np.float32) for name, vector in values.items()}


def shift(matrix: Matrix, total: Matrix, tasks: Matrix, sign: int) -> float:
    """Add task vectors to G and their sum, or take them away, in place. Returns a bound on the rounding error in G."""
    before = float(matrix.trace())
    if len(tasks) == 1:
        rows = np.flatnonzero(tasks[0])  # trimming has left 40 % of them
        matrix[rows] += np.outer(sign * tasks[0, rows], tasks[0])
    else:
        product = tasks.T @ tasks
        product *= sign
        matrix += product
    total += sign * tasks.sum(axis=0)
    return EPSILON * (max(before, float(matrix.trace())) + len(tasks) * float(np.vdot(tasks, tasks)))


def leading_directions(
    matrix: Matrix, dust: float, max_rank: int | None, threshold: float | None, start: Matrix, angle: float
) -> Matrix:
    """(r, D): eigenvectors of G for its largest eigenvalues, as many as RR and ARS keep."""
    size = len(matrix)
    trace = float(matrix.trace())
    if trace <= dust:
        return np.empty((0, size))
    wanted = 1 if threshold is not None and threshold >= 1 else max_rank  # the recovery error is always below 1
    pairs = None
    if wanted is not None and size > 128 and wanted <= size // 16:
        pairs = lanczos(matrix, wanted, start, angle)
    if pairs is None:
        values, vectors = np.linalg.eigh(matrix)
        pairs = values[::-1], vectors.T[::-1]
    energies, directions = pairs
    energies = energies[energies > max(dust, size * EPSILON * energies[0])]  # the rest is rounding
    rank = len(energies)
    if threshold is not None:
        others = max(trace - float(energies.sum()), 0.0)  # ARS asks only how much is left out
        rank = min(rank, adaptive_rank(np.append(energies, others), threshold))
    directions = directions[: rank if max_rank is None else min(rank, max_rank)]
    return directions * signs(directions)[:, None] if len(directions) else directions


def lanczos(matrix: Matrix, wanted: int, start: Matrix, angle: float) -> tuple[Matrix, Matrix] | None:
    """The `wanted` largest eigenvalues of a symmetric matrix ≥ 0 and their eigenvectors (rows), or None if too slow.

    Lanczos with full reorthogonalisation and Rayleigh–Ritz; one vector at a time, since larger blocks needed more time
    on every spectrum tried. Converged means: each vector within `angle` (residual / gap to the next eigenvalue), or its
    residual at the level of rounding where a gap is (nearly) closed. A Krylov space holds one vector of a multiple
    eigenvalue and none of a direction that `start` happens to be orthogonal to, so the search goes on from a random
    vector once it has converged or has exhausted its space, and must converge again.
    """
    size = len(matrix)
    rng = np.random.default_rng(0)
    trace = float(matrix.trace())
    noise = size * EPSILON
    space, projected = np.empty((size // 2, size)), np.zeros((size // 2, size // 2))
    vector = unit(start.sum(axis=0)) + 0.1 * unit(rng.normal(size=size))
    converged, check = False, 12
    for n in range(1, len(space) + 1):
        known = space[:n]
        known[-1] = unit(vector)
        vector = known[-1] @ matrix
        projected[n - 1, :n] = projected[:n, n - 1] = overlap = known @ vector
        vector = outside(vector - overlap @ known, known)
        restart = bool(np.linalg.norm(vector) <= noise * projected.diagonal().max())
        if n >= check:
            energies, mixing = np.linalg.eigh(projected[:n, :n])
            energies, directions = energies[: -wanted - 2 : -1], mixing[:, : -wanted - 2 : -1].T @ known
            residuals = np.linalg.norm(directions @ matrix - energies[:, None] * directions, axis=1)
            gaps = energies[:-1] - energies[1:] - residuals[1:]
            close = residuals[:-1] <= np.maximum(angle * gaps, noise * energies[0])
            again, converged = converged, len(close) == wanted and bool(close.all())
            everything = trace - float(projected.diagonal().sum()) <= noise * trace
            if converged and (again or everything):
                return energies[:-1], directions[:-1]
            restart |= converged
            check = n + (8 if converged else max(8, n // 5))
        if restart:
            vector = outside(outside(rng.normal(size=size), known), known)
    return None


def outside(vector: Matrix, known: Matrix) -> Matrix:
    """The part of a vector that is orthogonal to the known ones; done twice, it is so to the last digit."""
    rest: Matrix = vector - (known @ vector) @ known
    return rest


def unit(vector: Matrix) -> Matrix:
    norm = np.linalg.norm(vector)
    return vector / norm if norm else vector
