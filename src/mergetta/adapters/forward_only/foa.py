"""FOA (Niu et al. 2024): CMA-ES over a vision transformer's prompts, and features shifted back to the source's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, part
from mergetta.adapters.forward_only.source_features import BackToSource, check_source, squared_distances
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.losses.probabilities import entropy
from mergetta.runtimes.base import Output, Runtime
from mergetta.zeroth_order.cma_es import CMAES

PROMPTS = "prompts"
"""The group in which a runtime with prompts has them."""


class FOA(Adapter):
    """`population` prompts are tried on each batch, the last batch's best among them; the best one's logits count.

    Loss: total entropy + λ · B/64 · total squared discrepancy of the features' mean and std from the source's. Needs a
    runtime with prompts (`mergetta.runtimes.prompted.PromptedRuntime`) and the extra `peers`.
    """

    def __init__(
        self,
        runtime: Runtime,
        source: Sequence[Vector],
        weight: float = 0.4,
        population: int = 28,
        sigma: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(runtime)
        check_prompts(runtime, "FOA")
        self.back = BackToSource(runtime, check_source(runtime, source))
        self.weight, self.population, self.sigma, self.seed = weight, population, sigma, seed
        self.reset()

    def reset(self) -> None:
        start = self.runtime.groups[PROMPTS]
        self.search = CMAES(np.zeros(start.size), self.seed, self.sigma, self.population, best=start)
        self.back.mean = None

    def predict(self, images: Array) -> Array:
        outputs = [forward(self.runtime, prompts, images) for prompts in self.search.ask()]
        losses = [self.loss(output) for output in outputs]
        logits = self.back.logits(outputs[int(np.argmin(np.nan_to_num(losses, nan=np.inf)))])
        self.search.tell(losses)
        self.back.observe(*outputs)
        return logits

    def loss(self, output: Output) -> float:
        return alignment_loss(output, output.logits, self.back, self.weight)

    def state_dict(self) -> dict[str, Any]:
        return {**{f"search/{name}": value for name, value in self.search.state_dict().items()}, **self.back.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        mean = self.back.check(state)
        self.search.load_state_dict(part(state, "search/"))
        self.back.mean = mean


def check_prompts(runtime: Runtime, method: str) -> None:
    if PROMPTS not in runtime.groups:
        raise MergettaError(
            f"{method} needs a runtime with prompts: a PromptedRuntime, of a vision transformer with a class token."
        )


def forward(runtime: Runtime, prompts: Vector, images: Array) -> Output:
    return runtime(images, {**runtime.groups, PROMPTS: prompts})


def alignment_loss(output: Output, logits: Array, back: BackToSource, weight: float) -> float:
    """Sums, not means, as published: over the batch's entropies, and over channels."""
    features = to_numpy(output.features)
    far = squared_distances(features, back.source).sum() * len(features) / 64
    return float(np.sum(entropy(to_numpy(logits))) + weight * far)
