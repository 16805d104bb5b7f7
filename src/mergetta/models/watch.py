"""What adapters need from inside a forward pass: the classifier's input, and the signature after the stem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
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

    def signature(self, pooled: bool = False) -> Tensor:
        """(2, C): mean and variance over batch and patch tokens, or over batch and space of the first convolution.

        `pooled` chooses how the latter are measured: as ONNX Runtime does it fastest.
        """
        tokens, stem = self.seen.get("tokens"), self.seen.get("stem")
        if tokens is not None and tokens.ndim == 3:  # (B, N, C); what exceeds the patches is class or register tokens
            prefix = tokens.shape[1] - stem.shape[2] * stem.shape[3] if stem is not None else 0
            return moments(tokens[:, max(prefix, 0) :], 2)
        if stem is not None:
            return pooled_moments(stem) if pooled else moments(stem, 1)
        raise MergettaError("The model has neither a convolution nor token blocks to take a signature from.")


def logits_of(output: Any) -> Tensor:
    """What a model returns, or `logits` in it where that is a mapping or an object, as in transformers; of a tuple, the
    first entry.
    """
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values())) if len(output) == 1 else output)
    elif isinstance(output, tuple | list) and output:
        output = output[0]
    output = getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise MergettaError(
            f"The model must return logits, or an object that has them as `logits`, not {type(output)}."
        )
    return output


def image_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance per channel over the batch, (C,), and over each of its images, (B, C), in plain ops."""
    own = x.mean([2, 3]) if x.ndim == 4 else x.flatten(2).mean(2) if x.ndim > 2 else x
    mean = own.mean(0)
    deviation = x - mean.view(1, -1, *[1] * (x.ndim - 2))
    square = deviation * deviation
    squares = square.flatten(2).mean(2) if x.ndim > 2 else square
    return mean, squares.mean(0), own, torch.clamp(squares - (own - mean) ** 2, min=0.0)


def spatial_moments(x: Tensor, none: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and mean square of each image per channel, (B, C): few ops for ONNX Runtime, few copies of `x`; on what
    that costs in digits see `pooled_moments`.
    """
    dims = list(range(2, x.ndim))
    return (x.mean(dims), (x * x).mean(dims)) if dims else (x.clone(), x * x)


def moments(x: Tensor, channel: int) -> Tensor:
    """Mean and variance per channel, (2, C), in few and plain ops: each costs an exported model a microsecond."""
    dims = [d for d in range(x.ndim) if d != channel]
    mean = x.mean(dims, keepdim=True)
    deviation = x - mean
    return torch.cat([mean, (deviation * deviation).mean(dims, keepdim=True)]).flatten(1)


def pooled_moments(x: Tensor) -> Tensor:
    """The same of a convolution's output, (B, C, H, W), by average pooling. ONNX Runtime does that in the layout that
    its convolutions leave, but rearranges all of `x` for a mean or a difference. The difference of squares costs
    digits where contrast is low: at a mean of 40 standard deviations, variances are right to half a percent.
    """
    own, square = (F.avg_pool2d(y, x.shape[2:]).mean(0, keepdim=True) for y in (x, x * x))
    return torch.cat([own, F.relu(square - own * own)]).flatten(1)
