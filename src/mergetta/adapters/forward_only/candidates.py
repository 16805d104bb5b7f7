"""What a bundle offers a race: a first mixture, multiples of its members' mean, each member, the source model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.forward_only.cola import by_similarity
from mergetta.bundle import Bundle, Members
from mergetta.errors import MergettaError
from mergetta.groups import Vector, learnable
from mergetta.runtimes.base import Runtime

SOURCE = "source model"
FURTHER = (2, 4)
"""How many times the members' mean is tried."""


class Candidates:
    """Each is a weight for every member, and one for the source model at the end.

    Parameters
    ----------
    mean
        Share of the members' mean in the first mixture; the rest goes by similarity.
    similarity
        Whether the first mixture, and who is tried first, goes by similarity of signatures.
    scale
        Whether multiples of the members' mean are tried.
    """

    def __init__(self, runtime: Runtime, bundle: Bundle, mean: float, similarity: bool, scale: bool) -> None:
        members = bundle.known_members
        prior = members.weights.astype(np.float64)
        self.names, self.size, self.share = members.names, len(prior) + 1, mean
        self.prior, self.mean = np.append(prior, 1), np.append(prior / prior.sum(), 0)
        self.signatures = signatures_of(members, runtime) if similarity else None
        self.products = products(bundle)
        self.multiples = [times * self.mean for times in FURTHER if scale and is_finite(bundle, times * self.mean)]

    @property
    def channels(self) -> int | None:
        """Of a signature, if members have some."""
        return None if self.signatures is None else int(self.signatures.shape[2])

    def lengths(self, weights: NDArray[Any]) -> Vector:
        """How far candidates, (N, M + 1), go from the source model, in lengths of its own scales and shifts."""
        members = np.asarray(weights, dtype=np.float64)[:, :-1]
        return np.asarray(np.sqrt(np.maximum(np.einsum("ni,ij,nj->n", members, self.products, members), 0)))

    def check(self, channels: int | None) -> None:
        """Raise if the stream's signatures have other channels."""
        if None not in (channels, self.channels) and channels != self.channels:
            raise MergettaError("The members' signatures are not of this model.")

    def ordered(self, signature: NDArray[Any] | None, carried: Vector | None = None) -> list[Any]:
        """The first mixture, unless one is `carried` over, and who is tried in which order, by similarity; the source
        model right after the first, so that what is worse is known at once.
        """
        first = order = self.mean
        if self.signatures is not None and signature is not None:
            order = by_similarity(self.signatures, signature, prior=self.prior)
            first = self.share * self.mean + (1 - self.share) * order
        first = first if carried is None else carried
        each = np.eye(self.size)
        return [first, each[-1], *self.multiples, each[np.argsort(-order[:-1], kind="stable")]]


def products(bundle: Bundle) -> NDArray[np.float64]:
    """Scalar products of the members' task vectors, in squares of the length of what they start from, (M, M)."""
    names = learnable(bundle.base)
    tasks = [np.asarray(bundle.member_tasks[name], dtype=np.float64) for name in names]
    length = sum(float(np.square(bundle.base[name], dtype=np.float64).sum()) for name in names)
    return np.asarray(sum(each @ each.T for each in tasks) / max(length, 1e-12))


def is_finite(bundle: Bundle, weights: Vector) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        return all(np.isfinite(vector).all() for vector in bundle.mixture(weights[:-1]).values())


def signatures_of(members: Members, runtime: Runtime) -> NDArray[Any] | None:
    """(M + 1, 2, C), with NaN for a source model that has none. None unless all members have some."""
    if members.signatures is None:
        return None
    found = members.signatures
    source = np.full_like(found[0], np.nan) if runtime.signature is None else runtime.signature
    if source.shape != found[0].shape:
        raise MergettaError("The members' signatures are not of this model.")
    return np.stack([*found, source])


def label(name: str) -> str:
    """What a member is called beside the source model."""
    return name if name != SOURCE else f"{SOURCE} (a member)"


def named(names: Sequence[str], weights: Vector) -> dict[str, float]:
    """Weights by the names of members, which may share one, and of the source model."""
    found = {SOURCE: float(weights[-1])}
    for name, weight in zip(names, weights[:-1], strict=True):
        key = label(name)
        found[key] = found.get(key, 0.0) + float(weight)
    return found


def carried(weights: Mapping[str, float], names: Sequence[str]) -> Vector:
    """Weights of other members, by name; what those had that are gone goes to all alike."""
    labels = [label(name) for name in names]
    counts = Counter(labels)
    kept = np.array([weights.get(name, 0.0) / counts[name] for name in labels])
    gone = sum(weight for name, weight in weights.items() if name not in counts and name != SOURCE)
    return np.append(kept + gone / len(names), weights[SOURCE])
