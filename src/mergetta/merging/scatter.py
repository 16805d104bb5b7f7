"""A pool of experts as one scatter matrix per group: `build_bundle` for a hub that never stops collecting.

With an initial coefficient c w for an expert of weight w, the merged group is θ₀ + c (Σ w τ̂) V_rᵀ V_r, and V_r, the
leading right singular vectors of the stacked √w τ̂, are the leading eigenvectors of G = Σ w τ̂ᵀτ̂. So G, Σ w τ̂ and the
weights say all that the experts do: adding one is a rank-one update, retiring one a downdate, weighing it anew both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mergetta.bundle import Bundle, Members
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import GroupValues, as_float32, as_mixed, check_groups, learnable, mixture_shares, moment_pairs
from mergetta.merging.build import feature_variances, mixed_values
from mergetta.merging.eigenvectors import EPSILON, leading_directions
from mergetta.merging.low_rank import Matrix
from mergetta.merging.members import MOST, Clusters
from mergetta.merging.reduction import MOMENT_TOLERANCE, Reduction
from mergetta.merging.trim import keep_largest
from mergetta.streams.variances import Variances

Experts = Mapping[Any, Expert | GroupValues]
"""By keys, which tell them apart."""
Weights = Mapping[Any, float]
ACCURACY = 1e-6
"""How far a merged group and an entry of its basis may be from the exact ones: a tenth of what is promised."""
CHUNK = 256
"""Experts per matrix product in `add_many`: enough for BLAS-3, and little memory."""


@dataclass
class Scatter:
    """Of one group, in float64."""

    matrix: Matrix
    """G = Σ w τ̂ᵀτ̂"""
    total: Matrix
    """Σ w τ̂"""
    rounding: float = 0.0
    """Bound on the rounding error in G, which downdates leave behind."""

    @classmethod
    def empty(cls, size: int) -> Scatter:
        return cls(np.zeros((size, size)), np.zeros(size))

    def take(self, tasks: Matrix, weights: Matrix) -> None:
        """Add weighted task vectors, or with weights below zero take them away."""
        before = float(self.matrix.trace())
        if len(tasks) == 1:
            rows = np.flatnonzero(tasks[0])  # trimming has left 40 % of them
            self.matrix[rows] += np.outer(weights[0] * tasks[0, rows], tasks[0])
        else:
            self.matrix += (tasks * weights[:, None]).T @ tasks
        self.total += weights @ tasks
        energy = float(np.abs(weights) @ (tasks**2).sum(axis=1))
        self.rounding += EPSILON * (max(before, float(self.matrix.trace())) + len(tasks) * energy)

    def with_tasks(self, tasks: Matrix, weights: Matrix) -> Scatter:
        """A copy that has taken these."""
        other = replace(self, matrix=self.matrix.copy(), total=self.total.copy())
        other.take(tasks, weights)
        return other

    @property
    def drift(self) -> float:
        """Rounding relative to what there is; infinite if there is nothing else."""
        trace = float(self.matrix.trace())
        return self.rounding and (self.rounding / trace if trace > self.rounding else np.inf)

    def variance(self, count: int, scale: float) -> float:
        """Per entry, between the domains of so many experts, whose weights are scaled, and the source model."""
        total = scale * self.total
        apart = scale * float(self.matrix.trace()) / (count + 1) - float(np.vdot(total, total)) / (count + 1) ** 2
        return max(apart, 0.0) / total.size

    def energy_kept(self, basis: Matrix) -> float:
        """The share of it that lies in these directions; 1 where there is none."""
        trace = float(self.matrix.trace())
        return float(np.vdot(basis @ self.matrix, basis)) / trace if trace > 0 else 1.0


@dataclass(frozen=True)
class MeanSpread:
    """Of the experts that tell theirs."""

    total: Any = 0.0
    weight: float = 0.0
    count: int = 0

    def with_experts(self, experts: Experts, weights: Weights, sign: int = 1) -> MeanSpread:
        """One that these have come to, or with −1 gone from, or with 0 changed their weight in."""
        told = {k: e.spread for k, e in experts.items() if isinstance(e, Expert) and e.spread is not None}
        total = self.total + sum(weights[key] * spread.astype(np.float64) for key, spread in told.items())
        return MeanSpread(total, self.weight + sum(weights[key] for key in told), self.count + sign * len(told))

    @property
    def value(self) -> Matrix | None:
        return np.maximum(self.total / self.weight, 0.0) if self.count else None


class Pool:
    """A scatter per group, of the trimmed task vectors.

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
        self._spread = MeanSpread()
        self._scatter = {name: Scatter.empty(origin.size) for name, origin in self._base.items()}
        self._last: dict[str, Matrix] = {}  # the last bundle's directions: where the next search starts

    @property
    def count(self) -> int:
        """How many experts there are."""
        return len(self._shares)

    @property
    def nbytes(self) -> int:
        """Memory of the pool's arrays."""
        arrays = [*self._base.values(), *self._last.values()]
        arrays += [array for scatter in self._scatter.values() for array in (scatter.matrix, scatter.total)]
        return sum(array.nbytes for array in arrays) + (self._clusters.nbytes if self._clusters is not None else 0)

    @property
    def drift(self) -> float:
        """Bound on the rounding error relative to what the pool holds; infinite if a group holds nothing else.

        It grows when much larger experts have come and gone. Above 1e-9, fill a new pool with `add_many`.
        """
        return max(scatter.drift for scatter in self._scatter.values())

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
        self._spread = self._spread.with_experts(experts, shares)
        self._shares |= shares
        if self._clusters is not None:
            for key, expert in experts.items():
                self._clusters.add(key, expert, (contributors or {}).get(key), shares[key])

    def reweigh(self, experts: Experts, weight: float) -> None:
        """Give experts that the pool holds another weight."""
        self._check_held(experts)
        more = {key: weight - self._shares[key] for key in experts}
        self._update(self._checked(experts), list(more.values()))
        self._spread = self._spread.with_experts(experts, more, 0)
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
        self._spread = self._spread.with_experts({key: expert}, less, -1)
        del self._shares[key]
        if self._clusters is not None:
            self._clusters.remove(key, expert)

    def _check_held(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if key not in self._shares:
                raise MergettaError(f"The pool has no expert {key!r}.")

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
        reduction = Reduction(self.keep, max_rank, tolerance, tolerance_per_entry, moment_tolerance)
        if not np.isfinite(initial):
            raise MergettaError(f"initial must be one finite number, not {initial}.")
        scale = count / math.fsum(weight for key, weight in self._shares.items() if key not in without)
        basis: dict[str, Matrix] = {}
        coefficients: dict[str, Matrix] = {}
        between: dict[str, float] = {}
        for name, scatter in self._without(without):
            total, moves = scale * scatter.total, name in self._weights
            each = initial if moves else float(mixture_shares(np.full(count, initial))[0])
            start, angle = self._last.get(name, total[None]), ACCURACY / (1 + abs(each) * float(np.linalg.norm(total)))
            threshold, most = reduction.limits(total.size, moves)
            basis[name] = leading_directions(scatter.matrix, scatter.rounding, most, threshold, start, angle)
            coefficients[name] = each * basis[name] @ total
            between[name] = scatter.variance(count, scale)
        if not without:
            self._last = {name: directions for name, directions in basis.items() if len(directions)}
        members = None
        if self._clusters is not None:
            members = (self._clusters.without(without) if without else self._clusters).members(basis)
        variances = self._variances(between, without, members)
        facts = {"experts": count, "loss": None, "domains": [], **reduction.recorded(), "initial": float(initial)}
        facts |= {"members": self.members, **(settings or {})}
        return Bundle(self._groups, basis, coefficients, tuple(frozen), family, variances, facts, members)

    def _without(self, experts: Experts) -> Iterator[tuple[str, Scatter]]:
        """Every group's scatter, one after the other, with some experts left out of it."""
        left_out, weights = self._checked(experts), np.array([-self._shares[key] for key in experts])
        for name, scatter in self._scatter.items():
            yield name, scatter.with_tasks(self._tasks(name, left_out), weights) if experts else scatter

    def _variances(self, between: Mapping[str, float], without: Experts, members: Members | None) -> Variances | None:
        less = {key: -self._shares[key] for key in without}
        spread, pairs = self._spread.with_experts(without, less, -1).value, moment_pairs(self._base)
        if not pairs or spread is None:
            return None if pairs else feature_variances(spread, members)
        return Variances(spread, np.array([[between[pair[row]] for pair in pairs] for row in (0, 1)]))

    def energy_kept(self, bundle: Bundle) -> dict[str, float]:
        """Share of each group's energy that a bundle's directions keep: 1 − R of the paper; 1 where there is none."""
        return {name: self._scatter[name].energy_kept(basis) for name, basis in bundle.basis.items()}

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
            for name, scatter in self._scatter.items():
                scatter.take(self._tasks(name, chunk), shares)
