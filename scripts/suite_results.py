"""The measurements behind docs/results/cifar10.md, docs/reference/suites.md and parity.md.

DATA has cifar10/ and imagenet/.

python scripts/suite_results.py clean DATA            # error of the public checkpoints on clean images; about 5 minutes
python scripts/suite_results.py severity DATA 1000    # do errors rise with severity?; about 3 minutes
python scripts/suite_results.py speed DATA            # seconds per corruption; about 2 minutes
python scripts/suite_results.py textures              # how hard the drawn styles are; about 2 minutes
python scripts/suite_results.py jpeg DATA 500         # what the JPEGs of the published ImageNet-C cost; 2 minutes
python scripts/suite_results.py beside FILE.json     # results of `mergetta bench --json`, with the paper's rows beside
python scripts/suite_results.py memory                # of streaming a 50,000-image ImageNet-C domain; about 5 minutes
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from mergetta import TorchRuntime, load_family
from mergetta.bench.reproduce import paper
from mergetta.bench.reproduce.setting import per_domain
from mergetta.bench.sheets import Row, Sheet, texts
from mergetta.bench.tables import Number
from mergetta.data.corruptions import CORRUPTIONS, corrupt
from mergetta.data.sources import open_source
from mergetta.data.streams import Domain

RESNETS = {20: "resnet20-12fca82f.th", 32: "resnet32-d509ac18.th", 44: "resnet44-014dd654.th"}


def error_of(runtime: TorchRuntime, domain: Domain, given: float, batch_size: int = 200) -> float:
    wrong = images = 0
    for batch, labels in domain.stream(0, batch_size):
        logits = runtime(batch, given=given).logits
        wrong += int(np.count_nonzero(np.argmax(logits, axis=1) != labels))
        images += len(labels)
    return 100 * wrong / images


def resnet(data: Path, depth: int) -> TorchRuntime:
    return TorchRuntime(load_family(f"resnet-{depth}", data / "cifar10" / RESNETS[depth]))


def clean(folder: str) -> None:
    data = Path(folder)
    cifar = open_source("cifar10-c", data / "cifar10").clean(10_000)
    imagenet = open_source("imagenet-c", data / "imagenet").clean(50_000)
    assert cifar is not None and imagenet is not None
    for depth in RESNETS:
        print(
            f"resnet-{depth}: {error_of(resnet(data, depth), cifar, 1.0):.2f} %, {len(cifar.labels)} images", flush=True
        )
    error = error_of(TorchRuntime(load_family("efficientnet-lite0")), imagenet, 1.0)
    print(f"efficientnet-lite0: {error:.2f} %, {len(imagenet.labels)} images")


def severity(folder: str, samples: str = "1000") -> None:
    data = Path(folder)
    source, runtime = open_source("cifar10-c", data / "cifar10"), resnet(data, 20)
    rising = 0
    print(
        f"| {source.description}, {samples} images | source, severity 1 to 5 | bn-stats, severity 5 |\n|---|---|---:|"
    )
    for corruption in CORRUPTIONS:
        domains = [source.domain(corruption, strength, int(samples)) for strength in range(1, 6)]
        plain = [error_of(runtime, domain, 1.0) for domain in domains]
        rising += all(b >= a - 0.5 for a, b in pairwise(plain))
        batch = error_of(runtime, domains[-1], 0.0)
        print(f"| {corruption} | {' · '.join(f'{e:.1f}' for e in plain)} | {batch:.1f} |", flush=True)
    print(f"\n{rising} of {len(CORRUPTIONS)} never fall by more than half a point from one severity to the next")


def speed(folder: str) -> None:
    """Seconds of this process on one thread."""
    cv2.setNumThreads(1)
    source = open_source("cifar10-c", Path(folder) / "cifar10").clean(10_000)
    assert source is not None
    small = np.asarray(source.images[np.arange(10_000)])
    large = np.repeat(np.repeat(small[:20], 7, axis=1), 7, axis=2)  # 224 pixels
    total = 0.0
    for corruption in CORRUPTIONS:
        start = time.process_time()
        corrupt(small, corruption, 5)
        middle = time.process_time()
        corrupt(large, corruption, 5)
        total += middle - start
        print(
            f"{corruption}: {middle - start:.1f} s, {1000 * (time.process_time() - middle) / len(large):.0f} ms",
            flush=True,
        )
    print(f"all on {len(small)} CIFAR images: {total:.1f} s; the second number is per 224-pixel image")


def jpeg(folder: str, samples: str = "500") -> None:
    """MobileNetV2 on corrupted images as they are, and as the published set keeps them: JPEG of quality 85."""
    data = Path(folder) / "imagenet"
    source = open_source("imagenet-c", data)
    runtime = TorchRuntime(load_family("mobilenet-v2", data / "mobilenet_v2-b0353104.pth"))
    print(f"| {source.description}, {samples} images | as they are | after JPEG of quality 85 |\n|---|---:|---:|")
    for corruption in ("gaussian_noise", "motion_blur", "fog", "contrast", "jpeg_compression"):
        domain = source.domain(corruption, 5, int(samples))
        images = domain.images[np.arange(len(domain.labels))]
        kept = Domain(corruption, np.stack([through_jpeg(image) for image in images]), domain.labels)
        print(
            f"| {corruption} | {error_of(runtime, domain, 1.0, 50):.1f} | {error_of(runtime, kept, 1.0, 50):.1f} |",
            flush=True,
        )


def through_jpeg(image: np.ndarray) -> np.ndarray:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=85, optimize=True)
    return np.asarray(Image.open(buffer))


def textures() -> None:
    source = open_source("fashion-styles")
    clean = open_source("fashion").whole("clean", 0)
    rows = [("fashion-bn", "source", 1.0), ("fashion-bn", "bn-stats", 0.0), ("fashion-vit", "source", 1.0)]
    domains = [source.domain(name, 5, 500) for name in source.domains]
    for family, name, share in rows:
        runtime = TorchRuntime(load_family(family))
        errors = [error_of(runtime, domain, share, 250) for domain in domains]
        alone = error_of(runtime, Domain("clean", clean.images[np.arange(500)], clean.labels[:500]), share, 250)
        means = " | ".join(f"{np.mean(errors[:count]):.1f}" for count in (10, 20, 30, 40, 50))
        print(f"| `{family}`, {name} | {alone:.1f} | {means} | {min(errors):.1f}–{max(errors):.1f} |", flush=True)


def memory() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "fog" / "5" / "n01440764"
        folder.mkdir(parents=True)
        first = folder / "0.JPEG"
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)).save(first)
        for number in range(1, 50_000):
            (folder / f"{number}.JPEG").hardlink_to(first)
        domain = open_source("imagenet-c", Path(name)).domain("fog", 5, 50_000)
        images = sum(len(labels) for _, labels in domain.stream(0, 64))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(f"{images} images streamed, peak resident memory {int(peak.split()[1]) / 1024:.0f} MB")


def beside(*files: str) -> None:
    """Methods of all files in rows; those with experts are named after them."""
    rows: dict[str, list[Number | None]] = {}
    for file in files:
        content = json.loads(Path(file).read_text())
        records = content["results"]
        domains = tuple(dict.fromkeys(record["domain"] for record in records))
        experts = {record["method"]: record["expert"] for record in records if record["expert"]}
        for method, numbers in per_domain(records, domains).items():
            rows[f"{method}, {experts[method]} experts" if method in experts else method] = numbers
    dataset, model = paper.nearest(content["suite"], content["family"])
    columns = ("error, %", *(domain.replace("_", " ") for domain in domains), "average")
    own = tuple(Row(name, texts(numbers)) for name, numbers in rows.items())
    caption = f"Italics: the paper's numbers, for {model} on {dataset}."
    print(Sheet(caption, columns, (*own, *paper.rows(dataset, model, domains))).markdown())


if __name__ == "__main__":
    tasks = [clean, severity, speed, jpeg, memory, textures, beside]
    {task.__name__: task for task in tasks}[sys.argv[1]](*sys.argv[2:])
