"""One gradient step on the norm layers per batch: what all back-propagation methods share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergetta.adapters.base import Adapter, part
from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.groups import GroupValues, Vector, learnable
from mergetta.losses import Loss
from mergetta.runtimes.base import Output
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator
from mergetta.streams.state import Field, checked

COUNT = Field(low=0, whole=True)


class BackpropAdapter(Adapter):
    """Predicts a batch with the weights as they are, in the same forward pass that the gradient comes from."""

    runtime: TorchRuntime

    def __init__(
        self,
        runtime: TorchRuntime,
        loss: Loss,
        /,
        optimizer: str = "adam",
        lr: float = 1e-3,
        momentum: float = 0.9,
        nesterov: bool = True,
        frozen: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        if not isinstance(runtime, TorchRuntime):
            raise MergettaError("Back-propagation needs a TorchRuntime.")
        super().__init__(runtime)
        unknown = set(frozen) - set(runtime.groups)
        if unknown:
            raise MergettaError(f"Cannot freeze {min(unknown)!r}: the model has no such group.")
        if optimizer not in ("adam", "sgd"):
            raise MergettaError(f"optimizer must be adam or sgd, not {optimizer!r}.")
        if not 0 <= lr < math.inf or not 0 <= momentum < 1:
            raise MergettaError(f"lr must be finite and not negative, and momentum in [0, 1), not {lr} and {momentum}.")
        self.loss = loss
        self.seed = seed
        self.names = tuple(name for name in learnable(runtime.groups) if name not in set(frozen))
        self.watching = False
        """Whether `output` is to have the moments of BatchNorm layers: what an expert shares."""
        self._settings = (optimizer, lr, momentum, nesterov)
        self.reset()

    def reset(self) -> None:
        self.output: Output | None = None
        """Of the last batch, without gradients."""
        self.learnt = self.begin()
        name, lr, momentum, nesterov = self._settings
        parameters: list[Tensor] = [*self.learnt.values()] or [torch.zeros(0)]  # an optimiser wants something
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(parameters, lr, betas=(momentum, 0.999))
            if name == "adam"
            else torch.optim.SGD(parameters, lr, momentum=momentum, nesterov=nesterov and momentum > 0)
        )
        self.steps = 0
        self.skipped = 0
        self.loss.reset()

    def begin(self) -> dict[str, nn.Parameter]:
        """What learns, with its first values."""
        return self.parameters(self.runtime.groups)

    def parameters(self, groups: GroupValues) -> dict[str, nn.Parameter]:
        """The groups that learn as parameters of their own."""
        tensors = self.runtime.tensors(groups)
        return {name: nn.Parameter(tensors[name].clone(), requires_grad=False) for name in self.names}

    def weights(self) -> Mapping[str, Tensor]:
        """The groups in use, as tensors through which gradients flow; those not named are the source's."""
        return self.learnt

    @property
    def groups(self) -> dict[str, Vector]:
        """The groups in use."""
        with torch.no_grad():
            changed = {name: value.numpy(force=True).reshape(-1).copy() for name, value in self.weights().items()}
        return {**self.runtime.groups, **changed}

    def forward(self, images: Array, gradient: bool = True) -> Tensor:
        """Logits with the weights in use; the first pass over a batch is kept in `output`."""
        first = self.output is None
        with torch.set_grad_enabled(gradient):
            output = self.runtime.forward(images, self.weights(), self.watching and first)
        if first:
            self.output = output._replace(logits=output.logits.detach(), features=output.features.detach())
        logits: Tensor = output.logits
        return logits

    def predict(self, images: Array) -> Array:
        views = generator(self.seed, self.steps, "views")
        self.output = None
        self._learn(True)
        try:
            evaluation = self.loss.evaluate(self.forward, self.runtime.tensor(images), views)
            moved = bool(evaluation.kept) and self._step(evaluation.value)
        finally:
            self._learn(False)
        self.skipped += not moved
        self.steps += 1
        self._features = None if self.output is None else self.output.features
        logits = evaluation.logits.detach()
        self.loss.observe(logits)
        logits = self.returned(logits)
        return logits if isinstance(images, Tensor) else logits.numpy(force=True)

    def look(self, images: Array) -> Array:
        logits = self.returned(self._shown(self.runtime(self.runtime.tensor(images), self.groups)))
        return logits if isinstance(images, Tensor) else logits.numpy(force=True)

    def _learn(self, on: bool) -> None:
        for parameter in self.learnt.values():
            parameter.requires_grad_(on)

    def _step(self, value: Tensor) -> bool:
        """One step down the gradient; none if loss or gradient is not finite."""
        if not torch.isfinite(value):
            return False
        self.optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.learnt.values() if p.grad is not None]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
            return False
        self.optimizer.step()
        self.after_step()
        return True

    def after_step(self) -> None:
        """What a method does to the weights after each step."""

    def returned(self, logits: Tensor) -> Tensor:
        """What a method does to the logits before it returns them."""
        return logits

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, "skipped": self.skipped}
        state |= {f"learnt/{name}": value.numpy(force=True).copy() for name, value in self.learnt.items()}
        state |= {f"loss/{name}": value for name, value in self.loss.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if value is not None:
                    state[f"optimizer/{index}/{key}"] = torch.as_tensor(value).numpy(force=True).copy()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = checked(state, {"steps": COUNT, "skipped": COUNT})
        learnt = checked(state, {name: Field(tuple(p.shape)) for name, p in self.learnt.items()}, "learnt/")
        loss_state = part(state, "loss/")
        self.loss.check_state(loss_state)
        entries: dict[int, dict[str, Any]] = {}
        shapes = {str(index): tuple(parameter.shape) for index, parameter in enumerate(self.learnt.values())}
        for name, value in part(state, "optimizer/").items():
            index, _, key = name.partition("/")
            if index not in shapes or np.shape(value) not in ((), shapes[index]):
                raise MergettaError(f"This state does not fit the adapter: the optimizer's {name!r}.")
            entries.setdefault(int(index), {})[key] = torch.as_tensor(value).clone()
        with torch.no_grad():
            for name, value in learnt.items():
                self.learnt[name].copy_(torch.from_numpy(value))
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": entries})
        self.loss.load_state_dict(loss_state)
        self.steps, self.skipped = int(counts["steps"]), int(counts["skipped"])
