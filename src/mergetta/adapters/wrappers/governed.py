"""When to adapt: until the loss no longer improves, again when the domain changes, and never into the ground.

The paper leaves stopping to engineering. Thresholds are relative to what the stream itself shows within a domain, so
they need no labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mergetta.adapters.base import ADAPTING, SETTLED, Adapter, Status, part
from mergetta.adapters.forward_only.zo_merge import ZOMerge
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import softmax
from mergetta.streams.classes import predicted
from mergetta.streams.shift import ShiftDetector
from mergetta.streams.state import Field, checked

COUNTS = ("batches", "images", "passes", "shifts", "fallbacks", "settled")


class Governed(Adapter):
    """`predict` a batch with a method that takes steps, adapting or not as the stream suggests.

    - It settles when the mean loss of the last `window` steps is no lower, by more than its own noise, than that of
      the `window` before, or after `max_steps`.
    - It wakes when the domain changes (`streams/shift.py`). By default adaptation goes on from where it
      is; with `restart` it starts from the merge again.
    - Before settling, the coefficients meet the initial ones on one batch (one more forward pass); if they are less
      certain and diverse, the device goes back to the initial merge. A loss that is not finite or runs away does the
      same at once.
    - `every`: adapt on every k-th batch only. `budget`: an upper limit of forward passes per image on average.
    """

    def __init__(
        self,
        adapter: ZOMerge,
        window: int = 4,
        max_steps: int = 10,
        every: int = 1,
        budget: float | None = None,
        restart: bool = False,
    ) -> None:
        if window < 2 or max_steps < 1 or every < 1:
            raise MergettaError("window must be at least 2, max_steps and every at least 1.")
        if budget is not None and not budget >= 1:
            raise MergettaError(f"budget is in forward passes per image, at least 1, not {budget}.")
        super().__init__(adapter.runtime)
        self.adapter = adapter
        self.window, self.max_steps = window, max_steps
        self.every, self.budget, self.restart = every, budget, restart
        self.reset()

    def reset(self) -> None:
        """As on a new device."""
        self.adapter.reset()
        self.batches = self.images = self.passes = 0
        self.shifts = self.fallbacks = 0
        self.detector = ShiftDetector(0.1)
        self._new_domain()

    def _new_domain(self) -> None:
        self.settled = False
        self.losses: list[float] = []

    @property
    def features(self) -> Array | None:
        return self.adapter.features

    def look(self, images: Array) -> Array:
        return self.adapter.look(images)

    def predict(self, images: Array) -> Array:
        before, steps = self.runtime.forwarded, self.adapter.steps
        logits = self.adapter.predict(images, adapt=self._wants_to_adapt(len(images)), learn=True)
        assert self.adapter.output is not None
        classes = predicted(softmax(to_numpy(logits)))
        if self.detector.add(to_numpy(self.adapter.output.signature), len(images), classes):
            self.shifts += 1
            self._new_domain()
            self.adapter.forget_domain()
            if self.restart:
                self.adapter.restart()
            logits = self.adapter.predict(images, adapt=self._wants_to_adapt(len(images)), learn=True)
        if not self.settled and self.adapter.steps > steps:
            self._judge(images)
        if not np.isfinite(to_numpy(logits)).all():  # of a merge that is no model, or of steps that led nowhere
            self._go_back()
            logits = self.runtime(images, given=1.0).logits
        self.batches += 1
        self.images += len(images)
        self.passes += self.runtime.forwarded - before
        return logits

    def _wants_to_adapt(self, size: int) -> bool:
        if self.settled or self.batches % self.every:
            return False
        # a step costs up to four more passes (two views on two sides)
        return self.budget is None or self.passes + 5 * size <= self.budget * (self.images + size)

    def _judge(self, images: Array) -> None:
        """After a step: settle, go back, or go on."""
        loss = self.adapter.status().loss
        floor = 0.2 * abs(float(np.mean(self.losses or [0]))) + 0.05
        if loss is None or not np.isfinite(loss) or unusual(loss, self.losses, floor, 6):
            self._go_back()
            return
        self.losses.append(loss)
        recent, earlier = self.losses[-self.window :], self.losses[-2 * self.window : -self.window]
        still = False
        if len(earlier) == self.window:
            noise = float(np.std([*recent, *earlier])) / np.sqrt(self.window)
            still = float(np.mean(earlier) - np.mean(recent)) < noise
        if still or len(self.losses) >= self.max_steps:
            if not self.adapter.has_gained(images):
                self._go_back()
            self.settled = True

    def _go_back(self) -> None:
        self.fallbacks += 1
        self.adapter.restart()
        self.settled = True

    def swap(self, bundle: Bundle) -> bool:
        """Go on with another bundle. Losses of the old merge say nothing about the new one, and what was carried over
        has to prove itself against its initial merge: so adapt, and settle, anew.
        """
        swapped = self.adapter.swap(bundle)
        if swapped:
            self._new_domain()
        return swapped

    def status(self) -> Status:
        phase = SETTLED if self.settled else ADAPTING
        return replace(self.adapter.status(), phase=phase, shifts=self.shifts, fallbacks=self.fallbacks)

    def state_dict(self) -> dict[str, Any]:
        return {
            **{f"adapter/{name}": value for name, value in self.adapter.state_dict().items()},
            **{name: int(getattr(self, name)) for name in COUNTS},
            "losses": np.array(self.losses, dtype=np.float64),
            **self.detector.state("signature."),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = {name: Field(low=0, whole=True) for name in COUNTS}
        found = checked(state, {**counts, "losses": Field((None,))})
        detector = self.detector.restored(state, "signature.", self.runtime.classes)
        self.adapter.load_state_dict(part(state, "adapter/"))
        self.detector, self.losses = detector, found["losses"].tolist()
        for name in COUNTS:
            setattr(self, name, int(found[name]))
        self.settled = bool(found["settled"])


def unusual(value: float, past: list[float], floor: float, sensitivity: float) -> bool:
    """Whether a value is further above what came before than its spread explains; never on fewer than three."""
    if len(past) < 3:
        return False
    return value - float(np.mean(past)) > sensitivity * max(float(np.std(past)), floor)
