"""AdaBN (Li et al. 2016), online: BatchNorm moments follow the stream, starting from the stored ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.groups import moments_of, with_moments
from mergetta.runtimes.base import Runtime
from mergetta.streams.moments import batch_moments
from mergetta.streams.state import Field, checked


class AdaBN(Adapter):
    """Each batch is predicted with s ← (1 − momentum)·s + momentum·(its own moments), in one pass.

    Without BatchNorm there is nothing to follow.
    """

    def __init__(self, runtime: Runtime, momentum: float = 0.1) -> None:
        super().__init__(runtime)
        if not 0 <= momentum <= 1:
            raise MergettaError(f"momentum must lie in [0, 1], not {momentum}.")
        self.momentum = momentum
        self.reset()

    def reset(self) -> None:
        self.running = moments_of(self.runtime.groups).astype(np.float64)
        self.batches = 0

    def share(self) -> float:
        """Of the next batch in the moments."""
        return self.momentum

    def predict(self, images: Array) -> Array:
        share = self.share()
        # with the rest of the share for what is given, each layer normalises with the moments as they will be
        output = self.runtime(images, with_moments(self.runtime.groups, self.running), 1 - share, moments=True)
        now = (1 - share) * self.running + share * batch_moments(to_numpy(output.moments))
        if np.isfinite(now).all():
            self.running = now
        self.batches += 1
        return self._shown(output)

    def state_dict(self) -> dict[str, Any]:
        return {"running": self.running.copy(), "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = {"running": Field(self.running.shape), "batches": Field(low=0, whole=True)}
        found = checked(state, fields)
        if (found["running"][1] < 0).any():
            raise MergettaError("This AdaBN state has negative variances.")
        self.running, self.batches = found["running"], int(found["batches"])
