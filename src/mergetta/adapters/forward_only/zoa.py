"""ZOA (Deng et al. 2025): one-sided SPSA on norm layers, and a bank of what past domains taught. Two forward passes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mergetta.adapters.base import Adapter, entry
from mergetta.adapters.forward_only.knowledge_bank import KnowledgeBank
from mergetta.adapters.forward_only.source_features import BackToSource, check_source, squared_distances
from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.groups import Group, Vector, has_batch_norm, learnable, paper_frozen
from mergetta.losses.probabilities import entropy
from mergetta.runtimes.base import Output, Runtime
from mergetta.streams.shift import distance
from mergetta.zeroth_order.segmented import draw_segmented


class Preset(NamedTuple):
    lr: float
    delta: float
    """c of SPSA."""
    weight: float
    """λ of the discrepancy to the source features."""
    shift_threshold: float


VIT = Preset(lr=5e-4, delta=0.02, weight=30.0, shift_threshold=0.1)
CNN = Preset(lr=1e-4, delta=0.01, weight=1.0, shift_threshold=0.2)
DECAY = 0.4
MIXING_LR, MIXING_DELTA, MIXING_DECAY = 0.01, 0.05, 0.1
SMALLEST = 64
"""Images in a batch whose statistics may tell of a new domain."""


class ZOA(Adapter):
    """θ = θ₀ + the bank's mixture + ε; its coefficients a and ε move along g = ΔL / (c z), z of ±U[½, 1].

    A batch is predicted with the weights as they are; the loss of that pass is one side of the step. Loss: mean entropy
    + λ · mean squared discrepancy of the features' mean and std. When the statistics after the stem jump, the weights
    join the bank. a is stepped by the sign of g: what AdamW does with moments that are cleared in every step, as
    they are in the published code; from there also `shift`, FOA's shift of the features. Defaults (`VIT`, or `CNN` if
    there is BatchNorm) and frozen groups as published: the first block, and the last stage or three blocks.
    """

    def __init__(
        self,
        runtime: Runtime,
        source: Sequence[Vector],
        lr: float | None = None,
        delta: float | None = None,
        weight: float | None = None,
        shift_threshold: float | None = None,
        bank_size: int = 32,
        shift: bool = True,
        frozen: Collection[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(runtime)
        given = (lr, delta, weight, shift_threshold)
        preset = CNN if has_batch_norm(runtime.structure) else VIT
        self.settings = Preset(*(d if g is None else g for g, d in zip(given, preset, strict=True)))
        if not (self.settings.lr >= 0 and self.settings.delta > 0 and bank_size > 0):
            raise MergettaError("lr must not be negative, delta and bank_size be positive.")
        frozen = set(published_frozen(runtime.structure) if frozen is None else frozen)
        moving = set(learnable(runtime.groups)) - frozen
        self.sizes = tuple((group.name, group.size) for group in runtime.structure if group.name in moving)
        if frozen - set(runtime.groups) or not self.sizes:
            raise MergettaError("ZOA can freeze only groups that the model has, and must be left one to move.")
        self.back = BackToSource(runtime, check_source(runtime, source))
        self.bank = KnowledgeBank(self.sizes, bank_size)
        self.shift, self.seed = shift, seed
        self.reset()

    def reset(self) -> None:
        self.bank.reset()
        self.epsilon = np.zeros(self.bank.vectors.shape[1])
        self.running: np.ndarray | None = None
        self.back.mean = None
        self.steps = self.skipped = 0

    def predict(self, images: Array) -> Array:
        output = self._forward(self.bank.mixing, self.epsilon, images)
        self._watch(to_numpy(output.signature), len(images))
        logits = self.back.logits(output) if self.shift else output.logits
        self._step(images, self.loss(output))
        self.back.observe(output)
        return logits

    def loss(self, output: Output) -> float:
        far = squared_distances(to_numpy(output.features), self.back.source).mean(axis=1).sum()
        return float(np.mean(entropy(to_numpy(output.logits))) + self.settings.weight * far)

    def _forward(self, mixing: Vector, epsilon: Vector, images: Array) -> Output:
        source, parts = self.runtime.groups, self.bank.split(self.bank.mixed(mixing) + epsilon)
        moved = {name: source[name] + part for (name, _), part in zip(self.sizes, parts, strict=True)}
        return self.runtime(images, {**source, **moved})

    def _step(self, images: Array, here: float) -> None:
        mixing = self.bank.mixing
        z = draw_segmented(self.seed, self.steps, (("mixing", mixing.size), *self.sizes))
        along, z = MIXING_DELTA * z[: mixing.size], self.settings.delta * z[mixing.size :]
        difference = self.loss(self._forward(mixing + along, self.epsilon + z, images)) - here
        self.steps += 1
        if not np.isfinite(difference):
            self.skipped += 1
            return
        self.epsilon = self.epsilon - self.settings.lr * (difference / z + DECAY * self.epsilon)
        if mixing.size > 1:
            self.bank.mixing = mixing * (1 - MIXING_LR * MIXING_DECAY) - MIXING_LR * np.sign(difference / along)

    def _watch(self, now: np.ndarray, images: int) -> None:
        """Notice a new domain by its statistics."""
        if images < SMALLEST:
            return
        if self.running is not None and distance(self.running, now) > self.settings.shift_threshold:
            self.epsilon = self.bank.remember(self.epsilon)
            self.running = self.back.mean = None
        self.running = now if self.running is None else 0.8 * self.running + 0.2 * now

    def state_dict(self) -> dict[str, Any]:
        running = {} if self.running is None else {"running": np.array(self.running)}
        counts = {"steps": self.steps, "skipped": self.skipped}
        return {**counts, "epsilon": self.epsilon.copy(), **running, **self.bank.state(), **self.back.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        steps, skipped, epsilon = (entry(state, name) for name in ("steps", "skipped", "epsilon"))
        running = None if "running" not in state else np.array(state["running"])
        if np.shape(epsilon) != self.epsilon.shape or (running is not None and (running.ndim, len(running)) != (2, 2)):
            raise MergettaError("This ZOA state does not fit the model.")
        mean, bank = self.back.check(state), self.bank.check(state)
        self.back.mean, (self.bank.mixing, self.bank.vectors) = mean, bank
        self.steps, self.skipped, self.epsilon, self.running = int(steps), int(skipped), np.array(epsilon), running


def published_frozen(structure: Sequence[Group]) -> set[str]:
    """What ZOA leaves alone: the first block (a CNN's stem) and the last ones; only these if nothing else is left.

    The published code for ResNet-50 also leaves alone, by their names, the last norm of each residual unit, those of
    the shortcuts and the first unit. Names do not carry over to other networks, so they move here.
    """
    last, earliest = set(paper_frozen(structure)), min(group.block for group in structure)
    first = {group.name for group in structure if group.block == earliest}
    return last if set(learnable(group.name for group in structure)) <= last | first else last | first
