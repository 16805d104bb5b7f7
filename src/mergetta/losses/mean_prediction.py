"""What ROID and EATA remember of a stream: the mean prediction so far, which tells common ones from rare ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.losses.base import Loss


class MeanPredictionLoss(Loss):
    """State: p̄, a vector of one number per class; none before the first batch."""

    mean_prediction: np.ndarray | None = None

    def reset(self) -> None:
        self.mean_prediction = None

    def state_dict(self) -> dict[str, Any]:
        return {} if self.mean_prediction is None else {"mean_prediction": self.mean_prediction.copy()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        if "mean_prediction" not in state:
            return
        value = np.asarray(state["mean_prediction"])
        known = value.shape if self.mean_prediction is None else self.mean_prediction.shape
        if value.ndim != 1 or value.shape != known or not np.isfinite(value).all():
            raise MergettaError(f"This state does not fit the loss {type(self).__name__}: its mean prediction.")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        value = state.get("mean_prediction")
        self.mean_prediction = None if value is None else np.array(value, dtype=np.float32)
