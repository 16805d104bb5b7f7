"""What carrying moments costs and what their truncation costs, for docs/results/streams.md.

python scripts/moment_results.py size            # ResNet-50 shape: experts and bundles in kB; a minute
python scripts/moment_results.py truncation      # fashion-bn: error by the share of moments that a bundle leaves out
python scripts/moment_results.py clean           # fashion-bn: clean images, with the experts of all 15 corruptions
python scripts/moment_results.py members         # fashion-bn: 98 experts as 16 members, and each as one; 15 minutes
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from mergetta import Bundle, Expert, RaceMerge, TorchRuntime, build_bundle, load_family, train_expert
from mergetta.adapters.forward_only.normaliser import Normaliser
from mergetta.adapters.forward_only.zo_merge import ZOMerge
from mergetta.bench.inputs import clean_images, place_of, target_of
from mergetta.bench.pools import make_expert
from mergetta.bench.store import Store, default_cache
from mergetta.bench.suite import load_suite
from mergetta.data.corruptions import CORRUPTIONS, corrupt
from mergetta.data.streams import as_input
from mergetta.groups import learnable, with_moments
from mergetta.losses.probabilities import softmax
from mergetta.models.resnet50 import ResNet50
from mergetta.streams.moments import batch_moments
from mergetta.streams.runs import RunFilter

TOLERANCES = (0.0, 1e-4, 1e-3, 1e-2, 1e-1)
EACH = 7
"""Experts of a domain."""


def kilobytes(content: bytes) -> str:
    return f"{len(content) / 1000:,.0f} kB"


def size() -> None:
    """Random weights and drawn images: the sizes are those of the shape, ranks those of 14 corruptions."""
    torch.manual_seed(0)
    runtime = TorchRuntime(ResNet50())
    rng = np.random.default_rng(0)
    smooth = rng.integers(0, 255, (24, 8, 8, 3)).repeat(12, axis=1).repeat(12, axis=2).astype(np.uint8)
    base, experts = runtime.groups, []
    for domain in tuple(CORRUPTIONS)[:14]:
        images = as_input(corrupt(smooth, domain, 5))
        moments = batch_moments(runtime(images, given=0.0, moments=True).moments)
        moved = {name: base[name] + 0.02 * rng.normal(size=base[name].size) for name in learnable(base)}
        experts.append(Expert(with_moments({**base, **moved}, moments, base), domain=domain))
    weights = [{name: expert.groups[name] for name in learnable(base)} for expert in experts]
    plain = {name: base[name] for name in learnable(base)}
    print(
        f"expert: {kilobytes(Expert(weights[0]).to_bytes())} without, {kilobytes(experts[0].to_bytes())} with moments"
    )
    print(f"bundle without moments: {kilobytes(build_bundle(plain, weights).to_bytes())}")
    for tolerance in TOLERANCES:
        bundle = build_bundle(base, experts, moment_tolerance=tolerance)
        ranks = [len(basis) for name, basis in bundle.basis.items() if name not in plain]
        print(f"leaving out {tolerance:g}: {kilobytes(bundle.to_bytes())}, mean rank {np.mean(ranks):.1f}")


def truncation() -> None:
    suite, store = load_suite("fashion-bn").restricted(samples=4000), Store(Path(default_cache()))
    experts = {domain: make_expert(suite, "roid", domain, 0, store) for domain in suite.domains}
    runtime = TorchRuntime(load_family("fashion-bn"))
    for tolerance in TOLERANCES:
        errors, sizes = {"merged moments only": [], "with the stream": []}, []
        for domain in suite.domains:
            pool = [expert for name, expert in experts.items() if name != domain]
            bundle = build_bundle(runtime.groups, pool, moment_tolerance=tolerance)
            sizes.append(len(bundle.to_bytes()))
            for how, found in errors.items():
                found.append(error(runtime, bundle, domain, how == "with the stream"))
        means = ", ".join(f"{how} {np.mean(found):.2f}" for how, found in errors.items())
        print(f"leaving out {tolerance:g}: {np.mean(sizes) / 1000:.0f} kB, {means}", flush=True)


def clean() -> None:
    """On clean images of which no target is made."""
    suite, store = load_suite("fashion-bn").restricted(samples=4000), Store(Path(default_cache()))
    runtime = TorchRuntime(load_family("fashion-bn"))
    pool = [make_expert(suite, "roid", domain, 0, store) for domain in suite.domains]
    bundle = build_bundle(runtime.groups, pool, family=runtime.family)
    stream = clean_images(place_of(suite), 4000).stream
    for order in ("mixed", "sorted"):
        for size in (200, 16, 1):
            adapter, runs, wrong = RaceMerge(runtime, bundle), RunFilter(10), []
            for images, labels in stream(0, size, order):
                logits = adapter.predict(images)
                found = runs(softmax(logits)), logits, runtime(images, given=1.0).logits
                wrong += [each.argmax(axis=1) != labels for each in found]
            ours, alone, source = (100 * float(np.concatenate(wrong[start::3]).mean()) for start in range(3))
            text = f"{ours:.2f}, without the filter of runs {alone:.2f}, source model {source:.2f}"
            print(f"{order}, batches of {size}: {text}", flush=True)


def members() -> None:
    """Seven experts of every domain, each from 1,000 images of its own; a target has those of the other 14."""
    suite = load_suite("fashion-bn")
    runtime = TorchRuntime(load_family("fashion-bn"))
    targets = {domain: target_of(suite, domain) for domain in suite.domains}
    experts = []
    for domain, target in targets.items():
        for seed in range(EACH):
            chosen = np.random.default_rng(seed).permutation(len(target.labels))[:1000]
            images = as_input(np.asarray(target.images)[chosen])
            experts.append(train_expert(runtime, np.split(images, 20), "roid", domain, seed, **suite.experts["roid"]))
        print(f"experts of {domain} are made", flush=True)
    errors: dict[int, list[float]] = {16: [], EACH * len(targets): []}
    for domain, target in targets.items():
        pool = [expert for expert in experts if expert.domain != domain]
        for most, found in errors.items():
            adapter = RaceMerge(runtime, build_bundle(runtime.groups, pool, members=most, family=runtime.family))
            wrong = [adapter.predict(images).argmax(axis=1) != labels for images, labels in target.stream(0, 64)]
            found.append(100 * float(np.mean(np.concatenate(wrong))))
        print(
            f"{domain}: " + ", ".join(f"at most {most} members {found[-1]:.1f}" for most, found in errors.items()),
            flush=True,
        )
    print("average: " + ", ".join(f"at most {most} members {np.mean(found):.2f}" for most, found in errors.items()))


def error(runtime: TorchRuntime, bundle: Bundle, domain: str, learn: bool) -> float:
    adapter = ZOMerge(runtime, bundle, normalise=Normaliser.of_bundle(runtime, bundle))
    wrong = [
        np.argmax(adapter.predict(images, adapt=False, learn=learn), axis=1) != labels
        for images, labels in target_of(load_suite("fashion-bn"), domain).stream(0, 16)
    ]
    return 100 * float(np.mean(np.concatenate(wrong)))


if __name__ == "__main__":
    {"size": size, "truncation": truncation, "clean": clean, "members": members}[sys.argv[1]]()
