"""The loss of DeYO (Lee et al. 2024): entropy of samples that are certain and look at shapes, not only at textures."""

from __future__ import annotations

import math

import numpy as np

from mergetta.arrays import Array, array_namespace, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.losses.base import Evaluation, Forward, Loss
from mergetta.losses.probabilities import constant, entropy, softmax
from mergetta.losses.views import occlude, shuffle_patches, shuffle_pixels

DESTROYERS = {"patch": shuffle_patches, "pixel": shuffle_pixels, "occ": occlude}


class Deyo(Loss):
    """PLPD: how much the probability of the predicted class drops when the object's shape is destroyed."""

    def __init__(
        self,
        plpd: float = 0.2,
        entropy_filter: float = 0.5,
        entropy_margin: float = 0.4,
        destroy: str = "patch",
    ) -> None:
        if destroy not in DESTROYERS:
            raise MergettaError(f"destroy must be one of {', '.join(DESTROYERS)}, not {destroy!r}.")
        self.plpd = plpd
        self.entropy_filter = entropy_filter
        self.entropy_margin = entropy_margin
        self.destroy = DESTROYERS[destroy]

    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        logits = forward(images)
        xp = array_namespace(logits)
        uncertainty = entropy(logits)
        scale = math.log(logits.shape[-1])
        certain = constant(uncertainty) < self.entropy_filter * scale
        drop = xp.full_like(constant(uncertainty), -math.inf)
        if bool(xp.any(certain)):
            p = constant(softmax(logits))
            predicted = xp.argmax(p, axis=-1)
            classes = beside(np.arange(logits.shape[-1]), logits)
            onehot = xp.astype(predicted[:, None] == classes[None, :], logits.dtype)
            destroyed = self.destroy(images, rng, to_numpy(certain))
            p_destroyed = softmax(constant(forward(destroyed, gradient=False)))
            drop[certain] = xp.sum((p[certain] - p_destroyed) * onehot[certain], axis=-1)
        keep = drop > self.plpd
        kept = int(xp.sum(xp.astype(keep, xp.int64)))
        if not kept:
            return Evaluation(beside(np.array(math.nan), logits), logits, 0)
        h = uncertainty[keep]
        weights = xp.exp(self.entropy_margin * scale - constant(h)) + xp.exp(drop[keep])
        return Evaluation(xp.mean(weights * h), logits, kept)
