"""A pool of experts as one scatter matrix per group: `build_bundle` for a hub that never stops collecting.

With an initial coefficient c w for an expert of weight w, the merged group is θ₀ + c (Σ w τ̂) V_rᵀ V_r, and V_r, the
leading right singular vectors of the stacked √w τ̂, are the leading eigenvectors of G = Σ w τ̂ᵀτ̂. So G, Σ w τ̂ and the
weights say all that the experts do: adding one is a rank-one update, retiring one a downdate, weighing it anew both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import GroupValues, as_mixed, check_groups, learnable, mixture_shares, moment_pairs
from mergetta.merging.build import as_float32, feature_variances, mixed_values
from mergetta.merging.low_rank import Matrix, adaptive_rank, signs
from mergetta.merging.members import MOST, Clusters
from mergetta.merging.reduction import MOMENT_TOLERANCE, Reduction
from mergetta.merging.trim import keep_largest
from mergetta.streams.domain import Variances

Experts = Mapping[Any, Expert | GroupValues]
"""By keys, which tell them apart."""
Weights = Mapping[Any, float]
EPSILON = float(np.finfo(np.float64).eps)
ACCURACY = 1e-6
"""How far a merged group and an entry of its basis may be from the exact ones: a tenth of what is promised."""
CHUNK = 256
"""Experts per matrix product in `add_many`: enough for BLAS-3, and little memory."""


class Pool:
    """Per group: the scatter matrix G (float64) and the sum of the trimmed task vectors, both weighted.

    Cost and memory do not depend on the number of experts. Bundles equal those of `build_bundle`, except that a
    direction weaker than about 1e-7 of the strongest one is rounding in G and counts as none. Members are kept beside
    (`members.py`): they are those of `build_bundle` for the same sequence, as long as no expert has been removed.

    >>> pool = Pool({"g": np.zeros(3)})
    >>> pool.add("fog", {"g": np.array([2.0, 0.0, 0.1])})
    >>> pool.bundle(initial=0.5).merge()["g"].tolist()
    [1.0, 0.0, 0.0]
    """

    def __init__(self, base: GroupValues, keep: float | None = 0.4, members: int = MOST) -> None:
        self._groups = as_float32(base)
        self._base = as_mixed(self._groups)
        self._weights = frozenset(learnable(self._base))
        if not self._base:
            raise MergettaError("A pool needs at least one group.")
        check_groups(self._groups, self._groups, "The base")
        if keep is not None:
            keep_largest(np.zeros((1, 1)), keep)  # refuses a wrong share now rather than at the first expert
        self.keep, self.members = keep, members
        self._clear()

    def _clear(self) -> None:
        self._shares: dict[Hashable, float] = {}
        self._clusters = Clusters(self._groups, self.members) if self.members else None
        self._spread: tuple[Any, float, int] = 0.0, 0.0, 0  # over the experts that have one: sum, weight, how many
        self._scatter = {name: np.zeros((origin.size, origin.size)) for name, origin in self._base.items()}
        self._sum = {name: np.zeros(origin.size) for name, origin in self._base.items()}
        self._dust = dict.fromkeys(self._base, 0.0)  # bound on the rounding error in G, which downdates leave behind
        self._last: dict[str, Matrix] = {}  # the last bundle's directions: where the next search starts

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self._shares)

    @property
    def nbytes(self) -> int:
        """Memory of the pool's arrays."""
        arrays = (self._base, self._scatter, self._sum, self._last)
        clusters = self._clusters.nbytes if self._clusters is not None else 0
        return clusters + sum(array.nbytes for values in arrays for array in values.values())

    @property
    def drift(self) -> float:
        """Bound on the rounding error relative to what the pool holds; infinite if a group holds nothing else.

        It grows when much larger experts have come and gone. Above 1e-9, fill a new pool with `add_many`.
        """
        traces = {name: matrix.trace() for name, matrix in self._scatter.items()}
        ratios = [dust / traces[name] if traces[name] > dust else np.inf for name, dust in self._dust.items() if dust]
        return float(max(ratios, default=0.0))

    def add(self, key: Hashable, expert: Expert | GroupValues, contributor: Hashable | None = None) -> None:
        """Add an expert under a key of its own; its member counts who contributed it, by default somebody new."""
        self.add_many({key: expert}, {} if contributor is None else {key: contributor})

    def add_many(
        self, experts: Experts, contributors: Mapping[Any, Hashable] | None = None, weights: Weights | None = None
    ) -> None:
        """Add all experts, or none if one of them does not fit. One by one or at once gives the same up to rounding.

        Weights are relative to one another, 1 unless told.
        """
        checked = self._checked(experts)
        twice = [key for key in experts if key in self._shares]
        if twice:
            raise MergettaError(f"The pool has an expert {twice[0]!r} already.")
        shares = {key: (weights or {}).get(key, 1.0) for key in experts}
        self._update(checked, list(shares.values()))
        self._spread = self._with_spreads(experts, shares)
        self._shares |= shares
        if self._clusters is not None:
            for key, expert in experts.items():
                self._clusters.add(key, expert, (contributors or {}).get(key), shares[key])

    def reweigh(self, experts: Experts, weight: float) -> None:
        """Give experts that the pool holds another weight."""
        self._check_held(experts)
        more = {key: weight - self._shares[key] for key in experts}
        self._update(self._checked(experts), list(more.values()))
        self._spread = self._with_spreads(experts, more, 0)
        for key, expert in experts.items():
            self._shares[key] = weight
            if self._clusters is not None:
                self._clusters.reweigh(key, expert, weight)

    def remove(self, key: Hashable, expert: Expert | GroupValues) -> None:
        """Undo `add` of the same expert."""
        self._check_held([key])
        experts = self._checked({key: expert})
        if self.count == 1:
            self._clear()  # nothing is left, not even rounding
            return
        less = {key: -self._shares[key]}
        self._update(experts, list(less.values()))
        self._spread = self._with_spreads({key: expert}, less, -1)
        del self._shares[key]
        if self._clusters is not None:
            self._clusters.remove(key, expert)

    def _check_held(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if key not in self._shares:
                raise MergettaError(f"The pool has no expert {key!r}.")

    def _with_spreads(self, experts: Experts, weights: Weights, sign: int = 1) -> tuple[Any, float, int]:
        total, weight, number = self._spread
        for key, expert in experts.items():
            if isinstance(expert, Expert) and expert.spread is not None:
                total = total + weights[key] * expert.spread.astype(np.float64)
                weight, number = weight + weights[key], number + sign
        return total, weight, number

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
        without: Experts | None = None,
    ) -> Bundle:
        """What `build_bundle` makes of the experts in the pool; `without` leaves some of them out, for this once.

        `settings` are added to the bundle's own, for what only the experts know: the loss and the domains.
        """
        without = without or {}
        self._check_held(without)
        count = self.count - len(without)
        if count < 1:
            raise MergettaError("A bundle needs at least one expert.")
        scale = count / math.fsum(weight for key, weight in self._shares.items() if key not in without)
        reduction = Reduction(self.keep, max_rank, tolerance, tolerance_per_entry, moment_tolerance)
        if not np.isfinite(initial):
            raise MergettaError(f"initial must be one finite number, not {initial}.")
        less = {key: -self._shares[key] for key in without}
        total_spread, spread_weight, spreads = self._with_spreads(without, less, -1)
        left_out = self._checked(without)
        between: dict[str, float] = {}
        basis: dict[str, Matrix] = {}
        coefficients: dict[str, Matrix] = {}
        for name, origin in self._base.items():
            matrix, total, dust = self._scatter[name], self._sum[name], self._dust[name]
            if without:
                matrix, total = matrix.copy(), total.copy()
                dust += shift(matrix, total, self._tasks(name, left_out), np.array(list(less.values())))
            total = scale * total
            moves = name in self._weights
            threshold, most = reduction.limits(origin.size, moves)
            if not moves:  # the source model is one of the domains
                apart = scale * matrix.trace() / (count + 1) - float(np.vdot(total, total)) / (count + 1) ** 2
                between[name] = max(apart, 0.0) / origin.size
            each = initial if moves else float(mixture_shares(np.full(count, initial))[0])
            directions = leading_directions(
                matrix,
                dust,
                most,
                threshold,
                start=self._last.get(name, total[None]),
                angle=ACCURACY / (1 + abs(each) * float(np.linalg.norm(total))),
            )
            basis[name], coefficients[name] = directions, each * directions @ total
        if not without:
            self._last = {name: directions for name, directions in basis.items() if len(directions)}
        members = None
        if self._clusters is not None:
            members = (self._clusters.without(without) if without else self._clusters).members(basis)
        spread = np.maximum(total_spread / spread_weight, 0.0) if spreads else None
        pairs, variances = moment_pairs(self._base), None
        if pairs and spread is not None:
            variances = Variances(spread, np.array([[between[pair[row]] for pair in pairs] for row in (0, 1)]))
        elif not pairs:
            variances = feature_variances(spread, members)
        facts: dict[str, Any] = {
            "experts": count,
            "loss": None,
            "domains": [],
            **reduction.recorded(),
            "initial": float(initial),
            "members": self.members,
        }
        facts |= settings or {}
        return Bundle(self._groups, basis, coefficients, tuple(frozen), family, variances, facts, members)

    def energy_kept(self, bundle: Bundle) -> dict[str, float]:
        """Share of each group's energy that a bundle's directions keep: 1 − R of the paper; 1 where there is none."""
        kept = {}
        for name, basis in bundle.basis.items():
            trace = float(self._scatter[name].trace())
            kept[name] = float(np.vdot(basis @ self._scatter[name], basis)) / trace if trace > 0 else 1.0
        return kept

    def _checked(self, experts: Experts) -> list[dict[str, Matrix]]:
        """All of them before any is used: a pool cannot forget half an expert, or an infinite value."""
        whats = ["The expert"] if len(experts) == 1 else [f"Expert {i + 1}" for i in range(len(experts))]
        return [mixed_values(e, self._groups, what) for e, what in zip(experts.values(), whats, strict=True)]

    def _tasks(self, name: str, experts: Sequence[GroupValues]) -> Matrix:
        """(n, D): trimmed task vectors, as `build_bundle` makes them."""
        tasks: Matrix = np.stack([expert[name] for expert in experts]).astype(np.float64) - self._base[name]
        return tasks if self.keep is None or name not in self._weights else keep_largest(tasks, self.keep)

    def _update(self, experts: Sequence[GroupValues], weights: Sequence[float]) -> None:
        for first in range(0, len(experts), CHUNK):
            chunk, shares = experts[first : first + CHUNK], np.array(weights[first : first + CHUNK])
            for name, matrix in self._scatter.items():
                self._dust[name] += shift(matrix, self._sum[name], self._tasks(name, chunk), shares)


def shift(matrix: Matrix, total: Matrix, tasks: Matrix, weights: Matrix) -> float:
    """Add weighted task vectors to G and their sum, or with weights below zero take them away, in place.

    Returns a bound on the rounding error in G.
    """
    before = float(matrix.trace())
    if len(tasks) == 1:
        rows = np.flatnonzero(tasks[0])  # trimming has left 40 % of them
        matrix[rows] += np.outer(weights[0] * tasks[0, rows], tasks[0])
    else:
        matrix += (tasks * weights[:, None]).T @ tasks
    total += weights @ tasks
    energy = float(np.abs(weights) @ (tasks**2).sum(axis=1))
    return EPSILON * (max(before, float(matrix.trace())) + len(tasks) * energy)


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
