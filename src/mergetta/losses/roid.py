"""The loss of ROID (Marsden et al. 2024): weighted soft likelihood ratio plus consistency with an augmented view."""

from __future__ import annotations

import numpy as np

from mergetta.arrays import Array, array_namespace, beside, to_numpy
from mergetta.losses.base import Evaluation, Forward
from mergetta.losses.mean_prediction import MeanPredictionLoss
from mergetta.losses.probabilities import constant, entropy, log_softmax, softmax
from mergetta.losses.views import colour_and_geometry, find_draws


class Roid(MeanPredictionLoss):
    """Samples count by how certain and how rare their prediction is.

    `views` says how the augmented view is drawn: `published`, once per batch, or our variant `per-image`.
    """

    def __init__(self, temperature: float = 1 / 3, momentum: float = 0.9, views: str = "published") -> None:
        self.temperature = temperature
        self.momentum = momentum
        self.draws = find_draws(views)

    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        logits = forward(images)
        xp = array_namespace(logits)
        weights, keep = sample_weights(constant(logits), self.prior(logits), self.temperature)
        weights = weights[keep]
        loss = weights * soft_likelihood_ratio(logits[keep])
        view = forward(colour_and_geometry(images, rng, to_numpy(keep), self.draws))
        loss = loss + weights * symmetric_cross_entropy(logits[keep], view)
        return Evaluation(xp.sum(loss) / len(images), logits, int(xp.sum(xp.astype(keep, xp.int64))))

    def prior(self, logits: Array) -> Array:
        classes = logits.shape[-1]
        return beside(np.full(classes, 1 / classes) if self.mean_prediction is None else self.mean_prediction, logits)

    def observe(self, logits: Array) -> None:
        now = array_namespace(logits).mean(softmax(constant(logits)), axis=0)
        self.mean_prediction = to_numpy(self.momentum * self.prior(logits) + (1 - self.momentum) * now)


def soft_likelihood_ratio(logits: Array) -> Array:
    """SLR: like entropy, but its gradient does not vanish for confident predictions. Per sample."""
    xp = array_namespace(logits)
    p = xp.clip(softmax(logits), max=0.99)
    return -xp.sum(p * xp.log(p / (1 - p) + 1e-5), axis=-1)


def likelihood_ratio_slope(logits: Array) -> Array:
    """The gradient of SLR in the logits, (B, K), in closed form; zero where p is clipped."""
    xp = array_namespace(logits)
    p = softmax(logits)
    odds = p / (1 - xp.clip(p, max=0.99))
    slope = xp.log(odds + 1e-5) + odds / (1 - xp.clip(p, max=0.99)) / (odds + 1e-5)
    slope = xp.where(p <= 0.99, slope, xp.zeros_like(slope))
    return -p * (slope - xp.sum(p * slope, axis=-1, keepdims=True))


def sample_weights(logits: Array, mean_prediction: Array, temperature: float) -> tuple[Array, Array]:
    """(weights, keep): certain and uncommon predictions weigh more; the more common half is dropped."""
    xp = array_namespace(logits)
    p = softmax(logits)
    norms = xp.sqrt(xp.sum(p * p, axis=-1)) * xp.sqrt(xp.sum(mean_prediction * mean_prediction))
    diversity = min_max(1 - xp.sum(p * mean_prediction, axis=-1) / norms)
    certainty = min_max(-entropy(logits))
    return xp.exp(diversity * certainty / temperature), diversity >= xp.mean(diversity)


def min_max(values: Array) -> Array:
    """Scaled to [0, 1] over the batch; ones where there is nothing to tell apart (a batch of one)."""
    xp = array_namespace(values)
    low, high = xp.min(values), xp.max(values)
    return (values - low) / (high - low) if float(high - low) > 1e-12 else xp.ones_like(values)


def symmetric_cross_entropy(logits: Array, view: Array) -> Array:
    """½ CE(p→q) + ½ CE(q→p), per sample."""
    xp = array_namespace(logits)
    a, b = log_softmax(logits), log_softmax(view)
    return -0.5 * xp.sum(xp.exp(a) * b + xp.exp(b) * a, axis=-1)


def correct_prior(logits: Array) -> Array:
    """ROID's correction of the returned logits: scale each class by the smoothed share predicted in the batch."""
    xp = array_namespace(logits)
    batch, classes = logits.shape
    share = xp.mean(softmax(logits), axis=0)
    smooth = max(1 / batch, 1 / classes) / xp.max(share)
    return logits * ((share + smooth) / (1 + smooth * classes))
