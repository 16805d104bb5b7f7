"""Do classes come in runs? A filter over predictions that makes use of it, and changes nothing where they do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.streams.state import Field, checked

RUNS, STEADY, DRIFTING = range(3)
PRIOR = np.array([0.5, 0.25, 0.25])
"""Of the three hypotheses."""
VECTORS = ("weights", "belief", "recent", "sums", "named")
LIKELY = 0.8
"""Below this weight of runs, predictions stay exactly what they are: of an unsure model even a small part of a sure
belief would change them."""


@dataclass(frozen=True)
class RunSettings:
    """Chosen at severity 4 of fashion-bn and on ResNet-32 (docs/research-log.md)."""

    hazard: float = 1 / 64
    """Probability that a run ends with an image. 1/16 and 1/256 beside it gained nothing."""
    temperature: float = 2.0
    """Of the predictions as evidence: away from home a model is surer than it is right."""
    unknown: float = 16.0
    """Images that equal shares of the classes count for in the mean prediction, which is not known at first."""
    recent: float = 64.0
    """Images over which shares that drift are averaged."""
    memory: float = 2000.0
    """Images that the mean prediction is that of, at most."""
    forget: float = 1e-3
    """Weight that returns to the prior with every image, so that a stream may change its ways."""


class RunFilter:
    """Three hypotheses on how the labels of a stream come about, weighed by how well they predict the predictions.

    - **Runs**: an image is of the class of the one before or, with a small probability (the hazard), of any class.
      That is a hidden Markov model, and its filtered belief is what images and their predecessors say together.
    - **Steady**: labels are independent of each other. Then predictions say it all.
    - **Drifting**: the same, and classes are as frequent as in the last images: a change of domain makes predictions
      pile up too, and is no run.

    What an image says of a class is p / π, with π the mean prediction of the stream. So a model that predicts one class
    too often is no evidence for a run of it: where labels are independent, the likelihood ratio of runs to steady
    shares has the expectation one whatever the model's bias (a test martingale), and is hardly ever large.

    The belief itself goes by equal shares instead of π as long as the model has named few classes (as the exponential
    of their entropy counts them): in the very first run π is that of one class, and whatever makes the model less sure
    of it would look like another.

    The answer is the prediction as it came or, where runs are likely, the belief and it by the weight of runs. It
    depends on the images before, not on how they were cut into batches.

    References
    ----------
    Rabiner 1989, A tutorial on hidden Markov models: the forward recursion. Herbster and Warmuth 1998, Tracking the
    best expert: fixed share. Ramdas et al. 2022, Testing exchangeability: martingales against dependence. Boudiaf et
    al. 2022 (LAME) and Gong et al. 2022 (NOTE): streams whose labels depend on each other.

    >>> cat, dog, unsure = [0.9, 0.1], [0.1, 0.9], [0.6, 0.4]
    >>> RunFilter(2)(np.array(20 * [cat] + 20 * [dog] + [unsure])).round(1)[-1].tolist()   # after twenty dogs
    [0.0, 1.0]
    >>> RunFilter(2)(np.array(20 * [cat, dog] + [unsure])).round(1)[-1].tolist()
    [0.6, 0.4]
    >>> int(RunFilter(2)(np.array(100 * [cat] + 100 * [unsure]))[-1].argmax())   # a cat all the time
    0
    """

    def __init__(self, classes: int, settings: RunSettings | None = None) -> None:
        self.settings = settings or RunSettings()
        self.classes = classes
        self.clear()

    def clear(self) -> None:
        """Nothing is known of the stream."""
        equal = np.full(self.classes, 1 / self.classes)
        self.weights = PRIOR.copy()
        self.belief, self.recent = equal, equal
        """Of the last image's class if there are runs; the mean of the last predictions."""
        self.sums = self.settings.unknown * equal
        self.named = np.zeros(self.classes)
        """How often each class was the most likely one."""

    @property
    def runs(self) -> float:
        """How likely classes come in runs."""
        return float(self.weights[RUNS])

    def __call__(self, probabilities: NDArray[Any]) -> NDArray[np.float64]:
        """What to believe of each image, in the order of the stream; predictions that are no numbers stay as they are
        and leave no trace.
        """
        found = np.array(probabilities, dtype=np.float64)
        softened = np.maximum(found, 1e-12) ** (1 / self.settings.temperature)
        totals = softened.sum(axis=1, keepdims=True)
        softened /= totals
        for index in np.flatnonzero(np.isfinite(totals)):
            self._take(softened[index])
            if self.runs > LIKELY:
                found[index] += self.runs * (self.belief - found[index])
        return found

    def _take(self, p: NDArray[np.float64]) -> None:
        """One image: the forward recursion, and how well each hypothesis has predicted it."""
        chosen, total = self.settings, self.sums.sum()
        shares = self.sums / total
        said = p / shares
        expected = (1 - chosen.hazard) * self.belief + chosen.hazard * shares
        evidence = said @ expected
        joint = p / self._base(shares) * expected
        self.belief = joint / joint.sum()
        runs, steady, drifting = self.weights.tolist()  # three numbers: Python is faster than NumPy
        runs, drifting = runs * float(evidence), drifting * float(said @ self.recent)
        kept = (1 - chosen.forget) / (runs + steady + drifting)
        self.weights = np.array([kept * runs, kept * steady, kept * drifting]) + chosen.forget * PRIOR
        self.recent = self.recent + (p - self.recent) / chosen.recent
        kept = min(1.0, (chosen.memory - 1) / total)
        self.sums, self.named = kept * self.sums + p, kept * self.named
        self.named[p.argmax()] += 1

    def _base(self, shares: NDArray[np.float64]) -> NDArray[np.float64]:
        """What p is measured by in the belief: the mean prediction, and equal shares as if they were of one class."""
        named = self.named[self.named > 0] / max(self.named.sum(), 1e-12)
        others = np.exp(-(named * np.log(named)).sum()) - 1 if len(named) else 0.0
        return np.asarray((1 / self.classes + others * shares) / (1 + others))

    def state(self, prefix: str) -> dict[str, Any]:
        return {f"{prefix}{name}": getattr(self, name).copy() for name in VECTORS}

    def restored(self, state: Mapping[str, Any], prefix: str) -> RunFilter:
        """One that goes on from a state, or one sentence."""
        each = Field((self.classes,), low=0)
        positive = Field((self.classes,), low=1e-100, high=1e100)  # it is divided by
        found = checked(
            state,
            {"weights": Field(PRIOR.shape, low=0), "belief": each, "recent": each, "sums": positive, "named": each},
            prefix,
        )
        if not all(np.isclose(found[name].sum(), 1) for name in ("weights", "belief", "recent")):
            raise MergettaError(f"This state does not fit the adapter: {prefix}weights.")
        new = RunFilter(self.classes, self.settings)
        for name in VECTORS:
            setattr(new, name, found[name])
        return new
