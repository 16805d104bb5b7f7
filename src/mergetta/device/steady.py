"""zo-merge-plus in the loop: it settles and wakes by itself, so all there is to do is count."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.adapters.base import entry
from mergetta.adapters.forward_only.zo_merge_plus import ZOMergePlus
from mergetta.arrays import Array, to_numpy
from mergetta.device.governor import ADAPTING, SETTLED
from mergetta.losses.probabilities import entropy

COUNTS = ("batches", "images", "passes")


class Steady:
    """What `Governor` is to ZO-merge."""

    def __init__(self, adapter: ZOMergePlus) -> None:
        self.adapter = adapter
        self.batches = self.images = self.passes = 0
        self.last_entropy = 0.0

    @property
    def digest(self) -> str:
        """Of the experts."""
        digest = hashlib.sha256()
        for name, vectors in sorted(self.adapter.pool.tasks.items()):
            digest.update(name.encode() + np.ascontiguousarray(vectors).tobytes())
        return digest.hexdigest()

    @property
    def normalises(self) -> str:
        """What BatchNorm normalises with."""
        return self.adapter.normalise.describe()

    @property
    def steps(self) -> int:
        """Candidates that have been tried."""
        return self.adapter.trials

    @property
    def shifts(self) -> int:
        return self.adapter.shifts

    @property
    def rollbacks(self) -> int:
        """None: nothing is left to the source model."""
        return 0

    @property
    def state(self) -> str:
        return SETTLED if self.adapter.settled else ADAPTING

    def predict(self, images: Array) -> Array:
        before = self.adapter.runtime.forwarded
        logits = self.adapter.predict(images)
        self.last_entropy = float(np.mean(entropy(to_numpy(logits))))
        self.batches += 1
        self.images += len(images)
        self.passes += self.adapter.runtime.forwarded - before
        return logits

    def state_dict(self) -> dict[str, Any]:
        """The images that candidates are shown are kept as bytes where nothing is lost, which is a quarter."""
        state = {**self.adapter.state_dict(), **{name: getattr(self, name) for name in COUNTS}}
        held = state.get("held")
        if held is not None:
            pixels = np.rint(np.clip(held, 0, 1) * 255).astype(np.uint8)
            state["held"] = pixels if np.array_equal(pixels / np.float32(255), held) else held
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = {name: int(entry(state, name)) for name in COUNTS}
        held = state.get("held")
        if held is not None and held.dtype == np.uint8:
            state = {**state, "held": held / np.float32(255)}
        self.adapter.load_state_dict(state)
        for name, value in counts.items():
            setattr(self, name, value)
