"""How methods are compared: reset per domain (unless the suite is continual), the target's own expert left out, one
pass, error as predicted online.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from mergetta.adapters import accepted_options, create_adapter, find_method
from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.adapters.backprop.eata import estimate_fisher
from mergetta.adapters.backprop.expert_training import Training
from mergetta.adapters.backprop.rmt import source_prototypes
from mergetta.adapters.base import Adapter
from mergetta.adapters.forward_only.cola import source_expert
from mergetta.adapters.forward_only.source_features import SourceFeatures, measure_source
from mergetta.arrays import Array, to_numpy
from mergetta.bench.store import Store, address, code_digest
from mergetta.bench.suite import BundleSettings, MethodSettings, Suite
from mergetta.bundle import Bundle
from mergetta.data.fashion_clean import load_fashion_clean
from mergetta.data.sources import Source, open_source
from mergetta.data.streams import Domain
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import Vector, has_batch_norm, last_blocks
from mergetta.losses.probabilities import softmax
from mergetta.merging import LOSS_OF, build_bundle
from mergetta.merging.recipes import merge_by_recipe
from mergetta.models.family import Family, load_family
from mergetta.runtimes.onnx_runtime import OnnxRuntime
from mergetta.runtimes.prompted import PromptedRuntime
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator
from mergetta.streams.moments import StreamMoments

PROTOCOL = 1
"""Raise it when this file measures something else: all results are then measured again."""
CODE = ("data.sources", "models", "runtimes.torch_runtime")
"""What every result depends on, beside its adapter."""
STATISTICS = 1000
"""Clean images that the source model's features and RMT's prototypes are measured on."""
FISHER = 2000
"""Clean images that EATA's Fisher information is measured on, as published."""
DEVICES = 4
"""Experts of one domain that a large pool may have, each made by a device of its own."""
CALIBRATION = 200
"""Clean images that the ranges of an int8 CNN are measured on."""
PORTION = 32
"""Images that an entry of `wrong` and `sizes` in a record counts at least: smaller batches are counted together."""


@dataclass(frozen=True)
class Cell:
    """One number of a table."""

    method: str
    expert: str | None
    """How the experts were made; None for a method that uses none."""
    domain: str
    seed: int
    before: tuple[str, ...] | None = None
    """In a continual run, the domains that the adapter has met when it comes to this one; None: it starts anew."""

    def visits(self) -> list[Cell]:
        """The cells that are measured one after the other with one adapter, down to this one."""
        if self.before is None:
            return [self]
        sequence = (*self.before, self.domain)
        return [dataclasses.replace(self, domain=d, before=sequence[:i]) for i, d in enumerate(sequence)]


@lru_cache(maxsize=4)
def load_once(family: str, checkpoint: Path | None) -> Family:
    return load_family(family, checkpoint)


@lru_cache(maxsize=4)
def with_signature(name: str, checkpoint: Path | None, kind: str, folder: Path | None) -> Family:
    """The family, with the signature of clean images if it comes without one: the source model's place in CoLA's
    pool. Without clean images the source model is not in the pool.
    """
    family = load_once(name, checkpoint)
    clean = clean_images(kind, folder, STATISTICS) if family.signature is None else None
    if clean is None:
        return family
    runtime, seen = TorchRuntime(family), []
    for images, labels in clean.stream(0, 100):
        seen.append((to_numpy(runtime(images, given=1.0).signature), len(labels)))
    moments = StreamMoments(seen[0][0].shape[1])
    for signature, count in seen:
        moments.add(signature, count)
    return dataclasses.replace(family, signature=moments.value().astype(np.float32))


def family_of(suite: Suite) -> Family:
    return with_signature(suite.family, suite.checkpoint, suite.data, suite.folder)


@lru_cache(maxsize=2)
def open_once(kind: str, folder: Path | None) -> Source:
    return open_source(kind, folder)


def source_of(suite: Suite) -> Source:
    return open_once(suite.data, suite.folder)


def clean_images(kind: str, folder: Path | None, count: int) -> Domain | None:
    """Clean images to measure something of the source on, if there are any: none that a target shows."""
    return load_fashion_clean(count) if kind.startswith("fashion") else open_once(kind, folder).clean(count)


@lru_cache(maxsize=2)
def load_domain(kind: str, folder: Path | None, domain: str, severity: int, start: int, count: int) -> Domain:
    return open_once(kind, folder).domain(domain, severity, start, count)


def target_of(suite: Suite, domain: str) -> Domain:
    """The stream on which methods are compared."""
    return load_domain(suite.data, suite.folder, domain, suite.severity, 0, suite.samples)


def training_of(suite: Suite, domain: str) -> Domain:
    """The images that a domain's expert is made from: the targets', or others if the suite says so."""
    if suite.expert_samples is None:
        return target_of(suite, domain)
    return load_domain(suite.data, suite.folder, domain, suite.severity, suite.samples, suite.expert_samples)


def data_facts(suite: Suite, domain: str, seed: int) -> dict[str, Any]:
    return {
        "family": family_of(suite).fingerprint,
        "data": source_of(suite).digest,
        "domain": domain,
        "severity": suite.severity,
        "samples": suite.samples,
        "seed": seed,
        "versions": [np.__version__, torch.__version__, cv2.__version__],
    }


def adapter_module(name: str) -> str:
    return f"adapters.{find_method(name).path.partition(':')[0]}"


def expert_key(suite: Suite, method: str, domain: str, seed: int) -> str:
    if method not in suite.experts:
        raise MergettaError(
            f"The suite {suite.name} has no experts by {method!r}; choose from {', '.join(suite.experts)}."
        )
    code = code_digest(*CODE, adapter_module(method), "adapters.backprop.expert_training")
    return address(
        {
            **data_facts(suite, domain, seed),
            "expert": method,
            "options": suite.experts[method],
            "expert_samples": suite.expert_samples,
            "batch_size": suite.training_batch_size,
            "code": code,
        }
    )


def make_expert(suite: Suite, method: str, domain: str, seed: int, store: Store) -> Expert:
    """The expert of a domain, from the store or freshly trained; on the way, the results of the method itself."""
    key = expert_key(suite, method, domain, seed)
    expert = store.expert(key)
    if expert is None:
        runtime = TorchRuntime(family_of(suite))
        training = Training(runtime, method, seed, **suite.experts[method])
        cell = same_run(suite, method, domain, seed)
        if cell:
            record = online(suite, cell, training.adapter, runtime, training.observe)
            store.put_result(cell_key(suite, cell), record)
        else:
            for images, _ in training_of(suite, domain).stream(seed, suite.training_batch_size):
                training.adapter.predict(images)
                training.observe(images)
        expert = training.expert(domain)
        store.put_expert(key, expert)
    return expert


def same_run(suite: Suite, expert: str, domain: str, seed: int) -> Cell | None:
    """The cell whose method does exactly what makes the expert: same images in the same stream, same options."""
    same_images = suite.first is None and suite.expert_samples is None
    same_stream = suite.order == "mixed" and suite.batch_size == suite.training_batch_size
    if same_images and same_stream:
        for name, settings in suite.methods.items():
            if (settings.adapter, settings.options, settings.mirror) == (expert, suite.experts[expert], None):
                return Cell(name, None, domain, seed)
    return None


def members(suite: Suite, cell: Cell) -> list[tuple[str, int]]:
    """The experts that a cell may use, by the domain and the seed that they are made with: all but those of the
    target's fold, which by default is the target alone.

    They are the same for all visits of a continual run.
    """
    first = cell.visits()[0].domain
    others = [domain for domain in suite.domains if domain not in suite.fold_of(first)]
    if not others:
        raise MergettaError(
            f"{cell.method} needs experts, and in one fold there are no other domains to make them from: choose more "
            "folds, or methods without experts."
        )
    wanted = suite.methods[cell.method].pool
    if wanted is None:
        return [(domain, cell.seed) for domain in others]
    order = generator(cell.seed, 0, f"pool/{first}").permutation(len(others))
    round_, own = divmod(cell.seed, DEVICES)
    seeds = [DEVICES * round_ + (own + device) % DEVICES for device in range(DEVICES)]
    found = [(others[index], seed) for seed in seeds for index in order]
    if wanted > len(found):
        raise MergettaError(f"The suite {suite.name} has {len(found)} experts for {cell.domain}, not {wanted}.")
    return found[:wanted]


def pool(suite: Suite, cell: Cell, store: Store) -> list[Expert]:
    assert cell.expert is not None
    return [make_expert(suite, cell.expert, domain, seed, store) for domain, seed in members(suite, cell)]


def cell_key(suite: Suite, cell: Cell) -> str:
    settings = suite.methods[cell.method]
    method = find_method(settings.adapter)
    code = [*CODE, adapter_module(settings.adapter)]
    if settings.bundle is not None:
        code.append("merging.recipes" if settings.bundle.recipe else "merging.build")
    if method.prompts:
        code.append("runtimes.prompted")
    if settings.runtime:
        code += ["runtimes.onnx_runtime", "runtimes.export", "runtimes.quantize"]
    facts: dict[str, Any] = {
        **data_facts(suite, cell.domain, cell.seed),
        "batch_size": suite.batch_size,
        "order": suite.order,
        "before": cell.before,
        "method": settings.model_dump(exclude_none=True),
        "protocol": PROTOCOL,
        "code": code_digest(*code),
    }
    if method.needs == "experts":
        signature = family_of(suite).signature
        facts["signature"] = None if signature is None else signature.tolist()
    if method.measured or settings.runtime == "int8":
        facts["clean"] = clean_images(suite.data, suite.folder, 1) is not None and suite.training_batch_size
    if suite.first:
        facts["first"] = suite.first
    if cell.expert:
        facts["experts"] = [expert_key(suite, cell.expert, domain, seed) for domain, seed in members(suite, cell)]
    return address(facts)


@lru_cache(maxsize=4)
def device_model(family: str, checkpoint: Path | None, kind: str, folder: Path | None, int8: bool) -> bytes:
    """The family as a device runs it. CNNs are calibrated for int8 on clean images, transformers need none."""
    from mergetta.runtimes.export import to_onnx
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    loaded = with_signature(family, checkpoint, kind, folder)
    model = to_onnx(loaded)
    if int8 and has_batch_norm(TorchRuntime(loaded).structure):
        clean = clean_images(kind, folder, CALIBRATION)
        if clean is None:
            raise MergettaError("int8 needs clean images to calibrate on, and these data have none.")
        model = quantize_static(model, [images for images, _ in clean.stream(0, 50)])
    elif int8:
        model = quantize_dynamic(model)
    return model.SerializeToString()


def runtime_of(suite: Suite, settings: MethodSettings, seed: int) -> TorchRuntime | OnnxRuntime:
    if find_method(settings.adapter).prompts:
        return PromptedRuntime(family_of(suite), seed=seed)
    if settings.runtime is None:
        return TorchRuntime(family_of(suite))
    model = device_model(suite.family, suite.checkpoint, suite.data, suite.folder, settings.runtime == "int8")
    return OnnxRuntime(model, threads=1)


@lru_cache(maxsize=4)
def measured(
    what: str, family: str, checkpoint: Path | None, kind: str, folder: Path | None, batch_size: int, device: str | None
) -> SourceFeatures | dict[str, Vector] | np.ndarray | None:
    """What a method may know of the source, measured on clean images if there are any, and on the model of the `device`
    (onnx, int8) if it runs there.
    """
    clean = clean_images(kind, folder, FISHER if what == "fisher" else STATISTICS)
    if clean is None:
        return None
    batches = clean.stream(0, batch_size)
    if device:
        model = OnnxRuntime(device_model(family, checkpoint, kind, folder, device == "int8"), threads=1)
        return measure_source(model, (images for images, _ in batches))
    runtime = TorchRuntime(with_signature(family, checkpoint, kind, folder))
    if what == "prototypes":
        every = len(np.unique(clean.labels)) == len(runtime.classifier.bias)
        return source_prototypes(runtime, batches) if every else None
    images = (images for images, _ in batches)
    return estimate_fisher(runtime, images) if what == "fisher" else measure_source(runtime, images)


def build(runtime: TorchRuntime | OnnxRuntime, settings: BundleSettings, experts: list[Expert], seed: int) -> Bundle:
    frozen = last_blocks(runtime.structure, settings.frozen_blocks)
    if settings.recipe:
        return merge_by_recipe(
            runtime.groups, experts, settings.recipe, frozen=frozen, family=runtime.family, seed=seed
        )
    arguments = settings.model_dump(exclude={"frozen_blocks", "recipe"})
    return build_bundle(runtime.groups, experts, frozen=frozen, family=runtime.family, **arguments)


def create(suite: Suite, cell: Cell, runtime: TorchRuntime | OnnxRuntime, store: Store) -> Adapter:
    """The adapter of a cell, with its experts or its bundle."""
    settings: MethodSettings = suite.methods[cell.method]
    method = find_method(settings.adapter)
    needs = method.needs
    options: dict[str, Any] = dict(settings.options)
    accepted = accepted_options(method.load())
    if "seed" in accepted:
        options = {"seed": cell.seed, **options}
    if needs == "bundle" and "loss" in accepted:
        options = {"loss": LOSS_OF[str(cell.expert)], **options}
    if method.measured:
        place = suite.family, suite.checkpoint, suite.data, suite.folder
        value = measured(method.measured, *place, suite.training_batch_size, settings.runtime)
        if value is not None:
            options[method.measured] = value
        elif needs == method.measured:
            raise MergettaError(f"{suite.name} has no clean images, which {settings.adapter} needs.")
    if needs == "experts":
        known = [] if runtime.signature is None else [source_expert(runtime)]
        options["experts"] = [*known, *pool(suite, cell, store)]
    elif settings.bundle is not None:
        options["bundle"] = build(runtime, settings.bundle, pool(suite, cell, store), cell.seed)
    return create_adapter(settings.adapter, runtime, **options)


def stored(suite: Suite, cell: Cell, store: Store) -> dict[str, Any] | None:
    """The record of a cell, if it has been measured before."""
    record = store.result(cell_key(suite, cell))
    return None if record is None else {**record, "suite": suite.name, "method": cell.method}


def run_cell(suite: Suite, cell: Cell, store: Store) -> dict[str, Any]:
    """The record of a cell, from the store or freshly measured, with those of the visits before it."""
    found = stored(suite, cell, store)
    if found is not None:
        return found
    runtime = runtime_of(suite, suite.methods[cell.method], cell.seed)
    adapter = create(suite, cell, runtime, store)
    for visit in cell.visits():
        record = online(suite, visit, adapter, runtime)
        store.put_result(cell_key(suite, visit), record)
    return record


def with_mirrored(logits: Array, images: Array, adapter: Adapter, runtime: TorchRuntime | OnnxRuntime) -> np.ndarray:
    """Mean probabilities of a batch and its mirror image.

    Back-propagation learns from the former only, and sees the latter after that step.
    """
    mirrored = np.ascontiguousarray(images[:, :, :, ::-1])
    if isinstance(adapter, BackpropAdapter):
        second = adapter.returned(torch.from_numpy(runtime(mirrored, adapter.groups).logits)).numpy()
    else:
        second = adapter.predict(mirrored)
    return np.asarray(np.log(softmax(logits) / 2 + softmax(second) / 2 + 1e-12))


def online(
    suite: Suite,
    cell: Cell,
    adapter: Adapter,
    runtime: TorchRuntime | OnnxRuntime,
    after: Callable[[Array], None] = lambda images: None,
) -> dict[str, Any]:
    """The record of one pass over the target: each batch predicted as it comes. `after` sees each batch, untimed."""
    wrong: list[int] = []
    sizes: list[int] = []
    seconds = 0.0
    runtime.forwarded = 0
    skipped = getattr(adapter, "skipped", 0)
    for images, labels in target_of(suite, cell.domain).stream(cell.seed, suite.batch_size, suite.order):
        start = time.perf_counter()
        logits = adapter.predict(images)
        if suite.methods[cell.method].mirror:
            logits = with_mirrored(logits, images, adapter, runtime)
        seconds += time.perf_counter() - start
        after(images)
        wrong.append(int(np.count_nonzero(np.argmax(logits, axis=1) != labels)))
        sizes.append(len(labels))
        if suite.first and sum(sizes) >= suite.first:
            break
    samples = sum(sizes)
    wrong, sizes = in_portions(wrong, sizes)
    record: dict[str, Any] = {
        "expert": cell.expert,
        "domain": cell.domain,
        "seed": cell.seed,
        "error": 100 * sum(wrong) / samples,
        "samples": samples,
        "seconds": seconds,
        "family": runtime.family,
        "severity": suite.severity,
        "data": source_of(suite).description,
        "batch_size": suite.batch_size,
        "order": suite.order,
        "visit": None if cell.before is None else len(cell.before) + 1,
        "forwards": runtime.forwarded / samples,
        "backprop": find_method(suite.methods[cell.method].adapter).backprop,
        "wrong": wrong,
        "sizes": sizes,
        "skipped": getattr(adapter, "skipped", 0) - skipped,
        "settings": suite.methods[cell.method].model_dump(),
        "suite": suite.name,
        "method": cell.method,
    }
    bundle = getattr(adapter, "bundle", None)
    if isinstance(bundle, Bundle):
        record["dimension"] = bundle.dimension
        record["ranks"] = {name: len(w) if name in bundle.moving else 0 for name, w in bundle.coefficients.items()}
    return record


def in_portions(wrong: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Errors and images per batch, consecutive batches counted together until they have `PORTION` images: a record of
    single images is not longer than one of batches. The last portion may be smaller.

    >>> in_portions([1, 0, 1, 1], [16, 16, 16, 16])
    ([1, 2], [32, 32])
    """
    portions: list[tuple[int, int]] = []
    for errors, images in zip(wrong, sizes, strict=True):
        if portions and portions[-1][1] < PORTION:
            portions[-1] = portions[-1][0] + errors, portions[-1][1] + images
        else:
            portions.append((errors, images))
    return [errors for errors, _ in portions], [images for _, images in portions]
