"""Images that can be told apart and predictions of them: what trials and races are tested with."""

from __future__ import annotations

from typing import Any

import numpy as np

from mergetta.adapters.forward_only.trials import Trials, unpacked

SIZE, CLASSES = 8, 4


def images_of(labels: list[int], start: int = 0) -> np.ndarray:
    """Images that can be told apart, of whole grey levels."""
    levels = (start + np.arange(len(labels))).astype(np.float32) / np.float32(255)
    return np.broadcast_to(levels[:, None, None, None], (len(labels), 1, 2, 3)).copy()


def sure(labels: list[int]) -> np.ndarray:
    return np.eye(CLASSES)[labels]


def trials_with(count: int) -> Trials:
    """So many images of all classes in turn."""
    trials, labels = Trials(SIZE, 0.5, CLASSES), [i % CLASSES for i in range(count)]
    trials.hold(images_of(labels), sure(labels))
    return trials


def uncertain(images: np.ndarray, candidate: int) -> np.ndarray:
    """Predictions that depend on the image and on the candidate."""
    logits = np.outer(unpacked(images)[:, 0, 0, 0], np.arange(CLASSES)) * 100 * (1 + candidate)
    return np.asarray(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
