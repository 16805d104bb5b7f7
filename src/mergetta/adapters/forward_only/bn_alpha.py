"""A blend of stored and batch BatchNorm statistics (Schneider et al. 2020). No effect without BatchNorm."""

from __future__ import annotations

from mergetta.adapters.base import Adapter
from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.runtimes.base import Runtime


class BNAlpha(Adapter):
    """The stored statistics count as much as `prior` images: their share is N / (N + n) in a batch of n.

    `alpha` fixes the share, whatever the batch.
    """

    def __init__(self, runtime: Runtime, prior: float = 16.0, alpha: float | None = None) -> None:
        super().__init__(runtime)
        if not prior >= 0 or not (alpha is None or 0 <= alpha <= 1):
            raise MergettaError(f"prior must not be negative and alpha lie in [0, 1], not {prior} and {alpha}.")
        self.prior, self.alpha = prior, alpha

    def predict(self, images: Array) -> Array:
        share = self.prior / (self.prior + max(1, len(images))) if self.alpha is None else self.alpha
        return self.runtime(images, given=share).logits
