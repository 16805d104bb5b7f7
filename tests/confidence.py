"""Models that are only more or less sure, for the tests of zo-merge-plus."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergetta import Expert
from mergetta.adapters.forward_only.zo_merge_plus import HELD, ZOMergePlus
from mergetta.groups import Group
from mergetta.runtimes.base import Classifier, Output

CLASSES = 4


class Confidence:
    """A model whose only weight says how sure it is: logits = weight × the image's first pixels."""

    family = ""
    statistics = None

    def __init__(self, kind: str = "layer") -> None:
        self.groups = {"g": np.ones(1, np.float32)}
        self.structure = (Group("g", 1, 0, kind),)
        self.classifier = Classifier(np.eye(CLASSES, dtype=np.float32), np.zeros(CLASSES, np.float32))
        self.current = self.groups
        self.forwarded = 0
        self.shares: list[float | None] = []

    def load(self, groups: Any) -> None:
        self.current = groups

    def look(self, images: np.ndarray) -> np.ndarray:
        return images[:, 0, 0]

    def __call__(self, images: np.ndarray, source_statistics: float | None = None) -> Output:
        self.forwarded += len(images)
        self.shares.append(source_statistics)
        features = self.current["g"] * self.look(images)
        return Output(features, features, np.stack([images.mean((0, 2, 3)), images.var((0, 2, 3)) + 1]))


def expert(value: float, statistics: np.ndarray | None = None) -> Expert:
    return Expert({"g": np.array([value], np.float32)}, "", f"value {value}", statistics)


def each_in_turn() -> np.ndarray:
    """Each class in turn; the model is right when sure. A mirrored image is of another class."""
    images = np.zeros((2 * HELD, 1, CLASSES, CLASSES), np.float32)
    images[np.arange(2 * HELD), 0, 0, np.arange(2 * HELD) % CLASSES] = 1
    return images


def score(confidence: float) -> float:
    """Of the model above with that factor, on images of which each class has as many."""
    p = np.exp(confidence * np.eye(CLASSES)[0])
    p /= p.sum()
    return float(np.log(CLASSES) + (p * np.log(p)).sum())


class Blended(Confidence):
    """A model that is surest where stored statistics have a certain share."""

    def __init__(self, best: float, kind: str = "batch") -> None:
        super().__init__(kind)
        self.best = best

    def __call__(self, images: np.ndarray, source_statistics: float | None = None) -> Output:
        assert source_statistics is not None
        output = super().__call__(images, source_statistics)
        logits = output.logits * (3 - 2 * abs(source_statistics - self.best))
        return output._replace(logits=logits)


def shares_of(adapter: ZOMergePlus, images: np.ndarray, batches: int) -> list[list[float | None]]:
    """Of the stored statistics, in each pass of each batch."""
    assert isinstance(adapter.runtime, Confidence)
    found = []
    for _ in range(batches):
        adapter.runtime.shares.clear()
        adapter.predict(images)
        found.append(list(adapter.runtime.shares))
    return found
