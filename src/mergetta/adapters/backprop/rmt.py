"""RMT (Döbler et al. 2023): a mean teacher with symmetric cross-entropy and contrast to the source's class prototypes.

Defaults are those for CIFAR. Published for ImageNet: `optimizer="sgd", lr=0.01`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mergetta.adapters.backprop.mean_teacher import MeanTeacher, TeacherLoss
from mergetta.arrays import Array, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.losses import Evaluation, Forward
from mergetta.losses.roid import symmetric_cross_entropy
from mergetta.losses.views import colour_and_geometry
from mergetta.models.discovery import find_classifier
from mergetta.runtimes.torch_runtime import TorchRuntime


class RMT(MeanTeacher):
    """Returns the sum of the student's and the teacher's logits.

    Without `prototypes` (K × F; see `source_prototypes`) the contrastive term is left out. What needs source data at
    test time is left out too (its replay, the teacher's warm-up), and so is the projection head before the contrast,
    which would have to be trained from scratch.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        prototypes: np.ndarray | None = None,
        contrast: float = 1.0,
        temperature: float = 0.1,
        **options: Any,
    ) -> None:
        if prototypes is not None and np.shape(prototypes) != runtime.classifier.weight.shape:
            shapes = f"{runtime.classifier.weight.shape}, not {np.shape(prototypes)}"
            raise MergettaError(f"The prototypes must be one feature vector per class: {shapes}.")
        if prototypes is not None and not np.isfinite(prototypes).all():
            raise MergettaError("The prototypes hold NaN or infinite values.")
        super().__init__(runtime, Robust(runtime, prototypes, contrast, temperature), **options)

    def returned(self, logits: Tensor) -> Tensor:
        return logits + self.teacher_loss.target


class Robust(TeacherLoss):
    """Both the batch and an augmented view of it agree with the teacher, and lie near the closest prototype."""

    def __init__(self, runtime: TorchRuntime, prototypes: np.ndarray | None, weight: float, temperature: float) -> None:
        self.runtime = runtime
        self.prototypes = prototypes
        self.weight = weight
        self.temperature = temperature

    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        features: list[Tensor] = []
        classifier = find_classifier(self.runtime.model)
        with classifier.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0])):
            logits = forward(images)
            view = forward(colour_and_geometry(images, rng, np.ones(len(images), dtype=bool)))
        agree = symmetric_cross_entropy(logits, self.target) + symmetric_cross_entropy(view, self.target)
        value = agree.mean() / 2
        if self.prototypes is not None:
            clean, augmented = features
            prototypes = beside(self.prototypes, clean)
            closest = F.cosine_similarity(clean.detach()[:, None], prototypes[None], dim=2).argmax(dim=1)
            value = value + self.weight * contrastive([prototypes[closest], clean, augmented], self.temperature)
        return Evaluation(value, logits, len(images))


def contrastive(views: list[Tensor], temperature: float) -> Tensor:
    """InfoNCE in which every view of every sample is an anchor and the sample's other views are its positives."""
    samples = len(views[0])
    z = F.normalize(torch.cat(views), dim=1)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarity = (z @ z.T / temperature).masked_fill(itself, -torch.inf)
    log_p = similarity - similarity.logsumexp(dim=1, keepdim=True)
    sample = torch.arange(samples, device=z.device).repeat(len(views))
    positive = (sample[:, None] == sample[None]) & ~itself
    return -log_p[positive].mean()  # each anchor has equally many positives


def source_prototypes(runtime: TorchRuntime, batches: Iterable[tuple[Array, Array]]) -> np.ndarray:
    """The mean feature vector of each class, from labelled source images and the source weights."""
    classes, width = runtime.classifier.weight.shape
    total, count = np.zeros((classes, width)), np.zeros(classes)
    for images, labels in batches:
        np.add.at(total, to_numpy(labels), to_numpy(runtime(images).features))
        np.add.at(count, to_numpy(labels), 1)
    if not count.all():
        raise MergettaError(f"There is no source image of class {int(np.argmin(count))}.")
    return (total / count[:, None]).astype(np.float32)
