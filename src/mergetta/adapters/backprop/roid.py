"""ROID (Marsden et al. 2024): weighted soft likelihood ratio, consistency, weight ensembling, prior correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.losses import Roid
from mergetta.losses.roid import correct_prior
from mergetta.runtimes.torch_runtime import TorchRuntime


class ROID(BackpropAdapter):
    """`source_share` of the source weights is mixed back in after each step; `views` are those of the loss.

    Without `correction` of the prior it returns the logits themselves, for a head to work on: corrected ones are about
    a tenth as large.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        source_share: float = 0.01,
        views: str = "published",
        correction: bool = True,
        **options: Any,
    ) -> None:
        self.source_share, self.correction = source_share, correction
        super().__init__(runtime, Roid(views=views), **options)

    def after_step(self) -> None:
        with torch.no_grad():
            for name, first in self.begin().items():
                self.learnt[name].lerp_(first, self.source_share)

    def returned(self, logits: Tensor) -> Tensor:
        return correct_prior(logits) if self.correction else logits
