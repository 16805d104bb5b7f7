"""What adaptation costs: time, forward passes and memory of every variant, as ratios to plain inference in one run.

Times are interleaved: each round runs every variant once, so that a slow moment of the machine hits all of them. Memory
is the peak resident size of a fresh process per variant, and beside it what the C allocator holds at the end (ONNX
Runtime's arena lives there and is not given back between batches). Two references: the same graph without adaptation,
and the model as anyone would deploy it (`deployed`: a plain export in evaluation mode, nothing of ours, not even the
normalisation of pixels). `folded` is what a device runs once it has settled, `settled` the governor on the adjustable
graph.
"""

from __future__ import annotations

import ctypes
import html
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mergetta.adapters import METHODS, create_adapter, find_method
from mergetta.adapters.forward_only.zo_merge import ZOMerge
from mergetta.bundle import Bundle
from mergetta.expert import Expert
from mergetta.groups import paper_frozen
from mergetta.merging import build_bundle
from mergetta.runtimes.base import Runtime

ONNX = (
    "deployed",
    "inference",
    "adapting",
    "two-forward",
    "settled",
    "folded",
    "race-merge",
    "int8-inference",
    "int8-adapting",
)
TORCH = ("inference", "adapting", "tent", "deyo", "roid")
MODELS: dict[str, dict[str, Any]] = {
    "fashion-bn": {"batches": (64, 1, 200)},
    "fashion-vit": {"batches": (64, 1, 200)},
    "resnet-50": {"batches": (8,), "rounds": 4, "architecture": "resnet-50", "options": {}},
    "vit-b-16": {
        "batches": (8,),
        "rounds": 4,
        "architecture": "small-vit",
        "options": {"channels": 3, "classes": 1000, "size": 224, "patch": 16, "width": 768, "depth": 12, "heads": 12}
        | {"ratio": 4},
    },
}
SINGLE = 50
"""Frames per round where a batch is one: a camera shows one after the other, and one alone is over in no time."""
Predict = Callable[[np.ndarray], Any]
Variant = tuple[Predict, Callable[[], int]]
"""Predict a batch; how many images have been forwarded so far."""


def family_of(model: str) -> Any:
    """A family by name or file, or a large shape with random weights: cost does not depend on the values."""
    from mergetta.models.family import ARCHITECTURES, Family, Preprocessing, load_family

    shape = MODELS.get(model, {})
    if "architecture" not in shape:
        return load_family(model)
    network = ARCHITECTURES[shape["architecture"]](**shape["options"]).eval()
    classes = tuple(map(str, range(1000)))
    preprocessing = Preprocessing((0.5,) * 3, (0.5,) * 3, 224)
    return Family(model, network, preprocessing, classes, shape["architecture"], shape["options"])


def export_all(model: str, folder: Path, batch: int) -> None:
    """The files that the measured processes need: adjustable, int8, and as one would deploy it."""
    import torch

    from mergetta.runtimes.export import quiet, to_onnx, to_plain_onnx, write_models
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    family = family_of(model)
    exact = to_onnx(family)
    write_models(folder / "model.onnx", exact, to_plain_onnx(family))
    images = some_images(family, batch)
    np.save(folder / "images.npy", images)
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
    size, channels = family.preprocessing.size, len(family.preprocessing.mean)
    return np.random.default_rng(0).random((batch, channels, size, size)).astype(np.float32)


def some_experts(runtime: Runtime) -> list[Expert]:
    rng = np.random.default_rng(0)
    return [
        Expert(
            {n: v + 0.01 * np.abs(rng.normal(size=v.shape)) for n, v in runtime.groups.items()},
            runtime.family,
            signature=runtime.signature,
        )
        for _ in range(14)
    ]


def some_bundle(runtime: Runtime) -> Bundle:
    return build_bundle(runtime.groups, some_experts(runtime), frozen=paper_frozen(runtime.structure))


def adapting(runtime: Runtime, variant: str) -> Predict:
    """A method by its name, with what it needs; or the paper's with the loss named (`adapting-roid`; else entropy)."""
    name, _, detail = variant.partition("-") if variant.startswith(("adapting", "hybrid")) else (variant, "", "")
    if name == "adapting":
        return ZOMerge(runtime, some_bundle(runtime), loss=detail or "entropy", keep_history=10).predict
    needs = find_method(name).needs
    options: dict[str, Any] = {"layers": int(detail)} if name == "hybrid" and detail else {}
    if needs == "bundle":
        options["bundle"] = some_bundle(runtime)
    elif needs == "experts":
        options["experts"] = some_experts(runtime)
    elif needs == "source":
        width = runtime.classifier.weight.shape[1]
        options["source"] = np.zeros(width), np.ones(width)
    return create_adapter(name, runtime, **options).predict


def onnx_variant(variant: str, folder: Path, threads: int) -> Variant:
    """Imports no torch."""
    from mergetta.adapters.wrappers.governed import Governed
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.runtimes.onnx_session import open_session

    if variant == "deployed":
        session = open_session(folder / "deployed.onnx", "deployed.onnx", threads, ["CPUExecutionProvider"])
        count = [0]

        def run(images: np.ndarray) -> Any:
            count[0] += len(images)
            return session.run(None, {"images": images})

        return run, lambda: count[0]
    runtime = OnnxRuntime(folder / ("int8.onnx" if variant.startswith("int8") else "model.onnx"), threads=threads)
    kind = variant.removeprefix("int8-")
    if kind == "inference":
        return runtime, lambda: runtime.forwarded
    if kind.startswith("adapting") or kind in METHODS:
        return adapting(runtime, kind), lambda: runtime.forwarded
    if kind == "folded":
        return runtime.folded(some_bundle(runtime).merge()), lambda: runtime.forwarded
    sides = 1 if kind == "two-forward" else 2
    adapter = ZOMerge(runtime, some_bundle(runtime), loss="entropy", sides=sides, keep_history=10)
    if kind == "settled":
        governed = Governed(adapter)
        governed.settled = True
        return governed.predict, lambda: runtime.forwarded
    return adapter.predict, lambda: runtime.forwarded


def torch_variant(variant: str, model: str, threads: int) -> Variant:
    import torch

    from mergetta.runtimes.prompted import PromptedRuntime
    from mergetta.runtimes.torch_runtime import TorchRuntime

    torch.set_num_threads(threads)
    prompts = variant in METHODS and METHODS[variant].prompts
    runtime = PromptedRuntime(family_of(model)) if prompts else TorchRuntime(family_of(model))
    if variant == "inference":
        return runtime, lambda: runtime.forwarded
    return adapting(runtime, variant), lambda: runtime.forwarded


def create(runtime: str, variant: str, model: str, folder: Path, threads: int) -> Variant:
    if runtime == "onnx":
        return onnx_variant(variant, folder, threads)
    return torch_variant(variant, model, threads)


MALLINFO = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class Memory(NamedTuple):
    """Megabytes of a process."""

    peak: float
    """Resident, at most."""
    heap: float
    """Held by the C allocator at the end, in its arenas and in mapped blocks."""


def peak_memory(runtime: str, variant: str, model: str, folder: Path, threads: int) -> Memory:
    """Of a fresh process that runs this variant for three batches."""
    command = [sys.executable, "-m", "mergetta.bench.cost", runtime, variant, model, str(folder), str(threads)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode == -signal.SIGKILL or "not enough memory" in result.stderr or "MemoryError" in result.stderr:
        raise MemoryError(f"measuring {runtime} {variant} of {model}: not enough memory")
    if result.returncode:
        raise RuntimeError(f"measuring {runtime} {variant} of {model} failed: {result.stderr}")
    peak, heap = result.stdout.split()[-2:]
    return Memory(float(peak), float(heap))


def of_process(field: str, process: int | str = "self") -> float:
    """`VmRSS` (now) or `VmHWM` (at most so far), in megabytes."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def allocated() -> float:
    """What glibc's allocator has from the system, in megabytes; 0 with another C library."""

    class Information(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in MALLINFO]

    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0.0
    ask.restype = Information
    found = ask()
    return float(found.arena + found.hblkhd) / 2**20


def measure_model(
    model: str, batch: int, rounds: int, threads: int, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """One row per runtime and variant."""
    variants = [("onnx", variant) for variant in ONNX] + [("torch", variant) for variant in TORCH]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        progress(f"{model}, batch {batch}: export")
        export_all(model, folder, batch)
        images = np.load(folder / "images.npy")
        runs = {key: create(*key, model, folder, threads) for key in variants}
        times: dict[tuple[str, str], list[float]] = {key: [] for key in variants}
        forwards: dict[tuple[str, str], float] = {}
        repeats = SINGLE if batch == 1 else 1
        for number in range(rounds + 1):  # the first warms up
            progress(f"{model}, batch {batch}: round {number} of {rounds}")
            for key, (predict, counted) in runs.items():
                before, start = counted(), time.perf_counter()
                for _ in range(repeats):
                    predict(images)
                seconds = time.perf_counter() - start
                if number:
                    times[key].append(seconds)
                    forwards[key] = (counted() - before) / (len(images) * repeats)
        runs.clear()
        peaks = {}
        for key in variants:
            progress(f"{model}, batch {batch}: memory of {' '.join(key)}")
            peaks[key] = peak_memory(*key, model, folder, threads)

    def row(key: tuple[str, str]) -> dict[str, Any]:
        runtime, variant = key
        mine, same, deployed = (np.array(times[k]) for k in (key, (runtime, "inference"), ("onnx", "deployed")))
        return {
            "runtime": runtime,
            "model": model,
            "batch": batch,
            "variant": variant,
            "seconds_ratio": float(np.median(mine / same)),
            "deployed_ratio": float(np.median(mine / deployed)),
            "memory_ratio": peaks[key].peak / peaks[runtime, "inference"].peak,
            "memory_mb": peaks[key].peak,
            "heap_mb": peaks[key].heap,
            "forwards": forwards[key],
        }

    return [row(key) for key in variants]


def run_cost(
    models: Sequence[str], quick: bool, threads: int, progress: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Row by row, so that an interrupted run has something to show."""
    for model in models:
        for batch in MODELS[model]["batches"][: 1 if quick else None]:
            rounds = MODELS[model].get("rounds", 6 if quick else 15)
            yield from measure_model(model, batch, rounds, threads, progress)


COLUMNS = (
    "runtime",
    "model",
    "batch",
    "variant",
    "time ×",
    "time × deployed",
    "memory ×",
    "peak MB",
    "heap MB",
    "forwards",
)


def cells(row: dict[str, Any]) -> list[str]:
    """One row as text, in the order of COLUMNS."""
    ratios = [f"{row[key]:.2f}" for key in ("seconds_ratio", "deployed_ratio", "memory_ratio")]
    megabytes = [f"{row[key]:.0f}" for key in ("memory_mb", "heap_mb")]
    return [
        row["runtime"],
        row["model"],
        str(row["batch"]),
        row["variant"],
        *ratios,
        *megabytes,
        f"{row['forwards']:.2f}",
    ]


def cost_page(rows: Sequence[dict[str, Any]]) -> str:
    """Chart and table in one file."""
    from mergetta.bench.figures import cost_ratios
    from mergetta.bench.report import page

    head = "".join(f"<th>{column}</th>" for column in COLUMNS)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(row)) + "</tr>" for row in rows)
    return page(
        "mergetta · cost",
        "Time (median over interleaved rounds) and memory (fresh processes), relative to plain inference in one run.",
        f"<figure>{cost_ratios(rows)}</figure><div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div><p>“time ×” and “memory ×”: to plain inference of the same graph "
        "in the same runtime. “time × deployed”: to the model with BatchNorm folded into the convolutions, in ONNX "
        "Runtime.</p>",
    )


def main() -> None:
    """In a fresh process: run one variant and print its peak resident and its allocated memory in megabytes."""
    runtime, variant, model, folder, threads = sys.argv[1:]
    images = np.load(Path(folder) / "images.npy")
    if variant == "imports":
        __import__("torch" if runtime == "torch" else "mergetta.runtimes.onnx_runtime")
    else:
        predict, _ = create(runtime, variant, model, Path(folder), int(threads))
        for _ in range(3):
            predict(images)
    if runtime == "onnx" and {"torch", "scipy", "pandas", "fastapi"} & set(sys.modules):
        raise RuntimeError("the device process imported what a device does not have")
    print(of_process("VmHWM"), allocated())  # not ru_maxrss, which a child inherits from the process that started it


if __name__ == "__main__":
    main()
