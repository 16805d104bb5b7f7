"""When to adapt: until the loss no longer improves, again when the domain changes, and never into the ground.

The paper leaves stopping to engineering. All thresholds are relative to what the stream itself shows within a domain,
so they need no labels and hold for any batch size: small batches vary more, and may deviate more before it counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.adapters.forward_only.zo_merge import ZOMerge
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.losses.probabilities import entropy, softmax
from mergetta.streams.shift import distance

ADAPTING, SETTLED = "adapting", "settled"


class Governor:
    """Wraps ZO-merge: `predict` a batch, adapting or not as the stream suggests.

    - ADAPTING → SETTLED when the mean loss of the last `window` steps is no lower, by more than its own noise, than
      that of the `window` before, or after `max_steps`.
    - SETTLED → ADAPTING on a shift: the batch's signature is further from the running one, or its entropy
      higher, than `sensitivity` standard deviations of what this domain has shown. With `restart`, adaptation then
      starts from the merge again; by default it goes on from where it is.
    - Guard: before settling, current and initial coefficients are compared on the same batch (one more forward pass);
      if the current ones are less certain or less diverse, the device goes back to the initial merge. A loss that is
      not finite or runs away does the same at once.
    - `every`: adapt on every k-th batch only. `budget`: an upper limit of forward passes per image on average.
    """

    def __init__(
        self,
        adapter: ZOMerge,
        window: int = 4,
        max_steps: int = 10,
        sensitivity: float = 4.0,
        every: int = 1,
        budget: float | None = None,
        restart: bool = False,
    ) -> None:
        if window < 2 or max_steps < 1 or every < 1 or not sensitivity > 0:
            raise MergettaError("window must be at least 2, max_steps and every at least 1, sensitivity positive.")
        if budget is not None and not budget >= 1:
            raise MergettaError(f"budget is in forward passes per image, at least 1, not {budget}.")
        self.adapter = adapter
        self.window, self.max_steps, self.sensitivity = window, max_steps, sensitivity
        self.every, self.budget, self.restart = every, budget, restart
        self.reset()

    @property
    def digest(self) -> str:
        """Of the bundle."""
        return hashlib.sha256(self.adapter.bundle.to_bytes()).hexdigest()

    @property
    def normalises(self) -> str:
        """What BatchNorm normalises with."""
        return self.adapter.normalise.describe()

    @property
    def steps(self) -> int:
        return self.adapter.steps

    def reset(self) -> None:
        """As on a new device."""
        self.adapter.reset()
        self.batches = self.images = self.passes = 0
        self.shifts = self.rollbacks = 0
        self.last_entropy = 0.0
        self._new_domain()

    def _new_domain(self) -> None:
        self.state = ADAPTING
        self.running: np.ndarray | None = None
        self.losses: list[float] = []
        self.distances: list[float] = []
        self.entropies: list[float] = []

    def predict(self, images: Array) -> Array:
        before = self.adapter.runtime.forwarded
        adapt = self._wants_to_adapt(len(images))
        logits = self.adapter.predict(images, adapt=adapt, learn=True)
        shifted = self._look(logits)
        if shifted:
            self.shifts += 1
            self._new_domain()
            if self.adapter.normalise.moments is not None:
                self.adapter.normalise.moments.clear()
            if self.restart:
                self._restart()
            logits = self.adapter.predict(images, adapt=self._wants_to_adapt(len(images)), learn=True)
            self._look(logits)
        if self.state == ADAPTING and self.adapter.history and (adapt or shifted):
            self._judge(images)
        self.batches += 1
        self.images += len(images)
        self.passes += self.adapter.runtime.forwarded - before
        return logits

    def _wants_to_adapt(self, size: int) -> bool:
        if self.state == SETTLED or self.batches % self.every:
            return False
        # a step costs up to four more passes (two views on two sides)
        return self.budget is None or self.passes + 5 * size <= self.budget * (self.images + size)

    def _look(self, logits: Array) -> bool:
        """Take note of a batch; True if it belongs to another domain than the batches before."""
        assert self.adapter.output is not None
        now = to_numpy(self.adapter.output.signature).astype(np.float64)
        self.last_entropy = float(np.mean(entropy(to_numpy(logits))))
        if self.running is None:
            self.running = now
            self.entropies.append(self.last_entropy)
            return False
        apart = float(distance(self.running, now))
        if unusual(np.log(apart + 1e-12), [float(np.log(d + 1e-12)) for d in self.distances], 0.4, self.sensitivity):
            return True
        if unusual(self.last_entropy, self.entropies, 0.1 * float(np.mean(self.entropies)) + 0.01, self.sensitivity):
            return True
        self.running = 0.8 * self.running + 0.2 * now
        self.distances = [*self.distances, apart][-20:]
        self.entropies = [*self.entropies, self.last_entropy][-20:]
        return False

    def _judge(self, images: Array) -> None:
        """After a step: settle, roll back, or go on."""
        step = self.adapter.history[-1]
        loss = (step.loss_plus + step.loss_minus) / 2
        if not np.isfinite(loss) or unusual(loss, self.losses, 0.2 * abs(float(np.mean(self.losses or [0]))) + 0.05, 6):
            self._roll_back()
            return
        self.losses.append(loss)
        recent, earlier = self.losses[-self.window :], self.losses[-2 * self.window : -self.window]
        still = False
        if len(earlier) == self.window:
            noise = float(np.std([*recent, *earlier])) / np.sqrt(self.window)
            still = float(np.mean(earlier) - np.mean(recent)) < noise
        if still or len(self.losses) >= self.max_steps:
            if self._score(images, initial=True) < self._score(images, initial=False):
                self._roll_back()
            self.state = SETTLED

    def _score(self, images: Array, initial: bool) -> float:
        """Mean entropy − entropy of the mean: low for predictions that are certain and diverse."""
        groups = self.adapter.bundle.merge() if initial else self.adapter.merged()
        logits = to_numpy(self.adapter.normalise(images, groups).logits)
        mean = np.mean(softmax(logits), axis=0)
        return float(np.mean(entropy(logits)) + np.sum(mean * np.log(mean + 1e-12)))

    def _roll_back(self) -> None:
        self.rollbacks += 1
        self._restart()
        self.state = SETTLED

    def _restart(self) -> None:
        self.adapter.point = self.adapter.bundle.flatten()
        self.adapter.history.clear()

    def swap(self, bundle: Bundle) -> None:
        """Go on with another bundle. Losses and entropies of the old merge say nothing about the new one, and what
        was carried over has to prove itself against its initial merge: so adapt, and settle, anew.
        """
        if self.adapter.swap(bundle):
            self._new_domain()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"adapter/{name}": value for name, value in self.adapter.state_dict().items()}
        for name in ("batches", "images", "passes", "shifts", "rollbacks"):
            state[name] = getattr(self, name)
        for name in ("losses", "distances", "entropies"):
            state[name] = np.array(getattr(self, name), dtype=np.float64)
        if self.running is not None:
            state["running"] = self.running.copy()
        state["settled"] = int(self.state == SETTLED)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            counts = {
                name: int(state[name]) for name in ("batches", "images", "passes", "shifts", "rollbacks", "settled")
            }
            series = {name: [float(v) for v in state[name]] for name in ("losses", "distances", "entropies")}
            running = np.array(state["running"], dtype=np.float64) if "running" in state else None
        except (KeyError, TypeError, ValueError) as error:
            raise MergettaError(f"This state does not fit the governor: {error}.") from error
        prefix = "adapter/"
        self.adapter.load_state_dict({n.removeprefix(prefix): v for n, v in state.items() if n.startswith(prefix)})
        self.state = SETTLED if counts.pop("settled") else ADAPTING
        for name, value in {**counts, **series, "running": running}.items():
            setattr(self, name, value)


def unusual(value: float, past: list[float], floor: float, sensitivity: float) -> bool:
    """Whether a value is further above what came before than its spread explains; never on fewer than three."""
    if len(past) < 3:
        return False
    return value - float(np.mean(past)) > sensitivity * max(float(np.std(past)), floor)
