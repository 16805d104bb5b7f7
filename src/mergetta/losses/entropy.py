"""Mean prediction entropy (Tent; Wang et al. 2021)."""

from __future__ import annotations

import numpy as np

from mergetta.arrays import Array, array_namespace
from mergetta.losses.base import Evaluation, Forward, Loss
from mergetta.losses.probabilities import entropy


class Entropy(Loss):
    """Confident predictions have a low loss."""

    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        logits = forward(images)
        return Evaluation(array_namespace(logits).mean(entropy(logits)), logits, len(images))
