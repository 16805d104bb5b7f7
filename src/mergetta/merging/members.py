"""Many experts → a few members: clusters of similar experts, each of which stands for its mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from mergetta.bundle import Members
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import GroupValues, as_mixed, learnable
from mergetta.merging.low_rank import Matrix, adaptive_rank, factorise

MOST = 16
"""Members of a bundle, unless said otherwise."""
TOLERANCE = 1e-3
"""Share of the members' task vectors that their coordinates may leave out, in every group."""


@dataclass
class Cluster:
    """Sums over its experts; moments as they mix (means and second moments)."""

    tasks: dict[str, Matrix]
    signature: Matrix | None
    features: Matrix | None
    count: int = 1
    domains: Counter[str] = field(default_factory=Counter)
    contributors: Counter[str] = field(default_factory=Counter)

    def take(self, other: Cluster, sign: int = 1) -> None:
        """Add the experts of another one, or with −1 take them out again."""
        self.tasks = {name: total + sign * other.tasks[name] for name, total in self.tasks.items()}
        for kind in ("signature", "features"):
            mine, theirs = getattr(self, kind), getattr(other, kind)
            setattr(self, kind, None if mine is None or theirs is None else mine + sign * theirs)
        self.count += sign * other.count
        for mine, theirs in ((self.domains, other.domains), (self.contributors, other.contributors)):
            mine.update({key: sign * number for key, number in theirs.items()})


class Clusters:
    """At most `most` clusters, kept up to date expert by expert.

    Each newcomer is a cluster of its own. When there are too many, the two whose union costs least become one. So the
    cost of one more expert does not grow with their number, and the same sequence gives the same clusters.

    References
    ----------
    Ward 1963, Hierarchical grouping to optimize an objective function: the cost of a union.
    """

    def __init__(self, base: GroupValues, most: int = MOST) -> None:
        if most < 1:
            raise MergettaError(f"A bundle needs at least one member, not {most}.")
        self.base, self.most = as_mixed({name: np.asarray(v, np.float32) for name, v in base.items()}), most
        self.weights = tuple(learnable(self.base))
        self.clusters: dict[int, Cluster] = {}
        self._of: dict[Hashable, int] = {}
        self._joined: dict[int, int] = {}  # clusters that have become part of another one
        self._next = 0

    def __len__(self) -> int:
        return len(self._of)

    def add(self, key: Hashable, expert: Expert | Mapping[str, np.ndarray], contributor: str = "") -> None:
        """Take in an expert under a name of its own; who contributed it is counted."""
        self.clusters[self._next] = self._alone(expert, contributor)
        self._of[key] = self._next
        self._next += 1
        while len(self.clusters) > self.most:
            kept, gone = self._nearest()
            self.clusters[kept].take(self.clusters.pop(gone))
            self._joined[gone] = kept

    def remove(self, key: Hashable, expert: Expert | Mapping[str, np.ndarray], contributor: str = "") -> None:
        """Undo `add` of the same expert."""
        number = self._of.pop(key)
        while number in self._joined:
            number = self._joined[number]
        if self.clusters[number].count == 1:
            del self.clusters[number]
        else:
            self.clusters[number].take(self._alone(expert, contributor), -1)

    def without(self, experts: Sequence[tuple[Hashable, Expert | Mapping[str, np.ndarray], str]]) -> Clusters:
        """A copy with some experts taken out."""
        other = deepcopy(self)
        for key, expert, contributor in experts:
            other.remove(key, expert, contributor)
        return other

    def _nearest(self) -> tuple[int, int]:
        """The two whose union adds least to the squared distances of experts from their cluster's mean."""
        clusters = list(self.clusters.values())
        counts = np.array([cluster.count for cluster in clusters])
        weights = [np.concatenate([cluster.tasks[name] for name in self.weights]) for cluster in clusters]
        apart = squared_distances(np.stack(weights) / counts[:, None])
        signatures = moments_of_all([(cluster.signature, cluster.count) for cluster in clusters])
        if signatures is not None:
            signatures[:, 1] = np.sqrt(signatures[:, 1])
            apart += squared_distances(signatures.reshape(len(clusters), -1))
        apart *= counts * counts[:, None] / (counts + counts[:, None])
        apart[np.tril_indices(len(clusters))] = np.inf
        first, second = np.unravel_index(int(apart.argmin()), apart.shape)
        numbers = list(self.clusters)
        return numbers[first], numbers[second]

    def _alone(self, expert: Expert | Mapping[str, np.ndarray], contributor: str) -> Cluster:
        told = expert if isinstance(expert, Expert) else Expert(expert)
        mixed = as_mixed(told.groups)
        tasks = {name: mixed[name].astype(np.float64) - base for name, base in self.base.items()}
        signature, features = (seconds_of(moments) for moments in (told.signature, told.features))
        return Cluster(tasks, signature, features, 1, Counter([told.domain]), Counter([contributor]))

    def members(self, basis: GroupValues, tolerance: float = TOLERANCE) -> Members:
        """The clusters in terms of a bundle's basis, and of as many further directions as it takes."""
        clusters = list(self.clusters.values())
        coordinates, further = {}, {}
        for name in self.base:
            tasks = np.stack([cluster.tasks[name] / cluster.count for cluster in clusters])
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
            moments_of_all([(cluster.signature, cluster.count) for cluster in clusters]),
            moments_of_all([(cluster.features, cluster.count) for cluster in clusters]),
        )


def name_of(cluster: Cluster) -> str:
    """The domain that most of its experts come from."""
    (domain, number), *_ = cluster.domains.most_common(1)
    return domain if number == cluster.count or not domain else f"{domain} and others"


def seconds_of(moments: Matrix | None) -> Matrix | None:
    """Mean and second moment, which add up."""
    if moments is None:
        return None
    mean, variance = moments.astype(np.float64)
    return np.stack([mean, variance + mean**2])


def moments_of_all(sums: Sequence[tuple[Matrix | None, int]]) -> Matrix | None:
    """(M, 2, C): mean and variance of each; None unless all are known and of one size."""
    known = [total / count for total, count in sums if total is not None]
    if len(known) < len(sums) or len({each.shape for each in known}) != 1:
        return None
    return np.stack([[mean, np.maximum(second - mean**2, 0)] for mean, second in known])


def squared_distances(rows: Matrix) -> Matrix:
    """(M, M)."""
    products = rows @ rows.T
    squares = products.diagonal()
    return np.asarray(squares + squares[:, None] - 2 * products)
