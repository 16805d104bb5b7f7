"""How methods are compared: reset per domain (unless the suite is continual), the target's own expert left out, one
pass, error as predicted online.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from mergetta.adapters import accepted_options, create_adapter, find_method
from mergetta.adapters.backprop.eata import estimate_fisher
from mergetta.adapters.backprop.rmt import source_prototypes
from mergetta.adapters.base import Adapter
from mergetta.adapters.forward_only.cola import source_expert
from mergetta.adapters.forward_only.source_features import SourceFeatures, measure_source
from mergetta.adapters.wrappers import wrapped
from mergetta.bench.cells import Cell
from mergetta.bench.inputs import STATISTICS, Place, clean_images, family_of, place_of, with_signature
from mergetta.bench.keys import cell_key
from mergetta.bench.online import online
from mergetta.bench.pools import pool
from mergetta.bench.store import Store
from mergetta.bench.suite import BundleSettings, MethodSettings, Suite
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import Vector, has_batch_norm, last_blocks
from mergetta.merging import LOSS_OF, build_bundle
from mergetta.merging.recipes import merge_by_recipe
from mergetta.runtimes.onnx_runtime import OnnxRuntime
from mergetta.runtimes.prompted import PromptedRuntime
from mergetta.runtimes.torch_runtime import TorchRuntime

FISHER = 2000
"""Clean images that EATA's Fisher information is measured on, as published."""
CALIBRATION = 200
"""Clean images that the ranges of an int8 CNN are measured on."""


@lru_cache(maxsize=4)
def device_model(place: Place, int8: bool) -> bytes:
    """The family as a device runs it. CNNs are calibrated for int8 on clean images, transformers need none."""
    from mergetta.runtimes.export import to_onnx
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    loaded = with_signature(place)
    model = to_onnx(loaded)
    if int8 and has_batch_norm(TorchRuntime(loaded).structure):
        clean = clean_images(place, CALIBRATION)
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
    model = device_model(place_of(suite), settings.runtime == "int8")
    return OnnxRuntime(model, threads=1)


@lru_cache(maxsize=4)
def measured(
    what: str, place: Place, batch_size: int, device: str | None
) -> SourceFeatures | dict[str, Vector] | np.ndarray | None:
    """What a method may know of the source, measured on clean images if there are any, and on the model of the `device`
    (onnx, int8) if it runs there.
    """
    clean = clean_images(place, FISHER if what == "fisher" else STATISTICS)
    if clean is None:
        return None
    batches = clean.stream(0, batch_size)
    if device:
        model = OnnxRuntime(device_model(place, device == "int8"), threads=1)
        return measure_source(model, (images for images, _ in batches))
    runtime = TorchRuntime(with_signature(place))
    if what == "prototypes":
        every = len(np.unique(clean.labels)) == runtime.classes
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
        value = measured(method.measured, place_of(suite), suite.training_batch_size, settings.runtime)
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
    settings = suite.methods[cell.method]
    runtime = runtime_of(suite, settings, cell.seed)
    adapter = create(suite, cell, runtime, store)
    whole = wrapped(adapter, settings.mirror, settings.runs, settings.head)
    for visit in cell.visits():
        record = online(suite, visit, adapter, runtime, wrapped=whole)
        store.put_result(cell_key(suite, visit), record)
    return record
