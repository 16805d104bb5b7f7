"""What adapters need from inside a forward pass: the classifier's input, and statistics after the stem."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mergetta.errors import MergettaError
from mergetta.models.discovery import find_classifier, find_first_block, find_stem


class Watcher:
    """Keeps the classifier's input, the stem's output and the first block's input of the last pass."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        find_classifier(model).register_forward_pre_hook(self._keep("features"))
        stem, block = find_stem(model), find_first_block(model)
        if stem is not None:
            stem.register_forward_hook(self._keep("stem"))
        if block is not None:
            block.register_forward_pre_hook(self._keep("tokens"))

    def _keep(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | None = None) -> None:
            self.seen[name] = inputs[0] if output is None else output

        return hook

    def features(self) -> Tensor:
        """(B, F)"""
        return self.seen["features"]

    def statistics(self) -> Tensor:
        """(2, C): mean and variance over batch and patch tokens, or over batch and space of the first convolution."""
        tokens, stem = self.seen.get("tokens"), self.seen.get("stem")
        if tokens is not None and tokens.ndim == 3:  # (B, N, C); what exceeds the patches is class or register tokens
            prefix = tokens.shape[1] - stem.shape[2] * stem.shape[3] if stem is not None else 0
            variance, mean = torch.var_mean(tokens[:, max(prefix, 0) :], dim=(0, 1), correction=0)
        elif stem is not None:
            variance, mean = torch.var_mean(stem, dim=(0, 2, 3), correction=0)
        else:
            raise MergettaError("The model has neither a convolution nor token blocks to take statistics from.")
        return torch.stack([mean, variance])
