"""UnMix-TNS (Tomar et al. 2024): each image is normalised with K streaming statistics, mixed with its own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.groups import layer_sizes, moments_of, with_moments
from mergetta.runtimes.base import Output, Runtime, joined
from mergetta.seeds import generator
from mergetta.streams.state import Field, checked


class UnMixTNS(Adapter):
    """Every BatchNorm layer keeps K components (μ_k, v_k), which stand for the classes and styles that a stream mixes.

    An image with moments (m, s) at a layer belongs to component k by p_k = softmax(cos(m, μ_k) / temperature). It moves
    each component a little its own way, μ'_k = (1 − p_k)·μ_k + p_k·m and likewise v'_k, and is normalised with the
    moments of the equal mixture of all: mean_k μ'_k, and mean_k v'_k plus the variance of μ'_k over k. After the batch,
    components move by momentum · mean over images of p_k·((m, s) − (μ_k, v_k)). They start around the stored moments:
    √(α·K / (K − 1))·σ·noise aside, with the variance (1 − α)·σ², so that their mixture has what is stored on average.

    Published: K = 16 (128 where domains are mixed), α = 0.5, temperature 0.07, and the momentum of the layer, 0.1, for
    64 images, which a batch of another size takes to the power: 1 − 0.9^(B / 64). (On ImageNet-C it is 16 images.)

    In the network a layer sees what the layers before it have normalised, but a runtime is told all moments before a
    pass. So they are found by `rounds` passes for each image, of which the last one predicts. Every round makes them
    exact for one more layer, and one round more than there are layers gives the published one. Without BatchNorm it is
    the source.

    References
    ----------
    D. Tomar, G. Vray, J.-P. Thiran and B. Bozorgtabar, Un-Mixing Test-Time Normalization Statistics: Combatting Label
    Temporal Correlation, ICLR 2024.
    """

    def __init__(
        self,
        runtime: Runtime,
        components: int = 16,
        alpha: float = 0.5,
        temperature: float = 0.07,
        momentum: float = 0.1,
        reference: int = 64,
        rounds: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__(runtime)
        if components < 1 or rounds < 1 or reference < 1:
            raise MergettaError(
                f"components, rounds and reference must be 1 at least: {components}, {rounds}, {reference}."
            )
        if not (0 <= alpha < 1 and 0 <= momentum < 1 and temperature > 0):
            raise MergettaError(
                f"alpha and momentum must lie in [0, 1), temperature be positive: {alpha}, {momentum}, {temperature}."
            )
        self.count, self.alpha, self.temperature = components, alpha, temperature
        self.momentum, self.reference, self.rounds, self.seed = momentum, reference, rounds, seed
        self.sizes = layer_sizes(runtime.groups)
        self.reset()

    def reset(self) -> None:
        rng = generator(self.seed, 0, "unmix-tns")
        source = moments_of(self.runtime.groups).astype(np.float64)
        self.components = scattered(source, self.count, self.alpha, rng)

    def predict(self, images: Array) -> Array:
        if not self.sizes:
            return self.runtime(images, given=1.0).logits
        seen = to_numpy(self._pass(images, mixture(self.components)).moments)
        outputs, pull = [], np.zeros_like(self.components)
        for index, own in enumerate(seen):
            for _ in range(self.rounds):
                moved = self._towards(own)
                output = self._pass(images[index][None], mixture(self.components + moved))
                own = to_numpy(output.moments)[0]
            outputs.append(output._replace(moments=None))
            pull += self._towards(own)
        momentum = 1 - (1 - self.momentum) ** (len(images) / self.reference)
        now = self.components + momentum * pull / len(images)
        if np.isfinite(now).all():
            self.components = now
        return joined(outputs).logits

    def _pass(self, images: Array, moments: NDArray[Any]) -> Output:
        return self.runtime(images, with_moments(self.runtime.groups, moments), 1.0, moments=True)

    def _towards(self, own: NDArray[Any]) -> NDArray[Any]:
        """p_k · (what an image shows − the component), (K, 2, C)."""
        shares = belonging(own[0], self.components[:, 0], self.sizes, self.temperature)
        return np.asarray(np.repeat(shares, self.sizes, axis=1)[:, None] * (own - self.components))

    def state_dict(self) -> dict[str, Any]:
        return {"components": self.components.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        found = checked(state, {"components": Field(self.components.shape)})["components"]
        if (found[:, 1] < 0).any():
            raise MergettaError("This UnMix-TNS state has negative variances.")
        self.components = found


def scattered(source: NDArray[Any], count: int, alpha: float, rng: np.random.Generator) -> NDArray[Any]:
    """Components around stored moments (2, C): (K, 2, C). One alone is what is stored."""
    if count == 1:
        return source[None].copy()
    aside = math.sqrt(alpha * count / (count - 1)) * np.sqrt(source[1]) * rng.normal(size=(count, source.shape[1]))
    return np.stack([source[0] + aside, np.broadcast_to((1 - alpha) * source[1], aside.shape)], axis=1)


def belonging(own: NDArray[Any], means: NDArray[Any], sizes: list[int], temperature: float) -> NDArray[Any]:
    """How much an image of means (C,) belongs to each component of means (K, C), layer by layer: (K, layers).

    >>> belonging(np.array([1.0, 0.0]), np.array([[2.0, 0.0], [0.0, 3.0]]), [2], 0.5).round(3).ravel().tolist()
    [0.881, 0.119]
    """
    starts = np.cumsum([0, *sizes[:-1]])
    lengths = np.sqrt(np.add.reduceat(own**2, starts) * np.add.reduceat(means**2, starts, axis=1))
    cosines = np.add.reduceat(own * means, starts, axis=1) / np.maximum(lengths, 1e-12)
    weights = np.exp((cosines - cosines.max(axis=0)) / temperature)
    return np.asarray(weights / weights.sum(axis=0))


def mixture(components: NDArray[Any]) -> NDArray[Any]:
    """Mean and variance (2, C) of the equal mixture of components (K, 2, C).

    >>> mixture(np.array([[[0.0], [1.0]], [[2.0], [3.0]]])).ravel().tolist()
    [1.0, 3.0]
    """
    return np.stack([components[:, 0].mean(axis=0), components[:, 1].mean(axis=0) + components[:, 0].var(axis=0)])
