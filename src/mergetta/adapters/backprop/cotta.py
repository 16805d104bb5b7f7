"""CoTTA (Wang et al. 2022): a mean teacher with augmentation-averaged answers, and random restoring of source weights.

Defaults are those for CIFAR-10. Published for the others: CIFAR-100 `confidence=0.72`; ImageNet `confidence=0.1,
restore=0.001, symmetric=True, optimizer="sgd", lr=0.01`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergetta.adapters.backprop.mean_teacher import MeanTeacher, TeacherLoss
from mergetta.arrays import Array, beside
from mergetta.errors import MergettaError
from mergetta.losses import Evaluation, Forward
from mergetta.losses.roid import symmetric_cross_entropy
from mergetta.losses.views import colour_and_geometry
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator


class CoTTA(MeanTeacher):
    """Returns what the teacher says: averaged over `views` augmentations where the source model is, on average over the
    batch, less sure than `confidence`. After each step a share `restore` of the student's weights, drawn at random,
    goes back to the source's. The published augmentation also blurs a little and adds a little noise.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        views: int = 32,
        confidence: float = 0.92,
        restore: float = 0.01,
        symmetric: bool = False,
        **options: Any,
    ) -> None:
        if views < 1:
            raise MergettaError(f"views must be at least 1, not {views}.")
        if not 0 <= restore <= 1:
            raise MergettaError(f"restore must lie between 0 and 1, not {restore}.")
        self.views = views
        self.confidence = confidence
        self.restore = restore
        super().__init__(runtime, Imitation(symmetric), **options)

    def answer(self, batch: Tensor) -> Tensor:
        source = self.ask(batch, self.runtime.groups)
        if source.softmax(dim=1).amax(dim=1).mean() >= self.confidence:
            return super().answer(batch)
        rng, every = generator(self.seed, self.steps, "teacher views"), np.ones(len(batch), dtype=bool)
        total = torch.zeros_like(source)
        for _ in range(self.views):
            total += self.ask(colour_and_geometry(batch, rng, every), self.teacher)
        return total / self.views

    def after_step(self) -> None:
        super().after_step()
        with torch.no_grad():
            for name, parameter in self.learnt.items():
                source = self.runtime.groups[name]
                back = generator(self.seed, self.steps, f"restore {name}").random(source.size) < self.restore
                parameter.view(-1)[beside(back, parameter)] = beside(source[back], parameter)

    def returned(self, logits: Tensor) -> Tensor:
        return self.teacher_loss.target


class Imitation(TeacherLoss):
    """Cross-entropy of the student's answer under the teacher's, or of both under each other."""

    def __init__(self, symmetric: bool) -> None:
        self.symmetric = symmetric

    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        logits = forward(images)
        if self.symmetric:
            each = symmetric_cross_entropy(logits, self.target)
        else:
            each = -(self.target.softmax(dim=1) * logits.log_softmax(dim=1)).sum(dim=1)
        return Evaluation(each.mean(), logits, len(images))
