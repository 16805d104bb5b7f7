"""The classifier follows the stream: the gradient of the last layer is closed-form, and needs no pass at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.base import Adapter, Status, Wrapper
from mergetta.arrays import Array, beside, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import softmax
from mergetta.losses.roid import likelihood_ratio_slope, sample_weights
from mergetta.streams.classes import mixed, predicted
from mergetta.streams.state import Field, checked

LEAST = 0.1
"""No feature is scaled by less than this part of the features' mean standard deviation: some hardly ever move."""
FADE = 0.99
"""Of the running mean of squared gradients."""
MANY = 100
"""Classes above which there is no head: a stream has too few images of each. (MobileNetV2 loses five points by it on
1,000 images of 1,000 classes.)"""
ROWS = 128
"""Classes that are learnt at a time: of a large classifier, the whole gradient would take as much memory as it does."""


@dataclass(frozen=True)
class HeadSettings:
    """Chosen at severity 4 of fashion-bn and fashion-vit; half and twice the rate do as well (docs/research-log.md)."""

    size: int = 64
    """Images per step."""
    rate: float = 1e-3
    """Root mean square of a step, in logits per standard deviation of a feature."""
    pull: float = 0.01
    """Share of the way back to the model's own classifier that every step ends with (ROID's weight ensembling)."""
    mixed: float = 0.5
    """How mixed the classes of a set of images must look, as for the race."""
    temperature: float = 1 / 3
    """Of ROID's weights."""


class Headed(Wrapper):
    """Any method's logits, plus a linear function of its features that follows the stream.

    The gradient of a loss in the last layer is the error of the logits times the features: both are there once an image
    has been predicted, so to follow it takes no forward pass and stores no activation. The loss is ROID's weighted
    likelihood ratio. One step is taken per 64 images that look mixed, each of a fixed length on average (by the running
    root mean square of the gradients), on features that are standardised by the first such set.

    Every image is predicted before it is learnt from, and nothing depends on how the stream is cut into batches.

    Parameters
    ----------
    adapter
        A method that shows the `features` of its predictions.

    References
    ----------
    Marsden et al. 2024 (ROID): the loss, its weights, the pull. Iwasawa and Matsuo 2021 (T3A): the classifier alone can
    be adapted.
    """

    def __init__(self, adapter: Adapter, settings: HeadSettings | None = None) -> None:
        super().__init__(adapter)
        self.settings = settings or HeadSettings()
        self.clear()

    def clear(self) -> None:
        self.head: NDArray[np.float32] | None = None
        """(K, F + 1): what is added to the classifier, on standardised features and a one, once there has been a set.
        """
        self.scaling: NDArray[np.float32] = np.empty((2, 0), np.float32)
        """Mean and standard deviation of the features of the first set."""
        self.average = np.full(self.runtime.classes, 1 / self.runtime.classes)
        """ROID's running mean of the predictions."""
        self.length = 0.0
        """Running mean of squared gradients, and how many steps it is over."""
        self.steps = 0
        self.held: list[tuple[NDArray[Any], NDArray[Any]]] = []
        """Features and the adapter's logits of images that no step has been taken for."""

    def predict(self, images: Array) -> Array:
        logits = self._predict(images)
        own, features = to_numpy(logits), self._features()
        fine = np.isfinite(features).all(axis=1) & np.isfinite(own).all(axis=1)
        answers, start = [], 0
        while start < len(own):
            end = start + self.settings.size - sum(len(each) for each, _ in self.held)
            answers.append(self._answer(features[start:end], own[start:end]))
            learnt = np.flatnonzero(fine[start:end]) + start
            self.held.append((features[learnt], own[learnt]))
            if sum(len(each) for each, _ in self.held) == self.settings.size:
                self._step(*(np.concatenate(each) for each in zip(*self.held, strict=True)))
                self.held = []
            start = end
        return beside(np.concatenate(answers), logits)

    def look(self, images: Array) -> Array:
        logits = self.adapter.look(images)
        return beside(self._answer(self._features(), to_numpy(logits)), logits)

    def _features(self) -> NDArray[Any]:
        if self.adapter.features is None:
            raise MergettaError(f"{type(self.adapter).__name__} does not show features for a head to work on.")
        return to_numpy(self.adapter.features)

    def _standardised(self, features: NDArray[Any]) -> NDArray[Any]:
        mean, deviation = self.scaling
        return np.column_stack([(features - mean) / deviation, np.ones(len(features), np.float32)])

    def _answer(self, features: NDArray[Any], logits: NDArray[Any]) -> NDArray[Any]:
        return logits if self.head is None else logits + self._standardised(features) @ self.head.T

    def _step(self, features: NDArray[Any], own: NDArray[Any]) -> None:
        """Down the gradient of a set's loss, if its classes look mixed."""
        chosen, logits = self.settings, self._answer(features, own).astype(np.float64)
        p = np.asarray(softmax(logits))
        if not (np.isfinite(p).all() and mixed(predicted(p)) >= chosen.mixed):
            return
        if self.head is None:
            deviation = features.std(axis=0)
            floor = max(LEAST * float(deviation.mean()), 1e-6)
            self.scaling = np.stack([features.mean(axis=0), np.maximum(deviation, floor)]).astype(np.float32)
            self.head = np.zeros((logits.shape[1], features.shape[1] + 1), np.float32)
        weights, keep = sample_weights(logits, self.average, chosen.temperature)
        self.average = 0.9 * self.average + 0.1 * p.mean(axis=0)
        slope = (np.where(keep, weights, 0)[:, None] * likelihood_ratio_slope(logits) / len(logits)).astype(np.float32)
        known = self._standardised(features)
        squared = abs(float(np.vdot(slope @ slope.T, known @ known.T))) / self.head.size  # of slope.T @ known
        if not np.isfinite(squared):
            return
        self.steps += 1
        self.length = FADE * self.length + (1 - FADE) * squared
        slope *= np.float32(chosen.rate / np.sqrt(max(self.length / (1 - FADE**self.steps), 1e-30)))
        for start in range(0, len(self.head), ROWS):
            rows = self.head[start : start + ROWS]
            rows -= slope[:, start : start + ROWS].T @ known
            rows *= np.float32(1 - chosen.pull)

    def status(self) -> Status:
        return self.adapter.status()

    def swap(self, bundle: Bundle) -> bool:
        swapped = super().swap(bundle)
        if swapped:
            self.clear()
        return swapped

    def state_dict(self) -> dict[str, Any]:
        own: dict[str, Any] = {"steps": self.steps, "length": self.length, "average": self.average.copy()}
        if self.head is not None:
            own |= {"weights": self.head.copy(), "scaling": self.scaling.copy()}
        if self.held:
            own["features"], own["logits"] = (np.concatenate(each) for each in zip(*self.held, strict=True))
        return {**super().state_dict(), **{f"head.{name}": value for name, value in own.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        classes, width = self.runtime.classifier.weight.shape
        fields = {"steps": Field(low=0, whole=True), "length": Field(low=0), "average": Field((classes,), low=0)}
        if "head.scaling" in state:
            fields |= {"weights": Field((classes, width + 1)), "scaling": Field((2, width))}
        if "head.features" in state:
            fields |= {"features": Field((None, width)), "logits": Field((None, classes))}
        found = checked(state, fields, "head.")
        held = len(found.get("features", ()))
        if held != len(found.get("logits", ())) or held >= self.settings.size:
            raise MergettaError("This state does not fit the adapter: 'head.features'.")
        if "scaling" in found and (found["scaling"][1] <= 0).any():
            raise MergettaError("This state does not fit the adapter: 'head.scaling'.")
        super().load_state_dict(state)
        self.clear()
        self.steps, self.length, self.average = int(found["steps"]), float(found["length"]), found["average"]
        if "scaling" in found:
            self.head, self.scaling = (found[name].astype(np.float32) for name in ("weights", "scaling"))
        if held:
            self.held = [(found["features"].astype(np.float32), found["logits"].astype(np.float32))]
