"""A two-layer model of NumPy alone, with scale-and-shift groups: what a runtime is at its smallest."""

from __future__ import annotations

import numpy as np

from mergetta.groups import Group, check_groups
from mergetta.runtimes.base import Classifier, Output, check_images, shares_of, unfolded


class NumpyRuntime:
    family = "numpy-test"
    signature = None
    classes = property(lambda self: len(self.classifier.bias))

    def __init__(self, pixels: int = 36, hidden: int = 6, classes: int = 4) -> None:
        rng = np.random.default_rng(7)
        self.first = rng.normal(size=(hidden, pixels)).astype(np.float32) / 4
        self.classifier = Classifier(
            rng.normal(size=(classes, hidden)).astype(np.float32), rng.normal(size=classes).astype(np.float32)
        )
        self.groups = {"a.weight": np.ones(hidden, np.float32), "a.bias": np.zeros(hidden, np.float32)}
        self.structure = (Group("a.weight", hidden, 1, "scale"), Group("a.bias", hidden, 2, "shift"))
        self.forwarded = 0

    def __call__(self, images, groups=None, given=0.0, moments=False):
        shares_of(given, 0)
        check_images(images, None)
        groups = self.groups if groups is None else groups
        check_groups(groups, self.groups, "The set of groups")
        self.forwarded += len(images)
        x = np.asarray(images).reshape(len(images), -1) @ self.first.T
        hidden = np.maximum(x * groups["a.weight"] + self.shift(groups), 0)
        logits = hidden @ self.classifier.weight.T + self.classifier.bias
        none = np.zeros((len(images), 2, 0), np.float32) if moments else None
        return Output(logits, hidden, np.stack([x.mean(axis=0), x.var(axis=0)]), none)

    def folded(self, groups):
        return unfolded(self, groups)

    def shift(self, groups):
        return groups["a.bias"]


class PromptedNumpyRuntime(NumpyRuntime):
    """One more group, `prompts`, whose tokens are added up to the hidden layer's input."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        hidden = len(self.first)
        prompts = np.random.default_rng(1).normal(size=count * hidden).astype(np.float32) / 8
        self.groups = {"prompts": prompts, **self.groups}
        self.structure = (Group("prompts", prompts.size, 0, "prompts"), *self.structure)

    def shift(self, groups):
        return groups["a.bias"] + groups["prompts"].reshape(-1, len(self.first)).sum(axis=0)
