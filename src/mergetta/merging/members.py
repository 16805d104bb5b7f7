"""Many experts → a few members: clusters of similar experts, each of which stands for its mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mergetta.bundle import Members
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import GroupValues, as_float32, as_mixed, learnable
from mergetta.merging.low_rank import Matrix, adaptive_rank, factorise
from mergetta.streams.variances import with_seconds

MOST = 16
"""Members of a bundle, unless said otherwise."""
TOLERANCE = 1e-3
"""Share of the members' task vectors that their coordinates may leave out, in every group."""
SIZES = 4
"""Of signatures, and of features, so many numbers of channels are remembered. A family has one; the others are wrong,
and must not fill the memory."""
LARGEST = float(np.finfo(np.float32).max)
ROUNDING = 1e-9
"""Of sums of weights: half of them is not more than half."""


@dataclass
class Cluster:
    """Weighted sums over its experts; moments as they mix (means and second moments)."""

    tasks: Matrix
    """All groups side by side."""
    told: dict[tuple[str, int], tuple[Matrix, float, int]]
    """Signatures and features by their number of channels: the sum, its weight, and how many experts have told."""
    weight: float
    count: int = 1
    domains: Counter[str] = field(default_factory=Counter)
    contributors: Counter[Hashable] = field(default_factory=Counter)

    def take(self, other: Cluster, sign: int = 1) -> None:
        """Add the experts of another one, or with −1 take them out again."""
        self.tasks = self.tasks + sign * other.tasks
        for kind, (total, weight, number) in other.told.items():
            mine, weighs, known = self.told.pop(kind, (np.zeros_like(total), 0.0, 0))
            if known + sign * number:  # else nothing is left, not even rounding
                self.told[kind] = mine + sign * total, weighs + sign * weight, known + sign * number
        self.weight += sign * other.weight
        self.count += sign * other.count
        self.domains.update({name: sign * number for name, number in other.domains.items()})
        self.contributors.update({name: sign * number for name, number in other.contributors.items()})

    def copy(self) -> Cluster:
        """One that can change without changing this one."""
        return replace(
            self, told=dict(self.told), domains=Counter(self.domains), contributors=Counter(self.contributors)
        )


class Clusters:
    """At most `most` clusters, kept up to date expert by expert.

    Each newcomer is a cluster of its own. When there are too many, the two whose union costs least become one. So the
    cost of one more expert does not grow with their number, and the same sequence gives the same clusters. Retiring
    and weighing anew leave the others where they are, so a sequence that begins with what is left may give others.

    References
    ----------
    Ward 1963, Hierarchical grouping to optimize an objective function: the cost of a union.
    """

    def __init__(self, base: GroupValues, most: int = MOST) -> None:
        if most < 1:
            raise MergettaError(f"A bundle needs at least one member, not {most}.")
        mixed, self.most = as_mixed(as_float32(base)), most
        weights = learnable(mixed)
        self._names = (*weights, *(name for name in mixed if name not in set(weights)))  # distances are of weights only
        self._base = np.concatenate([mixed[name] for name in self._names]).astype(np.float64)
        self._ends = np.cumsum([mixed[name].size for name in self._names])
        self._weights = int(self._ends[len(weights) - 1]) if weights else 0
        self.clusters: dict[int, Cluster] = {}
        self._of: dict[Hashable, tuple[int, Hashable, float]] = {}  # where it began, its contributor, its weight
        self._joined: dict[int, int] = {}  # clusters that have become part of another one
        self._sizes: dict[str, set[int]] = {"signature": set(), "features": set()}
        self._next = 0

    def __len__(self) -> int:
        return len(self._of)

    @property
    def nbytes(self) -> int:
        """Memory of the clusters' arrays."""
        told = [total for cluster in self.clusters.values() for total, _, _ in cluster.told.values()]
        return self._base.nbytes + sum(a.nbytes for a in (*(c.tasks for c in self.clusters.values()), *told))

    def add(
        self, key: Hashable, expert: Expert | GroupValues, contributor: Hashable | None = None, weight: float = 1.0
    ) -> None:
        """Take in an expert under a key of its own; who contributed it is counted, by default as somebody new."""
        if key in self._of:
            raise MergettaError(f"There is an expert {key!r} already.")
        known = key if contributor is None else contributor
        self.clusters[self._next] = self._alone(expert, known, weight)
        self._of[key] = self._next, known, weight
        self._next += 1
        while len(self.clusters) > self.most:
            kept, gone = self._nearest()
            self.clusters[kept].take(self.clusters.pop(gone))
            self._joined[gone] = kept

    def remove(self, key: Hashable, expert: Expert | GroupValues) -> None:
        """Undo `add` of the same expert."""
        if key not in self._of:
            raise MergettaError(f"There is no expert {key!r} to remove.")
        number, contributor, weight = self._of.pop(key)
        number = self._now(number)
        if self.clusters[number].count == 1:
            del self.clusters[number]
        else:
            self.clusters[number].take(self._alone(expert, contributor, weight), -1)

    def reweigh(self, key: Hashable, expert: Expert | GroupValues, weight: float) -> None:
        """Give an expert another weight in its cluster's mean."""
        number, contributor, before = self._of[key]
        self._of[key] = number, contributor, weight
        cluster = self.clusters[self._now(number)]
        cluster.take(self._alone(expert, contributor, weight))
        cluster.take(self._alone(expert, contributor, before), -1)

    def _now(self, number: int) -> int:
        """The cluster that one has become part of."""
        while number in self._joined:
            number = self._joined[number]
        return number

    def without(self, experts: Mapping[Any, Expert | GroupValues]) -> Clusters:
        """A copy with some experts taken out."""
        other = copy(self)
        other.clusters = {number: cluster.copy() for number, cluster in self.clusters.items()}
        other._of, other._joined = dict(self._of), dict(self._joined)
        other._sizes = {kind: set(sizes) for kind, sizes in self._sizes.items()}
        for key, expert in experts.items():
            other.remove(key, expert)
        return other

    def _nearest(self) -> tuple[int, int]:
        """The two whose union adds least to the squared distances of experts from their cluster's mean."""
        clusters = list(self.clusters.values())
        weights = np.array([cluster.weight for cluster in clusters])
        apart = squared_distances(np.stack([cluster.tasks[: self._weights] / cluster.weight for cluster in clusters]))
        signatures = self._moments("signature")
        if signatures is not None:
            signatures[:, 1] = np.sqrt(signatures[:, 1])
            apart += squared_distances(signatures.reshape(len(clusters), -1))
        apart *= weights * weights[:, None] / (weights + weights[:, None])
        apart[np.tril_indices(len(clusters))] = np.inf
        first, second = np.unravel_index(int(apart.argmin()), apart.shape)
        numbers = list(self.clusters)
        return numbers[first], numbers[second]

    def _alone(self, expert: Expert | GroupValues, contributor: Hashable, weight: float) -> Cluster:
        known = expert if isinstance(expert, Expert) else Expert(expert)
        mixed = as_mixed(known.groups)
        tasks = np.concatenate([mixed[name] for name in self._names]).astype(np.float64) - self._base
        told = {}
        for kind, sizes in self._sizes.items():
            moments = getattr(known, kind)
            if moments is not None and (moments.shape[1] in sizes or len(sizes) < SIZES):
                sizes.add(moments.shape[1])
                told[kind, moments.shape[1]] = weight * with_seconds(moments), weight, 1
        return Cluster(weight * tasks, told, weight, 1, Counter([known.domain]), Counter([contributor]))

    def _moments(self, kind: str) -> Matrix | None:
        """(M, 2, C): mean and variance of each cluster; None unless experts of more than half of the weight tell of C
        channels.

        A cluster that does not tell gets those of all experts together: one that leaves its signature out, or has
        another model's, neither stops a build nor takes the others' away.
        """
        clusters = list(self.clusters.values())
        everybody = sum(cluster.weight for cluster in clusters)
        for channels in self._sizes[kind]:
            found = [cluster.told.get((kind, channels), (np.zeros((2, channels)), 0.0, 0)) for cluster in clusters]
            weights = np.array([weight for _, weight, _ in found])
            if 2 * weights.sum() > (1 + ROUNDING) * everybody:
                sums = np.stack([total for total, _, _ in found])
                silent = np.array([number == 0 for _, _, number in found])
                means = sums / np.where(silent, 1.0, weights)[:, None, None]
                means[silent] = sums.sum(axis=0) / weights.sum()
                variances = np.clip(means[:, 1] - means[:, 0] ** 2, 0.0, LARGEST)
                return np.stack([means[:, 0], variances], axis=1)
        return None

    def members(self, basis: GroupValues, tolerance: float = TOLERANCE) -> Members:
        """The clusters in terms of a bundle's basis, and of as many further directions as it takes."""
        clusters = list(self.clusters.values())
        weights = np.array([cluster.weight for cluster in clusters])
        means = np.stack([cluster.tasks for cluster in clusters]) / weights[:, None]
        counted = np.minimum(weights, weights.sum() / len({known for _, known, _ in self._of.values()}))
        coordinates, further = {}, {}
        for name, tasks in zip(self._names, np.split(means, self._ends[:-1], axis=1), strict=True):
            known = np.asarray(basis[name], dtype=np.float64)
            inside = tasks @ known.T
            rest = factorise(tasks - inside @ known)
            energies = rest.energies if (tasks**2).sum() else rest.energies[:0]
            allowed = tolerance * float((tasks**2).sum())
            rank = adaptive_rank(energies, allowed / energies.sum()) if energies.sum() > allowed else 0
            coordinates[name] = np.hstack([inside, rest.coordinates[:, :rank]])
            further[name] = rest.basis[:rank]
        return Members(
            tuple(name_of(cluster) for cluster in clusters),
            coordinates,
            further,
            np.array([cluster.count for cluster in clusters]),
            np.array([sum(number > 0 for number in cluster.contributors.values()) for cluster in clusters]),
            counted / counted.max(),
            self._moments("signature"),
            self._moments("features"),
        )


def name_of(cluster: Cluster) -> str:
    """The domain that most of its experts come from; of several, the first in the alphabet."""
    domain, number = min(cluster.domains.items(), key=lambda entry: (-entry[1], entry[0]))
    return domain if number == cluster.count or not domain else f"{domain} and others"


def squared_distances(rows: Matrix) -> Matrix:
    """(M, M)."""
    products = rows @ rows.T
    squares = products.diagonal()
    return np.asarray(np.maximum(squares + squares[:, None] - 2 * products, 0.0))
