"""FOZO (Wang & Wang 2026): two-sided SPSA on a vision transformer's prompts, with a perturbation that decays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, entry
from mergetta.adapters.forward_only.foa import PROMPTS, alignment_loss, check_prompts, forward
from mergetta.adapters.forward_only.source_features import BackToSource, check_source
from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.runtimes.base import Output, Runtime
from mergetta.zeroth_order.spsa import apply, probe

LR, LR_MAX = 0.1, 3.0
"""The learning rate after a jump of the loss, and its bound; else it becomes 0.7 · lr + 0.1."""


class FOZO(Adapter):
    """Returns the logits of the better of the two perturbed prompts: two forward passes, none for the prediction.

    ε decays ×0.9 from `epsilon` to `epsilon_min`, and starts again where the (lower) loss exceeds 1.05 × its average.
    The loss is FOA's, on logits that are already shifted back. The published code averages the sum of the two sides'
    mean features over time; here it is their mean, so that the shift leads to the source and not past it.
    """

    def __init__(
        self,
        runtime: Runtime,
        source: Sequence[Vector],
        weight: float = 0.4,
        epsilon: float = 0.5,
        epsilon_min: float = 0.2,
        lr: float = 0.08,
        seed: int = 0,
    ) -> None:
        super().__init__(runtime)
        check_prompts(runtime, "FOZO")
        if not (0 < epsilon_min <= epsilon and lr >= 0):
            raise MergettaError(f"0 < epsilon_min ≤ epsilon and lr ≥ 0 are needed, not {epsilon_min}, {epsilon}, {lr}.")
        self.back = BackToSource(runtime, check_source(runtime, source))
        self.weight, self.seed = weight, seed
        self.start = epsilon, epsilon_min, lr
        self.sizes = ((PROMPTS, runtime.groups[PROMPTS].size),)
        self.reset()

    def reset(self) -> None:
        self.prompts = self.runtime.groups[PROMPTS].astype(np.float64)
        self.epsilon, _, self.lr = self.start
        self.mean_loss = math.nan
        self.back.mean = None
        self.steps = self.skipped = 0

    def predict(self, images: Array) -> Array:
        tried: list[tuple[Output, Array]] = []

        def loss(prompts: Vector) -> float:
            output = forward(self.runtime, prompts, images)
            tried.append((output, self.back.logits(output)))
            return alignment_loss(*tried[-1], self.back, self.weight)

        step = probe(loss, self.prompts, self.sizes, self.seed, self.steps, self.epsilon, clamp=math.inf)
        self.steps += 1
        self.skipped += step.skipped
        if not step.skipped:
            self._pace(min(step.loss_plus, step.loss_minus))
            self.prompts = apply(self.prompts, self.sizes, step, self.lr)
        self.back.observe(*(output for output, _ in tried))
        losses = np.nan_to_num([step.loss_plus, step.loss_minus], nan=np.inf)
        return tried[int(np.argmin(losses))][1]

    def _pace(self, loss: float) -> None:
        """ε and learning rate after a step."""
        epsilon, smallest, _ = self.start
        self.mean_loss = loss if math.isnan(self.mean_loss) else 0.9 * self.mean_loss + 0.1 * loss
        jumped = loss > 1.05 * self.mean_loss
        self.epsilon = epsilon if jumped else max(smallest, 0.9 * self.epsilon)
        self.lr = LR if jumped else min(LR_MAX, 0.7 * self.lr + 0.1)

    def state_dict(self) -> dict[str, Any]:
        numbers = {name: getattr(self, name) for name in ("steps", "skipped", "epsilon", "lr", "mean_loss")}
        return {**numbers, "prompts": self.prompts.copy(), **self.back.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        steps, skipped = int(entry(state, "steps")), int(entry(state, "skipped"))
        epsilon, lr, mean_loss = (float(entry(state, name)) for name in ("epsilon", "lr", "mean_loss"))
        prompts, mean = np.array(entry(state, "prompts"), dtype=np.float64), self.back.check(state)
        if prompts.shape != self.prompts.shape or not np.isfinite(prompts).all():
            raise MergettaError("This FOZO state does not fit the model: its prompts.")
        self.steps, self.skipped, self.epsilon, self.lr, self.mean_loss = steps, skipped, epsilon, lr, mean_loss
        self.prompts, self.back.mean = prompts, mean
