"""Runs a torch model with given groups; the only runtime that can also back-propagate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mergetta.errors import MergettaError
from mergetta.groups import Group, GroupValues, Vector, check_groups
from mergetta.models.discovery import find_classifier, find_groups
from mergetta.models.family import Family
from mergetta.models.watch import Watcher, moments
from mergetta.runtimes.base import Classifier, Output, check_images


class TorchRuntime:
    """A private copy of the model, with its norm layers open.

    >>> from mergetta.models.family import load_family                            # doctest: +SKIP
    >>> TorchRuntime(load_family("fashion-bn"))(np.zeros((2, 1, 28, 28))).logits  # doctest: +SKIP
    """

    def __init__(
        self,
        family: Family | nn.Module,
        source_statistics: float = 0.0,
        device: str = "cpu",
        block_of: Callable[[str], int] | None = None,
    ) -> None:
        source = family.model if isinstance(family, Family) else family
        self.family = family.fingerprint if isinstance(family, Family) else ""
        self.source_statistics = source_statistics
        self.device = device
        self.model = copy.deepcopy(source).to(device).eval()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.requires_grad_(False)
        self.structure: tuple[Group, ...] = find_groups(self.model, block_of)
        self.parameters = {group.name: self.model.get_parameter(group.name) for group in self.structure}
        self.groups: dict[str, Vector] = {
            name: parameter.numpy(force=True).reshape(-1).copy() for name, parameter in self.parameters.items()
        }
        self.statistics = family.statistics if isinstance(family, Family) else None
        self.forwarded = 0
        self._normalise = family.preprocessing if isinstance(family, Family) else None
        self._norms = [BatchNormSwitch(m) for m in self.model.modules() if isinstance(m, _BatchNorm)]
        self._watcher = Watcher(self.model)

    @property
    def classifier(self) -> Classifier:
        layer = find_classifier(self.model)
        bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        return Classifier(layer.weight.numpy(force=True), bias.numpy(force=True))

    def load(self, groups: GroupValues) -> None:
        check_groups(groups, self.groups, "The set of groups to load")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                value = torch.from_numpy(np.array(groups[name], dtype=np.float32))
                parameter.copy_(value.view(parameter.shape))

    def current(self) -> dict[str, Vector]:
        """The values in use now."""
        return {name: p.numpy(force=True).reshape(-1).copy() for name, p in self.parameters.items()}

    def __call__(self, images: Any, source_statistics: float | None = None) -> Output:
        with torch.inference_mode():
            logits = self._run(self._prepare(images), source_statistics)
            output = Output(logits, self._watcher.features(), self._watcher.statistics())
        self._watcher.seen.clear()
        return output if isinstance(images, Tensor) else Output(*(value.numpy(force=True) for value in output))

    def forward(self, images: Any, gradient: bool = True) -> Tensor:
        """Logits that gradients can flow through."""
        with torch.set_grad_enabled(gradient):
            logits = self._run(self._prepare(images), None)
        self._watcher.seen.clear()
        return logits

    def tensor(self, images: Any) -> Tensor:
        """Images on the runtime's device."""
        try:
            contiguous = images if isinstance(images, Tensor) else np.ascontiguousarray(images)
            return torch.as_tensor(contiguous, dtype=torch.float32, device=self.device)
        except (TypeError, ValueError) as error:
            raise MergettaError(f"Images must be an array of numbers: {error}.") from error

    def _prepare(self, images: Any) -> Tensor:
        x = self.tensor(images)
        check_images(x, len(self._normalise.mean) if self._normalise else None)
        if self._normalise:
            mean, std = (
                torch.tensor(values, device=self.device).view(1, -1, 1, 1)
                for values in (self._normalise.mean, self._normalise.std)
            )
            x = (x - mean) / std
        return x.contiguous(memory_format=torch.channels_last)

    def _run(self, x: Tensor, source_statistics: float | None) -> Tensor:
        share = self.source_statistics if source_statistics is None else source_statistics
        for norm in self._norms:
            norm.set(share)
        self.forwarded += len(x)
        try:
            return self.model(x)
        except (RuntimeError, AssertionError) as error:
            raise MergettaError(f"The model cannot take images of shape {tuple(x.shape)}: {error}.") from error


class BatchNormSwitch:
    """Which statistics a BatchNorm layer uses: the batch's (α = 0), the stored ones (α = 1), or a blend.

    The layer itself stays in place, because subclasses (timm's, with an activation inside) do more than normalise.
    For a blend the layer is given the blended statistics; where gradients must flow through them, its input is
    normalised beforehand and the layer is left to scale and shift only, which takes longer.
    """

    def __init__(self, layer: _BatchNorm) -> None:
        if layer.running_mean is None or layer.running_var is None:
            layer.running_mean = torch.zeros(layer.num_features)
            layer.running_var = torch.ones(layer.num_features)
        self.layer = layer
        self.mean, self.variance = layer.running_mean, layer.running_var
        self.share = 1.0
        layer.register_forward_pre_hook(self._blend)

    def set(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise MergettaError(f"source_statistics must lie between 0 and 1, not {share}.")
        self.share = share
        layer: Any = self.layer
        if share == 0:
            layer.training, layer.running_mean, layer.running_var = True, None, None
        elif share == 1:
            layer.training, layer.running_mean, layer.running_var = False, self.mean, self.variance

    def _blend(self, layer: Any, inputs: tuple[Tensor]) -> tuple[Tensor] | None:
        (x,) = inputs
        alone = x.numel() == x.shape[1]  # torch refuses batch statistics over a single value
        if self.share == 1 or (self.share == 0 and not alone):
            return None
        layer.training = False
        learns = torch.is_grad_enabled()
        mean, variance = moments(x, 1) if learns else torch.batch_norm_update_stats(x, None, None, 0.0)
        mean = self.share * self.mean + (1 - self.share) * mean
        variance = self.share * self.variance + (1 - self.share) * variance
        if not learns:
            layer.running_mean, layer.running_var = mean, variance
            return None
        layer.running_mean = torch.zeros_like(self.mean)
        layer.running_var = torch.full_like(self.mean, 1 - layer.eps)
        shape = [1, -1] + [1] * (x.ndim - 2)
        return ((x - mean.view(shape)) / torch.sqrt(variance + layer.eps).view(shape),)
