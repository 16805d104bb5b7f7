"""A lead, not a part of any method: how well other domains' experts tell the gradient in a domain that nobody has seen.

A strong device has gradients by back-propagation. Of the loss of `refinement.py`, δ = Wᵀ ∂loss/∂logits, the error at
the classifier's input, is known to a weak device without any: it is closed-form. So each expert fits a linear map from
(Σ δ, Σ δ·f), f the features, to the gradient of all scales and shifts, over groups of eight images, and the mean of the
others' maps predicts the gradient in the target's domain, at what race-merge has merged there. Synthetic gradients
(Jaderberg et al. 2017), by a learnt direct feedback (Nøkland 2016).

    python scripts/synthetic_gradients.py fashion-bn        # or fashion-vit

prints the cosine between predicted and exact gradient over 480 images of each target.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.bench.cells import Cell
from mergetta.bench.inputs import family_of, target_stream
from mergetta.bench.pools import make_expert, pool
from mergetta.bench.protocol import build
from mergetta.bench.store import Store, default_cache
from mergetta.bench.suite import Suite, load_suite
from mergetta.groups import GroupValues, has_batch_norm, learnable, moments_of, with_moments
from mergetta.losses.probabilities import softmax
from mergetta.losses.roid import likelihood_ratio_slope, sample_weights
from mergetta.losses.views import colour_and_geometry
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator

TARGETS = ("fog", "contrast", "gaussian_noise", "glass_blur", "snow")
SEVERITY, IMAGES, BATCH, TOGETHER, RANK, RIDGE = 4, 480, 96, 8, 16, 0.1
Rows = tuple[NDArray[np.float64], NDArray[np.float64]]
"""What is known without back-propagation, (n, 2F), and the gradients, (n, D), of groups of images."""
Map = tuple[NDArray[np.float64], NDArray[np.float64]]
"""(r, 2F) and (r, D): a map of low rank."""


def rows_of(runtime: TorchRuntime, groups: GroupValues, images: NDArray[np.float32]) -> Rows:
    """Of the images and of a second view of those that ROID keeps, with the moments among the groups."""
    names = list(learnable(runtime.groups))
    tensors = runtime.tensors(groups)
    leaves = [tensors[name].requires_grad_(True) for name in names]
    weight = runtime.classifier.weight.astype(np.float64)
    shares = np.ones(runtime._norms.channels, np.float32)
    average = np.full(len(weight), 1 / len(weight))
    known, gradients = [], []
    for start in range(0, len(images), BATCH):
        batch = images[start : start + BATCH]
        first = runtime._run(runtime._prepare(batch), tensors, shares, False)
        logits = first.logits.detach().numpy().astype(np.float64)
        weights, keep = sample_weights(logits, average, 1 / 3)
        average = 0.9 * average + 0.1 * softmax(logits).mean(axis=0)
        view = colour_and_geometry(batch, generator(0, start, "view"), keep)
        second = runtime._run(runtime._prepare(view), tensors, shares, False)
        seen = second.logits.detach().numpy().astype(np.float64)
        weights = weights[keep][:, None] / len(batch)
        slopes = weights * likelihood_ratio_slope(logits[keep]), weights * (softmax(seen) - softmax(logits[keep]))
        for output, slope, chosen in zip(
            (first, second), slopes, (np.flatnonzero(keep), np.arange(len(seen))), strict=True
        ):
            for some in np.array_split(np.arange(len(slope)), max(1, len(slope) // TOGETHER)):
                loss = (output.logits[chosen[some]] * torch.from_numpy(slope[some]).float()).sum()
                parts = torch.autograd.grad(loss, leaves, retain_graph=True)
                gradients.append(np.concatenate([part.reshape(-1).numpy() for part in parts]))
                error = slope[some] @ weight
                features = output.features[chosen[some]].detach().numpy()
                known.append(np.append(error.sum(axis=0), (error * features).sum(axis=0)))
    return np.stack(known), np.stack(gradients).astype(np.float64)


def fitted(rows: Rows) -> Map:
    """Ridge regression in its dual form, on inputs of equal size, as a map of low rank and unit length."""
    known, gradients = rows
    scale = np.sqrt((known**2).mean(axis=0)) + 1e-12
    inputs = known / scale
    gram = inputs @ inputs.T
    dual = np.linalg.solve(gram + RIDGE * np.trace(gram) / min(inputs.shape) * np.eye(len(gram)), gradients)
    directions = np.linalg.svd(gram @ dual, full_matrices=False)[2][:RANK]
    into = (inputs.T @ (dual @ directions.T)).T / scale
    return into / np.linalg.norm(into), directions


def merged_groups(
    suite: Suite, runtime: TorchRuntime, domain: str, store: Store
) -> tuple[GroupValues, NDArray[np.float32]]:
    """What race-merge has merged after 2,000 images of a domain, and the first of them."""
    bundle = build(
        runtime, suite.methods["race-merge"].bundle, pool(suite, Cell("race-merge", "roid", domain, 0), store), 0
    )
    adapter, images = RaceMerge(runtime, bundle, refine=False), []
    for batch, _ in target_stream(suite, domain, 0):
        adapter.predict(batch)
        images.append(batch)
        if sum(map(len, images)) >= 2000:
            break
    groups, names = adapter.mixture.groups(adapter.weights), tuple(runtime.groups)
    if has_batch_norm(runtime.structure):
        groups = with_moments(groups, adapter.normalise.moments.value(moments_of(groups, names)), names)
    return groups, np.concatenate(images)[:IMAGES]


def main(name: str) -> None:
    torch.set_num_threads(1)
    suite, store = load_suite(name).changed(severity=SEVERITY), Store(Path(default_cache()))
    runtime, maps = TorchRuntime(family_of(suite)), {}
    for domain in suite.domains:
        images = np.concatenate([batch for batch, _ in target_stream(suite, domain, 0)])[:IMAGES]
        maps[domain] = fitted(rows_of(runtime, make_expert(suite, "roid", domain, 0, store).groups, images))
    cosines = []
    for domain in TARGETS:
        known, gradients = rows_of(runtime, *merged_groups(suite, runtime, domain, store))
        predicted = np.mean([known @ into.T @ out for other, (into, out) in maps.items() if other != domain], axis=0)
        exact, told = gradients.sum(axis=0), predicted.sum(axis=0)
        cosines.append(float(exact @ told / np.linalg.norm(exact) / np.linalg.norm(told)))
        print(f"{name} {domain}: cosine {cosines[-1]:.2f} in {len(exact)} scales and shifts", flush=True)
    print(f"{name}: {np.mean(cosines):.2f} on average")


if __name__ == "__main__":
    main(*sys.argv[1:])
