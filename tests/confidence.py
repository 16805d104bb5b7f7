"""Models that are only more or less sure, for the tests of race-merge and of its wrappers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mergetta import Expert, build_bundle
from mergetta.adapters.base import Adapter
from mergetta.adapters.forward_only.race_merge import RaceMerge, RaceSettings
from mergetta.groups import Group
from mergetta.runtimes.base import Classifier, Output, Predict, Runtime, shares_of, unfolded

CLASSES = 4
HELD = RaceSettings().held


class Confidence:
    """A model whose only weight says how sure it is: logits = weight × the image's first pixels.

    With `batch_norm` these are normalised first, at the source by a mean of 0 and a variance of 1.
    """

    family = ""
    signature: np.ndarray | None = None
    classes = CLASSES

    def __init__(self, batch_norm: bool = False) -> None:
        self.groups = {"n.weight": np.ones(1, np.float32)}
        self.structure: tuple[Group, ...] = (Group("n.weight", 1, 0, "scale"),)
        if batch_norm:
            self.groups |= {"n.running_mean": np.zeros(CLASSES, np.float32)}
            self.groups |= {"n.running_var": np.ones(CLASSES, np.float32)}
            kinds = (("n.running_mean", "mean"), ("n.running_var", "variance"))
            self.structure += tuple(Group(name, CLASSES, 0, kind) for name, kind in kinds)
        self.channels = CLASSES if batch_norm else 0
        self.classifier = Classifier(np.eye(CLASSES, dtype=np.float32), np.zeros(CLASSES, np.float32))
        self.forwarded = 0
        self.given: list[float] = []
        """The least share of given moments in each pass."""

    def look(self, images: np.ndarray) -> np.ndarray:
        return images[:, 0, 0, :CLASSES]

    def __call__(self, images: np.ndarray, groups: Any = None, given: Any = 0.0, moments: bool = False) -> Output:
        groups = self.groups if groups is None else groups
        share = shares_of(given, self.channels)
        self.forwarded += len(images)
        self.given.append(float(np.min(given)))
        x = self.look(images)
        each = np.stack([x, np.zeros_like(x)], axis=1) if self.channels else np.zeros((len(x), 2, 0))
        if self.channels:
            mean = share * groups["n.running_mean"] + (1 - share) * x.mean(axis=0)
            variance = share * groups["n.running_var"] + (1 - share) * x.var(axis=0)
            x = (x - mean) / np.sqrt(variance + 1e-12)
        features = groups["n.weight"] * x
        signature = np.stack([images.mean((0, 2, 3)), images.var((0, 2, 3)) + 1])
        return Output(features, features, signature, each if moments else None)

    def folded(self, groups: Any) -> Predict:
        return unfolded(self, groups)


def expert(value: float, signature: np.ndarray | None = None, batch_norm: bool = False, **parts: Any) -> Expert:
    groups = Confidence(batch_norm).groups | {"n.weight": np.array([value], np.float32)}
    return Expert(groups, "", f"value {value}", signature, **parts)


CAUTION = 0.04


def race_merge(runtime: Runtime, experts: Sequence[Expert], source: Any = None, **options: Any) -> RaceMerge:
    """Of a bundle whose members are these experts; without finals, and as many are tried as the stream has had. These
    experts go twenty times as far as those of real models do, so caution is as much less.
    """
    bundle = build_bundle(runtime.groups, experts, family=runtime.family)
    caution = {} if "settings" in options else {"caution": CAUTION}
    return RaceMerge(runtime, bundle, source, **{"eager": False, "finals": 0, **caution, **options})


def each_in_turn() -> np.ndarray:
    """Each class in turn; the model is right when sure. Of a mirrored image it sees nothing, or, of every fifth,
    surely the next class.
    """
    count = np.arange(2 * HELD)
    images = np.zeros((2 * HELD, 1, CLASSES, 2 * CLASSES), np.float32)
    images[count, 0, 0, count % CLASSES] = 1
    images[count[::5], 0, 0, 2 * CLASSES - 1 - (count[::5] + 1) % CLASSES] = 3
    return images


def score(confidence: float) -> float:
    """Of the model above with that factor, on images of which each class has as many."""
    p = np.exp(confidence * np.eye(CLASSES)[0])
    p /= p.sum()
    return float(np.log(CLASSES) + (p * np.log(p)).sum())


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def passes_of(adapter: Adapter, runtime: Confidence, images: np.ndarray, count: int) -> list[float]:
    """Forward passes per image, of each of so many batches."""
    counts = []
    for _ in range(count):
        before = runtime.forwarded
        adapter.predict(images)
        counts.append((runtime.forwarded - before) / len(images))
    return counts
