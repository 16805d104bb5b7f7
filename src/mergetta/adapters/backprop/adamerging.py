"""AdaMerging, layer-wise (Yang et al. 2024): merge coefficients of the experts, learnt by lowering the entropy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.adapters.base import check_family, entry
from mergetta.arrays import beside
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import check_groups
from mergetta.losses import Entropy
from mergetta.runtimes.torch_runtime import TorchRuntime


class AdaMerging(BackpropAdapter):
    """θ = θ₀ + Σ_m clamp(λ_m, 0, 1) τ_m with a λ per expert and group; no gradient reaches a λ outside [0, 1].

    `initial` is published for eight tasks that differ much; experts of one task add up, and many need a smaller one.
    Groups in `frozen` are merged with it and not optimised.
    """

    def __init__(self, runtime: TorchRuntime, experts: Sequence[Expert], initial: float = 0.3, **options: Any) -> None:
        if not experts:
            raise MergettaError("AdaMerging needs at least one expert.")
        for expert in experts:
            check_family(runtime, expert.family, f"The expert {expert.domain!r}")
            check_groups(expert.groups, runtime.groups, f"The expert {expert.domain!r}")
        self.initial = initial
        self.tasks = {
            name: np.stack([expert.groups[name] - source for expert in experts])
            for name, source in runtime.groups.items()
        }  # (M, D) each
        super().__init__(runtime, Entropy(), **options)

    def reset(self) -> None:
        self.learnt = {name: nn.Parameter(self._start(name), requires_grad=False) for name in self.learnt}
        super().reset()
        self.after_step()

    def _start(self, name: str) -> Tensor:
        return torch.full((len(self.tasks[name]),), self.initial, device=self.runtime.device)

    @property
    def coefficients(self) -> dict[str, np.ndarray]:
        """λ per group that learns, one per expert, as the merge uses them."""
        return {name: raw.detach().clamp(0, 1).numpy(force=True) for name, raw in self.learnt.items()}

    def merged(self, name: str) -> Tensor:
        raw = self.learnt[name] if name in self.learnt else self._start(name)
        parameter = self.runtime.parameters[name]
        source, tasks = beside(self.runtime.groups[name], parameter), beside(self.tasks[name], parameter)
        merged: Tensor = source + raw.clamp(0, 1) @ tasks
        return merged.view_as(parameter)

    def after_step(self) -> None:
        with torch.no_grad():
            for name, parameter in self.runtime.parameters.items():
                parameter.copy_(self.merged(name))

    def _learn(self, on: bool) -> None:
        super()._learn(on)
        for name in self.learnt:
            self.runtime.parameters[name].requires_grad_(on)

    def _step(self, value: Tensor) -> bool:
        parameters = [self.runtime.parameters[name] for name in self.learnt]
        gradients = torch.autograd.grad(value, parameters, materialize_grads=True)
        # Linear in the merged weights, with the loss's gradient: what goes on to the coefficients is the same.
        pairs = zip(self.learnt, gradients, strict=True)
        return super()._step(torch.stack([(self.merged(name) * gradient).sum() for name, gradient in pairs]).sum())

    def state_dict(self) -> dict[str, Any]:
        raw = {f"coefficients/{name}": value.numpy(force=True).copy() for name, value in self.learnt.items()}
        return {**super().state_dict(), **raw}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = {name: np.array(entry(state, f"coefficients/{name}"), dtype=np.float32) for name in self.learnt}
        for name, value in loaded.items():
            if value.shape != self.learnt[name].shape or not np.isfinite(value).all():
                raise MergettaError(f"This state does not fit the experts: coefficients of group {name!r}.")
        super().load_state_dict(state)
        for name, value in loaded.items():
            self.learnt[name].copy_(torch.from_numpy(value))
