"""What adaptation costs: time, forward passes and memory, relative to a plain export of the same model.

Time is that of the processor, and interleaved: each round runs every variant, so that a slow moment of the machine hits
all of them. `race-merge` is measured over the first 2,000 images of a domain, from knowing nothing to being settled:
each round is the next stretch of that stream. All others cost the same whenever they are asked, and see a few images.
Memory is the peak resident size of a fresh process per variant. The reference, `deployed`, is the model as anyone would
deploy it: a plain export in evaluation mode, nothing of ours, not even the normalisation of pixels (`deployed.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mergetta.adapters import METHODS, create_adapter, find_method
from mergetta.adapters.wrappers import wrapped
from mergetta.bench.deployed import BATCHES, deployed, of_process, stream
from mergetta.bundle import Bundle
from mergetta.expert import Expert
from mergetta.groups import GroupValues, has_batch_norm, paper_frozen
from mergetta.runtimes.base import Output, Runtime

REFERENCE = "onnx", "deployed"
VARIANTS = (
    REFERENCE,
    ("onnx", "inference"),
    ("onnx", "race-merge"),
    ("onnx", "resting"),
    ("onnx", "zo-merge"),
    ("onnx", "int8-inference"),
    ("torch", "inference"),
    ("torch", "tent"),
    ("torch", "roid"),
)
"""A runtime and a method by its name, or `inference` of the adjustable graph, or `resting`: race-merge once settled."""
DOMAIN = 2000
"""Images of a domain that `race-merge` is measured over: after as many it rests."""
FEW = 50
"""Images per round, at least, of all others: one alone is over in no time."""
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {"resting": ("race-merge", {"probe": False, "rest": FEW})}
LOOKED = 400
"""Images that `race-merge` has seen when its memory is measured: by then it has held images, tried candidates, looked
at moments and folded."""
Predict = Callable[[np.ndarray], Any]
Variant = tuple[Predict, Callable[[], int]]
"""Predict a batch; how many images have been forwarded so far."""


class Model(NamedTuple):
    """How a family is named, so that a process of its own finds it."""

    family: str
    checkpoint: str | None = None

    def load(self) -> Any:
        from mergetta.models.family import load_family

        return load_family(self.family, self.checkpoint)


def export_all(family: Any, folder: Path, batch: int) -> None:
    """The files that the measured processes need: adjustable, int8, and as one would deploy it."""
    import torch

    from mergetta.runtimes.export import quiet, to_onnx, to_plain_onnx, write_models
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    exact = to_onnx(family)
    write_models(folder / "model.onnx", exact, to_plain_onnx(family))
    images = some_images(family, batch)
    np.save(folder / "images.npy", images)
    some_bundle(OnnxRuntime(folder / "model.onnx")).save(folder / "bundle.safetensors")
    batch_norm = any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in family.model.modules())
    small = quantize_static(exact, [images]) if batch_norm else quantize_dynamic(exact)
    (folder / "int8.onnx").write_bytes(small.SerializeToString())
    with quiet():
        plain = torch.onnx.export(
            family.model.requires_grad_(False),
            (torch.from_numpy(some_images(family, 2)),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=["images"],
        )
    assert plain is not None
    (folder / "deployed.onnx").write_bytes(plain.model_proto.SerializeToString())


def some_images(family: Any, batch: int) -> np.ndarray:
    """Of bytes, as cameras give them."""
    size, channels = family.preprocessing.size, len(family.preprocessing.mean)
    pixels = np.random.default_rng(0).integers(256, size=(batch, channels, size, size), dtype=np.uint8)
    return np.asarray(pixels / np.float32(255))


def some_features(runtime: Runtime) -> np.ndarray:
    """Mean and variance of the classifier's input."""
    return np.stack([np.zeros(runtime.classifier.weight.shape[1]), np.ones(runtime.classifier.weight.shape[1])])


def some_experts(runtime: Runtime) -> list[Expert]:
    rng = np.random.default_rng(0)
    return [
        Expert(
            {n: v + 0.01 * np.abs(rng.normal(size=v.shape)) for n, v in runtime.groups.items()},
            runtime.family,
            signature=runtime.signature,
            features=some_features(runtime),
        )
        for _ in range(14)
    ]


def some_bundle(runtime: Runtime) -> Bundle:
    from mergetta.merging import build_bundle

    return build_bundle(runtime.groups, some_experts(runtime), frozen=paper_frozen(runtime.structure))


def adapting(runtime: Runtime, variant: str, bundle: Bundle | None = None) -> Predict:
    """A method by its name, with what it needs; `hybrid-3` back-propagates through three layers. Ours is as on a
    device: features are aligned where there is no BatchNorm, and predictions filtered where classes come in runs.
    """
    name, options = OPTIONS.get(variant, (variant, {}))
    if name.startswith("hybrid-"):
        name, options = "hybrid", {"layers": int(name.removeprefix("hybrid-"))}
    needs, given = find_method(name).needs, dict[str, Any]()
    if needs == "bundle":
        given["bundle"] = bundle or some_bundle(runtime)
    elif needs == "experts":
        given["experts"] = some_experts(runtime)
    elif needs == "source":
        given["source"] = some_features(runtime)
    if name == "race-merge" and not has_batch_norm(runtime.structure):
        given["source"] = some_features(runtime)
    return wrapped(
        create_adapter(name, runtime, **given, **options), runs=name == "race-merge", head=name == "race-merge"
    ).predict


def onnx_variant(variant: str, folder: Path, threads: int) -> Variant:
    """Imports no torch."""
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

    if variant == "deployed":
        predict, count = deployed(str(folder), threads), [0]

        def run(images: np.ndarray) -> Any:
            count[0] += len(images)
            return predict(images)

        return run, lambda: count[0]
    runtime = OnnxRuntime(folder / ("int8.onnx" if variant.startswith("int8") else "model.onnx"), threads=threads)
    kind = variant.removeprefix("int8-")
    if kind == "inference":
        return source_of(runtime), lambda: runtime.forwarded
    return adapting(Mixed(runtime), kind, Bundle.load(folder / "bundle.safetensors")), lambda: runtime.forwarded


class Mixed:
    """A runtime whose predictions are of all classes, as those of a mixed stream are: random pixels look all the same
    to a model, and a device goes by how mixed they look. An image's first pixel says which class is added to its logits
    and, where those are made of its features once more (`Aligner`), to these.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.features: np.ndarray | None = None
        if not has_batch_norm(runtime.structure):
            weight = runtime.classifier.weight
            self.features = 50 * weight / (weight * weight).sum(axis=1, keepdims=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def __call__(self, images: np.ndarray, *arguments: Any, **options: Any) -> Output:
        return self._turned(images, self.runtime(images, *arguments, **options))

    def folded(self, groups: GroupValues) -> Callable[[np.ndarray], Output]:
        predict = self.runtime.folded(groups)
        return lambda images: self._turned(images, predict(images))

    def _turned(self, images: np.ndarray, output: Output) -> Output:
        logits = output.logits
        for row, level in enumerate(images[:, 0, 0, 0].tolist()):
            chosen = round(255 * level) % logits.shape[1]
            logits[row, chosen] += 50
            if self.features is not None:
                output.features[row] += self.features[chosen]
        return output


def torch_variant(variant: str, model: Model, threads: int) -> Variant:
    import torch

    from mergetta.runtimes.prompted import PromptedRuntime
    from mergetta.runtimes.torch_runtime import TorchRuntime

    torch.set_num_threads(threads)
    prompts = variant in METHODS and METHODS[variant].prompts
    runtime = PromptedRuntime(model.load()) if prompts else TorchRuntime(model.load())
    return runtime if variant == "inference" else adapting(runtime, variant), lambda: runtime.forwarded


def source_of(runtime: Runtime) -> Predict:
    """The source model in the adjustable graph, with what it was trained with."""
    return lambda images: runtime(images, given=1.0)


def create(runtime: str, variant: str, model: Model, folder: Path, threads: int) -> Variant:
    if runtime == "onnx":
        return onnx_variant(variant, folder, threads)
    return torch_variant(variant, model, threads)


def peak_memory(runtime: str, variant: str, model: Model, folder: Path, threads: int) -> float:
    """Megabytes of a fresh process that runs this variant for three batches, or race-merge for as long as it takes."""
    import signal
    import subprocess

    command = ["-m", "mergetta.bench.cost", runtime, variant, model.family, model.checkpoint or ""]
    if (runtime, variant) == REFERENCE:
        command = ["-P", str(Path(__file__).with_name("deployed.py"))]
    result = subprocess.run([sys.executable, *command, str(folder), str(threads)], capture_output=True, text=True)
    if result.returncode == -signal.SIGKILL or "not enough memory" in result.stderr or "MemoryError" in result.stderr:
        raise MemoryError(f"measuring {runtime} {variant} of {model.family}: not enough memory")
    if result.returncode:
        raise RuntimeError(f"measuring {runtime} {variant} of {model.family} failed: {result.stderr}")
    return float(result.stdout.split()[-1])


def measure_model(
    model: Model, batch: int, rounds: int, threads: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row per runtime and variant."""
    import tempfile

    what = f"{model.family}, batch {batch}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress(f"{what}: export")
        export_all(model.load(), folder, batch)
        runs = {key: create(*key, model, folder, threads) for key in VARIANTS}
        images = np.load(folder / "images.npy")
        times, forwards = measure_times(runs, images, rounds, lambda n: progress(f"{what}: round {n} of {rounds}"))
        runs.clear()
        peaks = {}
        for key in VARIANTS:
            progress(f"{what}: memory of {' '.join(key)}")
            peaks[key] = peak_memory(*key, model, folder, threads)
    average = {key: np.mean if key[1] == "race-merge" else np.median for key in VARIANTS}
    ratios = {key: float(average[key](times[key] / times[REFERENCE])) for key in VARIANTS}
    return [
        {
            "model": model.family,
            "batch": batch,
            "runtime": key[0],
            "variant": key[1],
            "forwards": forwards[key],
            "milliseconds": 1e3 * float(average[key](times[key])),
            "time_ratio": ratios[key],
            "pass_ratio": ratios[key] / forwards[key],
            "memory_mb": peaks[key],
            "memory_ratio": peaks[key] / peaks[REFERENCE],
        }
        for key in VARIANTS
    ]


def measure_times(
    runs: dict[tuple[str, str], Variant], images: np.ndarray, rounds: int, progress: Callable[[int], None]
) -> tuple[dict[tuple[str, str], np.ndarray], dict[tuple[str, str], float]]:
    """Seconds of the processor per batch in every round, and forward passes per image, of every variant."""
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    passes: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    few, whole = -(-FEW // len(images)), -(-DOMAIN // (rounds * len(images)))
    for number in range(rounds + 1):  # the first warms up all but race-merge, whose beginning is a part of it
        progress(number)
        for key, (predict, counted) in runs.items():
            long = key[1] == "race-merge"
            if long and not number:
                continue
            batches = list(stream(images, number * (whole if long else few), whole if long else few))
            before, start = counted(), time.process_time()
            for batch in batches:
                predict(batch)
            times[key].append((time.process_time() - start) / len(batches))
            passes[key].append((counted() - before) / (len(images) * len(batches)))
    last = slice(-rounds, None)
    return {k: np.array(v[last]) for k, v in times.items()}, {k: float(np.mean(v[last])) for k, v in passes.items()}


COLUMNS = ("model", "batch", "runtime", "variant", "passes", "ms", "time ×", "per pass ×", "peak MB", "memory ×")


def cells(row: dict[str, Any]) -> list[str]:
    """One row as text, in the order of COLUMNS."""
    return [
        row["model"],
        str(row["batch"]),
        row["runtime"],
        row["variant"],
        f"{row['forwards']:.2f}",
        f"{row['milliseconds']:.2f}",
        f"{row['time_ratio']:.2f}",
        f"{row['pass_ratio']:.2f}",
        f"{row['memory_mb']:.0f}",
        f"{row['memory_ratio']:.2f}",
    ]


def cost_page(rows: Sequence[dict[str, Any]]) -> str:
    """Chart and table in one file."""
    from mergetta.bench.figures import cost_ratios
    from mergetta.bench.page import page, table

    return page(
        "mergetta · cost",
        "Processor time (median over interleaved rounds) and peak memory (fresh processes), relative to a plain export "
        "of the same model in ONNX Runtime.",
        f"<figure>{cost_ratios(rows)}</figure>{table(COLUMNS, map(cells, rows))}",
    )


def main() -> None:
    """In a fresh process: run one variant and print its peak resident memory in megabytes."""
    runtime, variant, family, checkpoint, folder, threads = sys.argv[1:]
    images = np.load(Path(folder) / "images.npy")
    if variant == "imports":
        __import__("torch" if runtime == "torch" else "mergetta.runtimes.onnx_runtime")
    else:
        predict, _ = create(runtime, variant, Model(family, checkpoint or None), Path(folder), int(threads))
        count = {"race-merge": -(-LOOKED // len(images)), "resting": -(-2 * FEW // len(images))}.get(variant, BATCHES)
        for batch in stream(images, 0, count):
            predict(batch)
    if runtime == "onnx" and {"torch", "scipy", "pandas", "fastapi"} & set(sys.modules):
        raise RuntimeError("the device process imported what a device does not have")
    print(of_process("VmHWM"))


if __name__ == "__main__":
    main()
