"""How experts are made: one pass of a back-propagation method over one domain, from the source model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from mergetta.adapters import create_adapter, find_method
from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import has_batch_norm, layer_sizes, with_moments
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.streams.moments import StreamMoments, batch_moments

MEMORY = 1000
"""Images that an expert's moments are those of, at most: the last ones, seen with scales and shifts near the final."""


def train_expert(
    runtime: TorchRuntime,
    batches: Iterable[Array],
    method: str = "roid",
    domain: str = "",
    seed: int = 0,
    **options: Any,
) -> Expert:
    """Adapt on unlabelled batches and return what a strong device shares.

    Parameters
    ----------
    runtime
        The source model.
    batches
        Images of one domain, NCHW in [0, 1].
    method
        `roid`, `deyo`, `tent` or another method that back-propagates.
    domain
        What to call the domain.
    seed
        Of augmented views.
    options
        Of the method: `lr`, `optimizer`, …

    Examples
    --------
    >>> from mergetta import load_family
    >>> images = np.random.default_rng(0).random((8, 1, 28, 28), np.float32)
    >>> train_expert(TorchRuntime(load_family("fashion-bn")), [images], "tent", domain="noise").domain
    'noise'
    """
    training = Training(runtime, method, seed, **options)
    for images in batches:
        training.adapter.predict(images)
        training.observe(images)
    return training.expert(domain)


class Training:
    """A back-propagation method at work on a domain: call `adapter.predict`, then `observe`, with each batch.

    What an expert tells of its domain comes from the passes in which it learnt: its moments are those that its scales
    and shifts were adapted with.
    """

    def __init__(self, runtime: TorchRuntime, method: str = "roid", seed: int = 0, **options: Any) -> None:
        if not find_method(method).backprop:
            raise MergettaError(f"Experts are made by back-propagation, and {method!r} is forward-only.")
        self.runtime = runtime
        self.adapter = cast(BackpropAdapter, create_adapter(method, runtime, seed=seed, **options))  # as METHODS says
        self.adapter.watching = self.batch_norm = has_batch_norm(runtime.structure)
        told = {name: value for name, value in options.items() if not isinstance(value, Bundle)}
        self.provenance = {"method": method, "seed": seed, "options": told}
        self.samples = 0
        self.seen: dict[str, StreamMoments] = {}

    def observe(self, images: Array) -> None:
        """Take in what the method has just seen of these images."""
        output = self.adapter.output
        assert output is not None
        features = to_numpy(output.features)
        each = to_numpy(output.moments) if self.batch_norm else np.stack([features, np.zeros_like(features)], axis=1)
        each = each.astype(np.float64)
        self._add("signature", to_numpy(output.signature), len(images))
        self._add("moments", batch_moments(each), len(images), MEMORY)
        each[:, 1] += each[:, 0] ** 2
        self._add("spread", np.stack([each.mean(axis=0), each.var(axis=0)]).reshape(2, -1), len(images))
        self.samples += len(images)

    def _add(self, name: str, moments: np.ndarray, images: int, memory: float = np.inf) -> None:
        self.seen.setdefault(name, StreamMoments(moments.shape[1], memory)).add(moments, images)

    def expert(self, domain: str = "") -> Expert:
        if not self.samples:
            raise MergettaError("There are no images to adapt on.")
        groups = self.adapter.groups
        for name, vector in groups.items():
            if not np.isfinite(vector).all():
                raise MergettaError(f"Adaptation diverged (group {name!r}): use a lower learning rate.")
        signature, moments, spread = (self.seen[name].value() for name in ("signature", "moments", "spread"))
        sizes = layer_sizes(groups) or [moments.shape[1]]
        starts = np.append(0, np.cumsum(sizes)[:-1])
        spread = np.add.reduceat(spread[1].reshape(2, -1), starts, axis=1) / sizes
        features = None if self.batch_norm else moments
        if self.batch_norm:
            groups = with_moments(groups, moments)
        provenance = {**self.provenance, "samples": self.samples}
        return Expert(groups, self.runtime.family, domain, signature, features, spread, provenance)
