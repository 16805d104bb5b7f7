"""What zeroth-order steps lack to back-propagation: the estimate, the directions, or the loss and the moments?

    python scripts/step_limits.py fashion-bn          # about half an hour on one core; also fashion-vit

Prints the online error in each pass over four domains (severity 5, 4,000 images a pass, corruptions drawn anew, batches
of 64, steps from the race's end on, one seed). Each row takes away one thing that a weak device has to do without:

- race-merge without steps, and as it is: the gradient is learnt from perturbed forward passes;
- the exact gradient, on the same directions, with the same loss, moments, duels and steps: what the estimate costs;
- the exact gradient in all scales and shifts: what the directions cost;
- ROID by back-propagation from the race's mixture, and from the source model: what loss, moments and start make up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mergetta.adapters import create_adapter
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.adapters.forward_only.refinement import Forward, Refinement, RefineSettings, second_views
from mergetta.bench.cells import Cell
from mergetta.bench.inputs import family_of, target_stream
from mergetta.bench.pools import pool
from mergetta.bench.protocol import build, measured, place_of
from mergetta.bench.store import Store, default_cache
from mergetta.bench.suite import Suite, load_suite
from mergetta.groups import Vector, has_batch_norm, learnable, moments_of, with_moments
from mergetta.losses.probabilities import softmax
from mergetta.losses.roid import likelihood_ratio_slope, sample_weights
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator

DOMAINS = ("gaussian_noise", "glass_blur", "fog", "contrast")
PASSES, BATCH = 4, 64


class Exact(Refinement):
    """Steps by the exact gradient, on the members' directions, or in `every` scale and shift."""

    def __init__(self, adapter: RaceMerge, every: bool) -> None:
        settings = RefineSettings(warm=0, lr=3e-3, momentum=0.9) if every else RefineSettings(warm=0)
        super().__init__(adapter.bundle, adapter.classes, adapter.settings.mixed, settings)
        self.adapter = adapter
        if every:
            self.names = list(learnable(adapter.bundle.base))
            self.directions = [np.eye(adapter.bundle.base[name].size) for name in self.names]
            self.size = sum(map(len, self.directions))
            self.point, self.mean, self.square = (np.zeros(self.size) for _ in range(3))
            self.duel.best = self.point

    def _gradient(self, images: NDArray[Any], logits: NDArray[Any], forward: Forward, start: Vector) -> Vector:
        adapter, rng = self.adapter, generator(0, self.steps, "refine")
        runtime, order = adapter.runtime, tuple(adapter.runtime.groups)
        groups = adapter.mixture.groups(adapter.weights, self.moved(start))
        if has_batch_norm(runtime.structure):
            groups = with_moments(groups, adapter.normalise.moments.value(moments_of(groups, order)), order)
        tensors = runtime.tensors(groups)
        leaves = [tensors[name].requires_grad_(True) for name in self.names]
        weights, keep = sample_weights(logits, self.average, self.settings.temperature)
        self.average = 0.9 * self.average + 0.1 * softmax(logits).mean(axis=0)
        weights = weights[keep][:, None] / len(images)
        given = np.ones(runtime._norms.channels, np.float32)
        views = second_views(images, rng, keep, self.settings.together)
        first, second = (runtime._run(runtime._prepare(x), tensors, given, False).logits for x in (images[keep], views))
        here, seen = (each.detach().numpy().astype(np.float64) for each in (first, second))
        slopes = weights * likelihood_ratio_slope(here), weights * (softmax(seen) - softmax(here))
        loss = sum(
            (each * torch.from_numpy(slope).float()).sum() for each, slope in zip((first, second), slopes, strict=True)
        )
        parts = torch.autograd.grad(loss, leaves)
        return np.concatenate(
            [each @ part.reshape(-1).numpy() for each, part in zip(self.directions, parts, strict=True)]
        )


class Limit(RaceMerge):
    """race-merge with exact gradients."""

    every = False

    def _begin(self) -> None:
        super()._begin()
        self.refinement = Exact(self, self.every)


class Limitless(Limit):
    every = True


class RoidAfterRace:
    """The race, and from its mixture on ROID as published, with back-propagation and the batch's own statistics."""

    def __init__(self, race: RaceMerge, options: dict[str, Any]) -> None:
        self.race, self.roid = race, create_adapter("roid", race.runtime, seed=0, **options)
        self.begun = False

    def predict(self, images: NDArray[Any]) -> NDArray[Any]:
        if not self.race.settled:
            return self.race.predict(images)
        if not self.begun:
            groups = self.race.mixture.groups(self.race.weights)
            with torch.no_grad():
                for name, value in self.roid.learnt.items():
                    value.copy_(torch.from_numpy(groups[name]).view(value.shape))
            self.begun = True
        return self.roid.predict(images)


def variants(suite: Suite, domain: str, store: Store) -> Iterator[tuple[str, Any]]:
    experts = pool(suite, Cell("race-merge", "roid", domain, 0), store)
    runtime = TorchRuntime(family_of(suite))
    bundle = build(runtime, suite.methods["race-merge"].bundle, experts, 0)
    known = {"patience": 0, "source": measured("source", place_of(suite), suite.training_batch_size, None)}
    yield "race-merge without steps", RaceMerge(runtime, bundle, refine=False, **known)
    yield "race-merge", RaceMerge(runtime, bundle, **known)
    yield "exact gradient, the same directions", Limit(runtime, bundle, **known)
    yield "exact gradient, all scales and shifts", Limitless(runtime, bundle, **known)
    roid = suite.methods["roid"].options
    yield "ROID from the race's mixture", RoidAfterRace(RaceMerge(runtime, bundle, refine=False, **known), roid)
    yield "ROID from the source model", create_adapter("roid", runtime, seed=0, **roid)


def main(name: str) -> None:
    torch.set_num_threads(1)
    suite = load_suite(name).with_streams(BATCH, passes=PASSES)
    errors: dict[str, list[NDArray[np.float64]]] = {}
    for domain in DOMAINS:
        for label, adapter in variants(suite, domain, Store(Path(default_cache()))):
            stream = target_stream(suite, domain, 0)
            wrong = [adapter.predict(images).argmax(axis=1) != labels for images, labels in stream]
            by_pass = 100 * np.concatenate(wrong).reshape(PASSES, -1).mean(axis=1)
            errors.setdefault(label, []).append(by_pass)
            print(f"{domain}, {label}: {' '.join(f'{error:.1f}' for error in by_pass)}", flush=True)
    print(f"\n{name}, mean of {', '.join(DOMAINS)}")
    for label, found in errors.items():
        print(f"{label}: {' '.join(f'{error:.1f}' for error in np.mean(found, axis=0))}")


if __name__ == "__main__":
    main(*sys.argv[1:])
