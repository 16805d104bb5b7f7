"""The measurements behind docs/guide/device.md, on the ONNX runtime.

python scripts/device_results.py governed [SUITE [BATCH]]   # a stream that changes domain six times; about 5 minutes
python scripts/device_results.py int8                       # int8 ViT, adapted or not, 15 corruptions; about 10 minutes
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from mergetta import Expert, OnnxRuntime, ZOMerge, build_bundle, load_family
from mergetta.adapters.wrappers.governed import Governed
from mergetta.bench.inputs import target_of
from mergetta.bench.pools import make_expert
from mergetta.bench.store import Store, default_cache
from mergetta.bench.suite import Suite, load_suite
from mergetta.bundle import Bundle
from mergetta.groups import last_blocks
from mergetta.runtimes.export import to_onnx
from mergetta.runtimes.quantize import quantize_dynamic

SIX = ("fog", "gaussian_noise", "contrast", "motion_blur", "snow", "pixelate")


def experts_of(suite: Suite, seed: int) -> dict[str, Expert]:
    store = Store(Path(default_cache()))
    return {domain: make_expert(suite, "roid", domain, seed, store) for domain in suite.domains}


def bundle_of(suite: Suite, runtime: OnnxRuntime, experts: list[Expert]) -> Bundle:
    settings = suite.methods["zo-merge-tuned"].bundle
    assert settings is not None
    frozen = last_blocks(runtime.structure, settings.frozen_blocks)
    return build_bundle(runtime.groups, experts, frozen=frozen, **settings.model_dump(exclude={"frozen_blocks"}))


def governed(name: str = "fashion-bn", batch_size: str = "64") -> None:
    suite = load_suite(name).restricted(samples=2000)
    runtime = OnnxRuntime(to_onnx(load_family(name)).SerializeToString(), threads=1)
    for seed in range(3):
        experts = experts_of(suite, seed)
        bundle = bundle_of(suite, runtime, [e for domain, e in experts.items() if domain not in SIX])
        for sides, modes in ((2, ("merge", "always", "governed")), (1, ("governed",))):
            for mode in modes:
                adapter = ZOMerge(runtime, bundle, "roid", lr=5e-3, delta=0.1, sides=sides, seed=seed)
                device = Governed(adapter)
                runtime.forwarded = wrong = images = 0
                woken: list[str] = []
                for domain in SIX:
                    stream = list(target_of(load_suite(name), domain).stream(seed, int(batch_size)))[:60]
                    for number, (batch, labels) in enumerate(stream):
                        before = device.shifts
                        if mode == "governed":
                            logits = device.predict(batch)
                        else:
                            logits = adapter.predict(batch, adapt=mode == "always")
                        if device.shifts > before:
                            woken.append(f"{domain}+{number}")
                        wrong += int(np.count_nonzero(np.argmax(logits, axis=1) != labels))
                        images += len(labels)
                print(
                    f"seed {seed}, {sides}-sided, {mode}: error {100 * wrong / images:.2f} %, "
                    f"{runtime.forwarded / images:.2f} passes, woken at {woken}, {device.fallbacks} fallbacks",
                    flush=True,
                )


def int8() -> None:
    suite = load_suite("fashion-vit").restricted(samples=2000)
    model = quantize_dynamic(to_onnx(load_family("fashion-vit"))).SerializeToString()
    runtime = OnnxRuntime(model, threads=1)
    experts = experts_of(suite, 0)
    errors: dict[str, list[float]] = {}
    for domain in suite.domains:
        bundle = bundle_of(suite, runtime, [e for name, e in experts.items() if name != domain])
        for mode, lr in (("int8, not adapted", None), ("int8, merge", 0.0), ("int8, zo-merge δ 0.1", 5e-3)):
            adapter = ZOMerge(runtime, bundle, "roid", lr=lr or 0.0, delta=0.1)
            wrong = images = 0
            for batch, labels in target_of(suite, domain).stream(0, 64):
                logits = runtime(batch).logits if lr is None else adapter.predict(batch, adapt=lr > 0)
                wrong += int(np.count_nonzero(np.argmax(logits, axis=1) != labels))
                images += len(labels)
            errors.setdefault(mode, []).append(100 * wrong / images)
        print(domain, {mode: round(values[-1], 1) for mode, values in errors.items()}, flush=True)
    print("average", {mode: round(float(np.mean(values)), 2) for mode, values in errors.items()})


if __name__ == "__main__":
    {"governed": governed, "int8": int8}[sys.argv[1]](*sys.argv[2:])
