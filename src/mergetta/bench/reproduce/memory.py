"""Figure 4: peak memory of plain inference, CoLA, the paper's method and back-propagation, each in a fresh process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from matplotlib.axes import Axes

from mergetta.bench.cost import Model, peak_memory, some_bundle, some_images
from mergetta.bench.figures import bars, drawing
from mergetta.bench.inputs import family_of
from mergetta.bench.reproduce.setting import Records, Setting
from mergetta.bench.runner import Part
from mergetta.bench.sheets import Drawing, Row, Sheet
from mergetta.bench.store import Store, address, code_digest
from mergetta.bench.tables import Number, number
from mergetta.runtimes.export import to_onnx
from mergetta.runtimes.onnx_runtime import OnnxRuntime

TITLE = "Memory (Figure 4 of the paper)"
VARIANTS = {
    ("onnx", "imports"): "imports alone",
    ("onnx", "inference"): "inference",
    ("onnx", "cola"): "CoLA",
    ("onnx", "zo-merge"): "zo-merge",
    ("torch", "imports"): "imports alone",
    ("torch", "inference"): "inference",
    ("torch", "cola"): "CoLA",
    ("torch", "zo-merge"): "zo-merge",
    ("torch", "deyo"): "DeYO (back-propagation)",
    ("torch", "roid"): "ROID (back-propagation)",
}
NOTES = (
    "Peak resident memory of a fresh process that predicts three batches on one thread; one process per seed. zo-merge "
    "has ROID's loss, which looks at a second view of part of the batch.",
    "The paper's Figure 4 measures a GPU and gives no numbers in its text, so there are none to put beside these.",
)


def parts(setting: Setting) -> dict[str, Part]:
    """None: these are not errors."""
    return {}


def outcome(setting: Setting, records: Records, store: Store) -> tuple[list[Sheet], list[Drawing]]:
    peaks = {key: number(values) for key, values in measure(setting, store).items()}
    rows = []
    for (runtime, variant), name in VARIANTS.items():
        mine, plain, floor = (peaks[runtime, v].mean for v in (variant, "inference", "imports"))
        above = "" if variant == "imports" else f"{(mine - floor) / (plain - floor):.2f}"
        rows.append(Row(f"{runtime}: {name}", (megabytes(peaks[runtime, variant]), f"{mine / plain:.2f}", above)))
    columns = ("process", "peak, MB", "÷ inference", "÷ inference, beyond imports")
    caption = f"{setting.suite.family}, batch {setting.suite.batch_size}; both ratios within the same runtime."

    def plot(axes: Axes) -> None:
        named = {f"{key[0]}: {name}": peaks[key] for key, name in VARIANTS.items()}
        colours = ["#3182bd" if runtime == "onnx" else "#999999" for runtime, _ in VARIANTS]
        bars(axes, named, "peak resident memory, MB", colours)

    return [Sheet(caption, columns, tuple(rows))], [drawing("Peak memory of a fresh process.", (8, 3.6), plot)]


def megabytes(value: Number) -> str:
    return f"{value.mean:.0f}" if value.spread is None else f"{value.mean:.0f} ± {value.spread:.0f}"


def measure(setting: Setting, store: Store) -> dict[tuple[str, str], list[float]]:
    """Megabytes per variant and seed, from the store or measured now."""
    family, batch = family_of(setting.suite), setting.suite.batch_size
    facts = {
        "memory": family.fingerprint,
        "batch": batch,
        "versions": [torch.__version__, onnxruntime.__version__, np.__version__],
        "code": code_digest("bench.cost"),
    }
    keys = {
        (key, seed): address({**facts, "variant": list(key), "seed": seed})
        for key in VARIANTS
        for seed in setting.seeds
    }
    missing = {which: key for which, key in keys.items() if store.result(key) is None}
    if missing:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            family.save(folder / "family.safetensors")
            (folder / "model.onnx").write_bytes(to_onnx(family).SerializeToString())
            some_bundle(OnnxRuntime(folder / "model.onnx")).save(folder / "bundle.safetensors")
            np.save(folder / "images.npy", some_images(family, batch))
            for ((runtime, variant), _), key in missing.items():
                peak = peak_memory(runtime, variant, Model(str(folder / "family.safetensors")), folder, 1)
                store.put_result(key, {"megabytes": peak})
    found: dict[tuple[str, str], list[float]] = {}
    for (which, _), key in keys.items():
        found.setdefault(which, []).append((store.result(key) or {})["megabytes"])
    return found
