"""Runs a torch model with given groups; the only runtime that can also back-propagate."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from mergetta.errors import MergettaError
from mergetta.groups import Group, GroupValues, Vector, check_groups
from mergetta.models.discovery import find_classifier, find_groups, open_batch_norms
from mergetta.models.family import Family
from mergetta.models.watch import Watcher, image_moments, logits_of
from mergetta.runtimes.base import Classifier, Output, Predict, check_images, shares_of, unfolded


class TorchRuntime:
    """A private copy of the model, with its norm layers open.

    Parameters
    ----------
    family
        A family, or a model that takes raw pixels.
    device
        As torch names it: `cpu`, `cuda:0`, …
    block_of
        Which block a module belongs to, by its name, where the structure does not tell.

    Examples
    --------
    >>> from mergetta.models.family import load_family
    >>> TorchRuntime(load_family("fashion-bn"))(np.zeros((2, 1, 28, 28))).logits.shape
    (2, 10)
    """

    def __init__(
        self, family: Family | nn.Module, device: str = "cpu", block_of: Callable[[str], int] | None = None
    ) -> None:
        source = family.model if isinstance(family, Family) else family
        self.family = family.fingerprint if isinstance(family, Family) else ""
        self.device = device
        self.model = copy.deepcopy(source).to(device).eval()
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.requires_grad_(False)
        self._norms = BatchNorms(self.model)
        self._watcher = Watcher(self.model)
        self.signature = family.signature if isinstance(family, Family) else None
        self.forwarded = 0
        self._normalise = family.preprocessing if isinstance(family, Family) else None
        self._open(find_groups(self.model, block_of))

    def _open(self, structure: tuple[Group, ...]) -> None:
        """These groups of the model, as they are now, are its source values."""
        self.structure = structure
        values: dict[str, Tensor] = {group.name: attrgetter(group.name)(self.model) for group in structure}
        self.shapes = {name: value.shape for name, value in values.items()}
        self.groups: dict[str, Vector] = {n: v.numpy(force=True).reshape(-1).copy() for n, v in values.items()}
        self._source = self.tensors(self.groups)

    @property
    def classes(self) -> int:
        return find_classifier(self.model).out_features

    @property
    def classifier(self) -> Classifier:
        layer = find_classifier(self.model)
        bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        return Classifier(layer.weight.numpy(force=True), bias.numpy(force=True))

    def tensors(self, groups: GroupValues) -> dict[str, Tensor]:
        """All groups as tensors of the model's shapes, on its device."""
        check_groups(groups, self.groups, "The set of groups")
        values = np.concatenate([np.asarray(groups[group.name], dtype=np.float32) for group in self.structure])
        parts = torch.split(torch.from_numpy(values).to(self.device), [group.size for group in self.structure])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def __call__(
        self, images: Any, groups: GroupValues | None = None, given: float | Vector = 0.0, moments: bool = False
    ) -> Output:
        shares = shares_of(given, self._norms.channels)
        x = self._prepare(images)
        with torch.inference_mode():
            output = self._run(x, self._source if groups is None else self.tensors(groups), shares, moments)
        if isinstance(images, Tensor):
            return output
        return Output(*(None if value is None else value.numpy(force=True) for value in output))

    def folded(self, groups: GroupValues) -> Predict:
        return unfolded(self, groups)

    def forward(self, images: Any, groups: Mapping[str, Tensor], moments: bool = False) -> Output:
        """A pass that gradients can flow through, with the batch's own statistics.

        Groups that are not among the given tensors are the source's. Only the logits and features carry gradients.
        """
        return self._run(
            self._prepare(images), {**self._source, **groups}, shares_of(0.0, self._norms.channels), moments
        )

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

    def _run(self, x: Tensor, groups: dict[str, Tensor], given: Vector, moments: bool) -> Output:
        self._norms.begin(given, moments)
        self.forwarded += len(x)
        try:
            logits = logits_of(functional_call(self.model, dict(groups), (x,)))  # it writes changed buffers back
            seen = self._norms.moments(len(x)) if moments else None
            return Output(logits, self._watcher.features(), self._watcher.signature().detach(), seen)
        except (RuntimeError, AssertionError) as error:
            raise MergettaError(f"The model cannot take images of shape {tuple(x.shape)}: {error}.") from error
        finally:
            self._watcher.seen.clear()
            self._norms.seen.clear()


class BatchNorms:
    """What the BatchNorm layers of a model normalise with in a pass, and what they see in it.

    The layers themselves stay in place, because subclasses (timm's, with an activation inside) do more than normalise.
    Where a pass needs the batch's moments, a layer is handed what it is to normalise with just before it runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layers: list[Any] = list(open_batch_norms(model).values())
        self.channels = sum(layer.num_features for layer in self.layers)
        self.given: dict[Any, Tensor | float] = {}
        """The share of what is given, by layer: plain 0 or 1 where it is that for all channels."""
        self.watching = False
        self.seen: dict[Any, tuple[Tensor, Tensor]] = {}
        """Mean and variance of each image, (B, C), by layer."""
        for layer in self.layers:
            layer.register_forward_pre_hook(self._hand)

    def begin(self, given: Vector, watching: bool) -> None:
        self.watching = watching
        start = 0
        for layer in self.layers:
            shares = given[start : start + layer.num_features]
            start += layer.num_features
            plain = next((share for share in (0.0, 1.0) if (shares == share).all()), None)
            self.given[layer] = torch.from_numpy(shares.copy()).to(layer.running_mean) if plain is None else plain
            layer.training = plain == 0

    def moments(self, images: int) -> Tensor:
        """Of this pass, (B, 2, channels of all layers); a layer that did not run shows what it would normalise with."""
        stored = {
            layer: (layer.running_mean.expand(images, -1), layer.running_var.expand(images, -1))
            for layer in self.layers
            if layer not in self.seen
        }
        pairs = [self.seen.get(layer) or stored[layer] for layer in self.layers]
        if not pairs:
            return torch.zeros(images, 2, 0)
        return torch.stack([torch.cat([pair[row] for pair in pairs], dim=1) for row in (0, 1)], dim=1)

    def _hand(self, layer: Any, inputs: tuple[Tensor]) -> None:
        x, given = inputs[0].detach(), self.given[layer]
        alone = isinstance(given, float) and given == 0 and x.numel() == x.shape[1]  # torch refuses a single value
        if not (self.watching or alone or isinstance(given, Tensor)):
            return
        if self.watching:
            mean, variance, *own = image_moments(x)
            self.seen[layer] = own[0], own[1]
        else:
            mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
        learning = layer.training and torch.is_grad_enabled()  # gradients flow through the batch's statistics
        if isinstance(given, Tensor) or (given == 0 and (alone or not learning)):
            layer.training = False
            layer.running_mean = given * layer.running_mean + (1 - given) * mean
            layer.running_var = given * layer.running_var + (1 - given) * variance
