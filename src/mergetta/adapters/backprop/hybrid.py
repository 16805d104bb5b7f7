"""Between the paper's method and back-propagation: gradients for the last norm layers, forward passes for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mergetta.adapters.backprop.roid import ROID
from mergetta.adapters.base import check_bundle
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.groups import Group, Vector, learnable
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator
from mergetta.streams.state import Field, checked
from mergetta.zeroth_order.spsa import DELTA, apply, probe


class Hybrid(ROID):
    """Starts from the merge; the last `layers` norm layers learn as in ROID, by back-propagation that stops at the
    first of them, so that no activation before it is kept; the coefficients of the layers before move as in
    `zo-merge`, with the same loss. 0 layers: the paper's method. All of them: ROID from the merge. (From 1 layer on
    ROID's prior correction is part of what is returned, and its running mean prediction has seen the batch before the
    coefficients move.)

    `layers_within` (mergetta.bench.budget) measures how many fit a budget of memory.
    """

    def __init__(
        self,
        runtime: TorchRuntime,
        bundle: Bundle,
        layers: int = 1,
        zo_lr: float = 5e-3,
        delta: float = DELTA,
        clamp: float = 5.0,
        optimizer: str = "sgd",
        **options: Any,
    ) -> None:
        if "frozen" in options:
            raise MergettaError("hybrid freezes what does not learn by itself: give layers=…, not frozen=….")
        check_bundle(runtime, bundle)
        if not (delta > 0 and clamp > 0 and zo_lr >= 0):
            raise MergettaError(f"delta and clamp must be positive, zo_lr not negative: {delta}, {clamp}, {zo_lr}.")
        learning = last_layers(runtime.structure, layers)
        self.bundle = replace(bundle, frozen=tuple({*bundle.frozen, *learning}))
        self.start = bundle.merge()
        self.zo_lr, self.delta, self.clamp = zo_lr, delta, clamp
        others = [name for name in learnable(runtime.groups) if name not in learning]
        super().__init__(runtime, optimizer=optimizer, frozen=others, **options)

    def reset(self) -> None:
        self.point: Vector = self.bundle.flatten()
        """The coefficients that move, as one vector."""
        self._merge(self.point)
        super().reset()

    def begin(self) -> dict[str, nn.Parameter]:
        """From the merge, which is also what ROID mixes back in."""
        return self.parameters(self.start)

    def _merge(self, point: Vector) -> None:
        self.merged = self.runtime.tensors(self.bundle.merge(point))

    def weights(self) -> dict[str, Tensor]:
        return {**self.merged, **self.learnt}

    def predict(self, images: Array) -> Array:
        x, step = self.runtime.tensor(images), self.steps
        if self.learnt:
            logits = super().predict(x)
        else:
            self.output = None
            logits = self.forward(x, gradient=False)
            self.steps += 1
        if self.point.size:
            self._tune(x, step)
        if not self.learnt:
            self.loss.observe(logits)
        return logits if isinstance(images, Tensor) else to_numpy(logits)

    def _tune(self, images: Tensor, step: int) -> None:
        def loss(point: Vector) -> float:
            self._merge(point)
            views = generator(self.seed, step, "views")
            with torch.no_grad():
                return float(self.loss.evaluate(lambda x, gradient=False: self.forward(x, False), images, views).value)

        found = probe(loss, self.point, self.bundle.sizes, self.seed, step, self.delta, self.clamp)
        self.point = apply(self.point, self.bundle.sizes, found, self.zo_lr)
        self.skipped += found.skipped
        self._merge(self.point)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "point": self.point.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        point = checked(state, {"point": Field(self.point.shape)})["point"]
        super().load_state_dict(state)
        self.point = point
        self._merge(point)


def layers_of(structure: Sequence[Group]) -> tuple[str, ...]:
    """Names of the norm layers, in order."""
    return tuple(dict.fromkeys(group.name.rpartition(".")[0] for group in structure))


def last_layers(structure: Sequence[Group], count: int) -> tuple[str, ...]:
    """Names of the groups of the last `count` norm layers.

    >>> last_layers([Group(name, 4, 0, "scale") for name in ("a.weight", "a.bias", "b.weight", "b.bias")], 1)
    ('b.weight', 'b.bias')
    """
    layers = layers_of(structure)
    if not 0 <= count <= len(layers):
        raise MergettaError(f"layers must be 0 to {len(layers)} for this model, not {count}.")
    chosen = set(layers[len(layers) - count :])
    return tuple(n for n in learnable(group.name for group in structure) if n.rpartition(".")[0] in chosen)
