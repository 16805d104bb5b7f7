"""SAR (Niu et al. 2023): entropy of certain samples, made low and flat, with recovery from collapse.

The learning rate is the published one for BatchNorm (2.5e-4) or other norms (1e-3), at a batch size of 64. A common
choice for CIFAR is `optimizer="adam", lr=1e-3`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergetta.adapters.backprop.base import COUNT, BackpropAdapter
from mergetta.arrays import Array
from mergetta.groups import has_batch_norm, paper_frozen
from mergetta.losses import Evaluation, Forward, Loss
from mergetta.losses.probabilities import entropy
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.streams.state import Field, checked


class SAR(BackpropAdapter):
    """Two forward and backward passes per batch (SAM): up to the worst weights within `radius`, then down from there.

    When the running mean of the loss falls below `recover_below`, the weights go back to the source's and the mean
    starts anew (in the public code it lingers, so that the recovery repeats for some batches). Samples that turn out
    uncertain only in the second pass count no more; if none is left nothing moves. The last block (CNN) or the last
    three (transformer) stay as they are, unless `frozen` says otherwise.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        radius: float = 0.05,
        recover_below: float = 0.2,
        entropy_margin: float = 0.4,
        lr: float | None = None,
        frozen: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        self.radius = radius
        self.recover_below = recover_below
        self.certain = Certain(entropy_margin)
        if lr is None:
            lr = 2.5e-4 if has_batch_norm(runtime.structure) else 1e-3
        frozen = paper_frozen(runtime.structure) if frozen is None else frozen
        options = {"optimizer": "sgd", "nesterov": False, **options}
        super().__init__(runtime, self.certain, lr=lr, frozen=frozen, **options)

    def reset(self) -> None:
        super().reset()
        self.mean_loss: float | None = None
        self.recoveries = 0

    def predict(self, images: Array) -> Array:
        self._batch = self.runtime.tensor(images)
        logits = super().predict(images)
        if self.mean_loss is not None and self.mean_loss < self.recover_below:
            steps, skipped, recoveries = self.steps, self.skipped, self.recoveries + 1
            self.reset()
            self.steps, self.skipped, self.recoveries = steps, skipped, recoveries
        return logits

    def _step(self, value: Tensor) -> bool:
        parameters = list(self.learnt.values())
        gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
        scale = self.radius / (torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])) + 1e-12)
        here = [parameter.detach().clone() for parameter in parameters]
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(scale * gradient)
        try:
            h = entropy(self.forward(self._batch))[self.certain.which]
            second = h[h.detach() < self.certain.limit].mean()
            gradients = torch.autograd.grad(second, parameters, materialize_grads=True)
        finally:
            with torch.no_grad():
                for parameter, old in zip(parameters, here, strict=True):
                    parameter.copy_(old)
        loss = float(second.detach())
        if not math.isfinite(loss):
            return False
        self.mean_loss = loss if self.mean_loss is None else 0.9 * self.mean_loss + 0.1 * loss
        # A function whose gradient here is the one found there.
        return super()._step(torch.stack([(p * g).sum() for p, g in zip(parameters, gradients, strict=True)]).sum())

    def state_dict(self) -> dict[str, Any]:
        known = {} if self.mean_loss is None else {"mean_loss": self.mean_loss}
        return {**super().state_dict(), "recoveries": self.recoveries, **known}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        told = {"mean_loss": Field()} if "mean_loss" in state else {}
        found = checked(state, {"recoveries": COUNT, **told})
        super().load_state_dict(state)
        self.recoveries = int(found["recoveries"])
        self.mean_loss = float(found["mean_loss"]) if told else None


class Certain(Loss):
    """Mean entropy of the samples with H < margin · ln K. Says `which` those were, for the second pass."""

    def __init__(self, entropy_margin: float) -> None:
        self.entropy_margin = entropy_margin
        self.limit = math.nan
        self.which: Tensor | None = None

    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        logits = forward(images)
        h = entropy(logits)
        self.limit = self.entropy_margin * math.log(logits.shape[1])
        self.which = h.detach() < self.limit
        return Evaluation(h[self.which].mean(), logits, int(self.which.sum()))
