"""EATA (Niu et al. 2022): entropy of certain and uncommon samples, held near the source weights where those matter.

Defaults are those for CIFAR-10. Published for the others: CIFAR-100 `redundancy=0.1`; ImageNet `redundancy=0.05,
alpha=2000, optimizer="sgd", lr=2.5e-4`. A redundancy far below 1/√classes keeps next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.arrays import Array, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.groups import GroupValues, Vector, check_groups, learnable
from mergetta.losses import Evaluation, Forward
from mergetta.losses.mean_prediction import MeanPredictionLoss
from mergetta.losses.probabilities import entropy
from mergetta.runtimes.torch_runtime import TorchRuntime


class EATA(BackpropAdapter):
    """Without `fisher` (see `estimate_fisher`) nothing holds the weights: that is the method's own variant ETA."""

    def __init__(
        self,
        runtime: TorchRuntime,
        fisher: GroupValues | None = None,
        alpha: float = 1.0,
        redundancy: float = 0.4,
        entropy_margin: float = 0.4,
        **options: Any,
    ) -> None:
        if fisher is not None:
            known = {name: runtime.groups[name] for name in learnable(runtime.groups)}
            check_groups(fisher, known, "The Fisher information")
        self.fisher = fisher
        self.alpha = alpha
        super().__init__(runtime, CertainAndUncommon(redundancy, entropy_margin), **{"nesterov": False, **options})

    def _step(self, value: Tensor) -> bool:
        return super()._step(value if self.fisher is None else value + self.penalty(self.fisher))

    def penalty(self, fisher: GroupValues) -> Tensor:
        """α Σ F (θ − θ₀)²"""
        terms = [
            (beside(fisher[name], p) * (p.view(-1) - beside(self.runtime.groups[name], p)) ** 2).sum()
            for name, p in self.learnt.items()
        ]
        return self.alpha * torch.stack(terms).sum()


class CertainAndUncommon(MeanPredictionLoss):
    """Its mean prediction p̄ is over the samples that were learnt from."""

    def __init__(self, redundancy: float, entropy_margin: float, momentum: float = 0.9) -> None:
        self.redundancy = redundancy
        self.entropy_margin = entropy_margin
        self.momentum = momentum

    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        logits = forward(images)
        keep = self.keep(logits.detach())
        h = entropy(logits[keep])
        weights = torch.exp(self.entropy_margin * math.log(logits.shape[1]) - h.detach())
        return Evaluation((weights * h).mean(), logits, int(keep.sum()))

    def keep(self, logits: Tensor) -> Tensor:
        """Which samples have H < margin · ln K and |cos(p, p̄)| < redundancy."""
        certain: Tensor = entropy(logits) < self.entropy_margin * math.log(logits.shape[1])
        if self.mean_prediction is None:
            return certain
        common = F.cosine_similarity(logits.softmax(dim=1), beside(self.mean_prediction, logits)[None], dim=1)
        return certain & (common.abs() < self.redundancy)

    def observe(self, logits: Array) -> None:
        kept = logits[self.keep(logits)].softmax(dim=1)
        if len(kept):
            now, before = to_numpy(kept.mean(dim=0)), self.mean_prediction
            self.mean_prediction = now if before is None else self.momentum * before + (1 - self.momentum) * now


def estimate_fisher(runtime: TorchRuntime, batches: Iterable[Array]) -> dict[str, Vector]:
    """How much each weight matters on source images (2,000 as published): the mean over batches of the squared
    gradient of the cross-entropy with the source model's own predictions. Its scale depends on the batch size.
    """
    source = runtime.tensors(runtime.groups)
    weights = {name: source[name].clone().requires_grad_() for name in learnable(runtime.groups)}
    parameters = list(weights.values())
    total, count = [torch.zeros_like(p) for p in parameters], 0
    for images in batches:
        logits = runtime.forward(images, weights).logits
        loss = F.cross_entropy(logits, logits.argmax(dim=1))
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        total, count = [t + g**2 for t, g in zip(total, gradients, strict=True)], count + 1
    if not count:
        raise MergettaError("There are no source images to estimate the Fisher information from.")
    return {n: (t / count).numpy(force=True).reshape(-1) for n, t in zip(weights, total, strict=True)}
