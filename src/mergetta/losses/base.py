"""What a loss is: it looks at a batch through a forward function, and may look at a second view of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from mergetta.arrays import Array


class Forward(Protocol):
    """Images → logits with the weights under test. `gradient=False` promises that none will be asked for."""

    def __call__(self, images: Array, gradient: bool = True) -> Array: ...


class Evaluation(NamedTuple):
    value: Array
    """A scalar; NaN when no sample was reliable enough to learn from."""
    logits: Array
    """Of the batch as it came: the loss has computed them anyway."""
    kept: int


class Loss(ABC):
    """A label-free objective. Stateless unless it overrides the methods below `evaluate`."""

    @abstractmethod
    def evaluate(self, forward: Forward, images: Array, rng: np.random.Generator) -> Evaluation:
        """The loss of the weights behind `forward` on this batch. Does not change the state."""

    def observe(self, logits: Array) -> None:
        """Take note of a batch, once, after it has been evaluated (possibly several times)."""

    def reset(self) -> None:
        """Forget the stream."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise if this is no state of this loss."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
