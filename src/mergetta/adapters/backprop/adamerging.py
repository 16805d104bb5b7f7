"""AdaMerging, layer-wise (Yang et al. 2024): merge coefficients of the experts, learnt by lowering the entropy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.adapters.base import check_pool
from mergetta.arrays import beside
from mergetta.expert import Expert
from mergetta.groups import learnable
from mergetta.losses import Entropy
from mergetta.runtimes.torch_runtime import TorchRuntime


class AdaMerging(BackpropAdapter):
    """θ = θ₀ + Σ_m clamp(λ_m, 0, 1) τ_m with a λ per expert and group; no gradient reaches a λ outside [0, 1].

    `initial` is published for eight tasks that differ much; experts of one task add up, and many need a smaller one.
    Groups in `frozen` are merged with it and not optimised.
    """

    def __init__(self, runtime: TorchRuntime, experts: Sequence[Expert], initial: float = 0.3, **options: Any) -> None:
        check_pool(runtime, experts, "AdaMerging")
        self.initial = initial
        self.tasks = {
            name: np.stack([expert.groups[name] - runtime.groups[name] for expert in experts])
            for name in learnable(runtime.groups)
        }  # (M, D) each
        super().__init__(runtime, Entropy(), **options)

    def begin(self) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(self._start(name), requires_grad=False) for name in self.names}

    def _start(self, name: str) -> Tensor:
        return torch.full((len(self.tasks[name]),), self.initial, device=self.runtime.device)

    @property
    def coefficients(self) -> dict[str, np.ndarray]:
        """λ per group that learns, one per expert, as the merge uses them."""
        return {name: raw.detach().clamp(0, 1).numpy(force=True) for name, raw in self.learnt.items()}

    def weights(self) -> dict[str, Tensor]:
        return {name: self.merged(name) for name in self.tasks}

    def merged(self, name: str) -> Tensor:
        raw = self.learnt[name] if name in self.learnt else self._start(name)
        source, tasks = beside(self.runtime.groups[name], raw), beside(self.tasks[name], raw)
        merged: Tensor = source + raw.clamp(0, 1) @ tasks
        return merged.view(self.runtime.shapes[name])
