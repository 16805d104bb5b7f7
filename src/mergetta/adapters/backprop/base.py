"""One gradient step on the norm layers per batch: what all back-propagation methods share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mergetta.adapters.base import Adapter, entry
from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.losses import Loss
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator


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
        self.loss = loss
        self.seed = seed
        self.learnt = {name: p for name, p in runtime.parameters.items() if name not in set(frozen)}
        self._settings = (optimizer, lr, momentum, nesterov)
        self.reset()

    def reset(self) -> None:
        self.runtime.load(self.runtime.groups)
        name, lr, momentum, nesterov = self._settings
        parameters = list(self.learnt.values())
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(parameters, lr, betas=(momentum, 0.999))
            if name == "adam"
            else torch.optim.SGD(parameters, lr, momentum=momentum, nesterov=nesterov and momentum > 0)
        )
        self.steps = 0
        self.skipped = 0
        self.loss.reset()

    def predict(self, images: Array) -> Array:
        for parameter in self.learnt.values():
            parameter.requires_grad_(True)
        views = generator(self.seed, self.steps, "views")
        evaluation = self.loss.evaluate(self.runtime.forward, self.runtime.tensor(images), views)
        if evaluation.kept and bool(torch.isfinite(evaluation.value)):
            self.optimizer.zero_grad()
            evaluation.value.backward()
            self.optimizer.step()
            self.after_step()
        else:
            self.skipped += 1
        self.steps += 1
        for parameter in self.learnt.values():
            parameter.requires_grad_(False)
        logits = evaluation.logits.detach()
        self.loss.observe(logits)
        logits = self.returned(logits)
        return logits if isinstance(images, Tensor) else logits.numpy(force=True)

    def after_step(self) -> None:
        """What a method does to the weights after each step."""

    def returned(self, logits: Tensor) -> Tensor:
        """What a method does to the logits before it returns them."""
        return logits

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"steps": self.steps, "skipped": self.skipped}
        state |= {f"group/{name}": value for name, value in self.runtime.current().items()}
        state |= {f"loss/{name}": value for name, value in self.loss.state_dict().items()}
        for index, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                if value is not None:
                    state[f"optimizer/{index}/{key}"] = torch.as_tensor(value).numpy(force=True).copy()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        groups = {name.removeprefix("group/"): value for name, value in state.items() if name.startswith("group/")}
        steps, skipped = int(entry(state, "steps")), int(entry(state, "skipped"))
        self.runtime.load(groups)
        self.steps, self.skipped = steps, skipped
        self.loss.load_state_dict({k.removeprefix("loss/"): v for k, v in state.items() if k.startswith("loss/")})
        entries: dict[int, dict[str, Any]] = {}
        for name, value in state.items():
            if name.startswith("optimizer/"):
                _, index, key = name.split("/")
                entries.setdefault(int(index), {})[key] = torch.as_tensor(value).clone()
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": entries})
