"""Tells batches that show a few classes only: their statistics are no measure for a BatchNorm layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from mergetta.adapters.base import entry
from mergetta.errors import MergettaError
from mergetta.groups import Vector

HARDLY_SURER = 0.8
"""Entropy of predictions, to that of the source model's, below which a batch is never odd."""
SURER = 0.6
"""The same after an odd batch."""
UNSURE = 1.4
"""Where it is above that, a batch is odd without any other sign."""
FEW = 0.8
"""Entropy of a mean prediction, to that of equally frequent classes, below which images look like a few classes."""
WINDOW = 200
"""Images that predictions are judged by: the last batches, or one large one."""
PAST = 2000
"""Images that a batch is compared with: the last ones before it, or that the source model has been asked of."""
FIELDS = 4
"""Images are compared by the means of so many times so many fields of each channel."""
UNLIKE = 3.0
"""How many times more than by chance images have to differ from those before to be unlike them."""

ARRAYS = ("window", "looks", "told")
MOST = 1e9
"""No sum over images is larger: older ones fade."""


@dataclass(frozen=True, eq=False)
class Guard:
    """What the last batches looked like. A value: predicting without adapting changes nothing.

    A batch is odd if batch statistics of a few classes have led predictions astray. They are then hardly more certain
    than the source model's, and one of three things holds:
    - **uneven**: there are more of some classes than by chance. (Where it is the domain that makes predictions uneven,
      they are more certain.)
    - **turning**: images are unlike those before, and so are the classes that the source model sees in them, which are
      a few. (Where it is the domain that makes it see a few classes, they stay the same; where the domain changes,
      predictions are more certain.)
    - **unsure**: predictions are much less certain than the source model's.
    After an odd batch it takes less certainty and less unevenness to be odd again.
    """

    window: Vector
    """Over the last images: how many, sums of the entropies of predictions (for what is due to stored statistics, the
    lower) and of the source model's where both are known, and the sums of predictions.
    """
    looks: np.ndarray
    """Of the images so far, older ones fading: how many, sums of their fields' means, and of the squares."""
    told: Vector
    """Of those that the source model has been asked of: how many, and the sums of its predictions."""
    doubt: bool = False
    """Whether the last batch that could be judged was odd."""
    count: int = 0
    """How many were."""

    @classmethod
    def new(cls, classes: int) -> Guard:
        return cls(np.zeros(3 + classes), np.zeros((3, 0)), np.zeros(1 + classes))

    def suspects(self, looks: np.ndarray, p: np.ndarray) -> bool:
        """Whether a batch is worth a question to the source model, by its `looks_of` and predictions."""
        return self.is_unlike(looks) or self.is_uneven(self._with(p))

    def finds_odd(self, looks: np.ndarray, p: np.ndarray, source: np.ndarray, stored_share: float) -> bool:
        """Whether the batch is odd. The more stored statistics count, the less predictions go astray, and the less
        certain they are anyway.
        """
        window = self._with(p, source, stored_share)
        ratio = window[1] / max(window[2], 1e-12)
        if ratio <= (SURER if self.doubt else HARDLY_SURER):
            return False
        turning = self.is_unlike(looks) and self.sees_others(source)
        return bool(turning or self.is_uneven(window) or ratio > UNSURE)

    def after(
        self, looks: np.ndarray, p: np.ndarray, source: np.ndarray | None, odd: bool, stored_share: float = 0.0
    ) -> Guard:
        """The guard after a batch, of which the source model has been asked or not."""
        keep = max(0, 1 - len(p) / PAST)
        if self.looks.shape == looks.shape:
            looks = keep * self.looks + looks
        told = self.told if source is None else keep * self.told + np.append(len(source), source.sum(axis=0))
        return Guard(self._with(p, source, stored_share), looks, told, odd, self.count + odd)

    def after_jump(self) -> Guard:
        """Nothing before a jump of the domain is compared with what comes after."""
        return replace(self, looks=np.zeros((3, 0)), told=np.zeros_like(self.told))

    def _with(self, p: np.ndarray, source: np.ndarray | None = None, stored_share: float = 0.0) -> Vector:
        """The window after these predictions; older ones fade."""
        both = (0, 0) if source is None else (entropy(p).sum() / (1 + stored_share), entropy(source).sum())
        sums = [len(p), *both]
        keep = max(0, 1 - len(p) / WINDOW)
        return np.asarray(keep * self.window + np.append(sums, p.sum(axis=0)))

    def is_uneven(self, window: Vector) -> bool:
        """Whether predictions are more uneven than chance makes them; after odd batches less is enough."""
        images = round(window[0])
        mean, std = by_chance(images, len(window) - 3)
        return unevenness(window[3:] / window[0], images) > mean + (0 if self.doubt else 3 * std)

    def is_unlike(self, looks: np.ndarray) -> bool:
        """Whether images differ from those before more than images differ: if so, they do not come at random."""
        if self.looks.shape != looks.shape:
            return False
        (n, mean, variance), (m, others, other_variance) = moments(looks), moments(self.looks)
        variance = (n * variance + m * other_variance) / (n + m) + 1e-6
        return bool(np.mean((mean - others) ** 2 / (variance * (1 / n + 1 / m))) > UNLIKE)

    def sees_others(self, source: np.ndarray) -> bool:
        """Whether the source model sees a few classes, and other ones than before."""
        now, n, m = source.mean(axis=0), len(source), round(self.told[0])
        if not m or not is_few(now, n):
            return False
        mean, std = by_chance(min(n, m), len(now))
        return difference(now, n, self.told[1:] / self.told[0], m) > mean + 3 * std

    def without_doubt(self) -> Guard:
        return replace(self, doubt=False)

    def state(self) -> dict[str, Any]:
        arrays = {f"guard.{name}": getattr(self, name).copy() for name in ARRAYS}
        return {**arrays, "guard.doubt": int(self.doubt), "guard.count": self.count}

    def restored(self, state: Mapping[str, Any]) -> Guard:
        """The guard of a state, or one sentence."""
        window, looks, told = (np.asarray(entry(state, f"guard.{name}")) for name in ARRAYS)
        doubt, count = (np.asarray(entry(state, f"guard.{name}")) for name in ("doubt", "count"))
        fits = (
            (window.shape, told.shape) == (self.window.shape, self.told.shape)
            and (looks.ndim, looks.shape[:1]) == (2, (3,))
            and all(x.dtype.kind == "f" and (np.abs(x) < MOST).all() for x in (window, looks, told))
            and all((x >= 0).all() for x in (window, told))
            and (looks[0] > 0).all()
            and all(np.isclose(x[-self.classes :].sum(), x[0]) for x in (window, told))
            and all(x.ndim == 0 and x.dtype.kind in "biu" and x >= 0 for x in (doubt, count))
        )
        if not fits:
            raise MergettaError("This state does not fit the adapter: its guard.")
        return Guard(window.copy(), looks.copy(), told.copy(), bool(doubt), int(count))

    @property
    def classes(self) -> int:
        return len(self.told) - 1


def entropy(p: np.ndarray) -> np.ndarray:
    return np.asarray(-(p * np.log(np.maximum(p, 1e-12))).sum(axis=-1))


def unevenness(p: Vector, images: int) -> float:
    """The likelihood ratio of a mean prediction against equal classes."""
    return float(2 * images * (np.log(len(p)) - entropy(p)))


def difference(p: Vector, images: int, q: Vector, others: int) -> float:
    """The likelihood ratio of two mean predictions against one for both; by chance no more than the unevenness of the
    fewer images.
    """
    both = (images * p + others * q) / (images + others)
    return unevenness(p, images) + unevenness(q, others) - unevenness(both, images + others)


@lru_cache(maxsize=2 * WINDOW)
def by_chance(images: int, classes: int) -> tuple[float, float]:
    """Mean and standard deviation of the unevenness of so many images of equally frequent classes."""
    draws = np.random.default_rng(0).multinomial(images, np.full(classes, 1 / classes), size=500) / images
    values = 2 * images * (np.log(classes) - entropy(draws))
    return float(values.mean()), float(values.std())


def is_few(p: Vector, images: int) -> bool:
    """Whether a mean prediction is one of a few classes only."""
    by_chance_entropy = np.log(len(p)) - by_chance(images, len(p))[0] / (2 * images)
    return bool(entropy(p) < FEW * by_chance_entropy)


def looks_of(images: np.ndarray) -> np.ndarray:
    """For each field of each channel: how many images, the sum of its means in them, and of the squares."""
    n, channels, height, width = images.shape
    rows, columns = min(FIELDS, height), min(FIELDS, width)
    high, wide = height // rows, width // columns
    parts = images[:, :, : rows * high, : columns * wide].reshape(n, channels, rows, high, columns, wide)
    means = parts.mean(axis=3).mean(axis=4).reshape(n, -1).astype(np.float64)
    return np.stack([np.full(means.shape[1], n), means.sum(axis=0), (means**2).sum(axis=0)])


def moments(looks: np.ndarray) -> tuple[float, Vector, Vector]:
    """How many images, mean and variance of each field."""
    mean, square = looks[1:] / looks[0]
    return float(looks[0, 0]), mean, square - mean**2
