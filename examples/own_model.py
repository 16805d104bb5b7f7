"""One's own PyTorch model, from its weights to a camera that adapts: expert → bundle → ONNX → predictions.

`python examples/own_model.py [snow|frost|fog|brightness]` trains a small network on 2,000 images of clothes, makes
experts of three kinds of bad weather, and predicts single frames of the fourth: accuracy before and after, and time per
frame. The same by commands, for which `family` is all that mergetta has to be told, is in docs/guide/device.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

from mergetta import Device, TorchRuntime, build_bundle, load_family, train_expert
from mergetta.data.corruptions import corrupt
from mergetta.data.fashion import CLASSES, load_fashion, load_fashion_clean
from mergetta.data.streams import as_input
from mergetta.runtimes.export import export_onnx

WEIGHTS, PLAIN = "own_model.pt", "own_plain.onnx"
WEATHER = ("snow", "frost", "fog", "brightness")


class Net(nn.Module):
    """Any model with norm layers and a linear classifier at its end."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.BatchNorm2d(after), nn.ReLU()]
        self.body = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def family() -> tuple[nn.Module, dict]:
    """What mergetta has to know: the model, the size of its images and its classes (also: mean, std)."""
    return Net(), {"size": 28, "classes": CLASSES}


def train(epochs: int = 8) -> None:
    """As one trains a model; it leaves a checkpoint, and the ONNX file that one would deploy without mergetta."""
    torch.manual_seed(0)
    model, clean = Net().train(), load_fashion_clean(2000)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for epoch in range(epochs):
        for images, labels in clean.stream(epoch, 50):
            loss = nn.functional.cross_entropy(model(torch.from_numpy(images)), torch.from_numpy(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.save(model.state_dict(), WEIGHTS)
    torch.onnx.export(model.eval(), (torch.zeros(1, 1, 28, 28),), PLAIN, dynamo=True, verbose=False)


def adapt_and_export(sites: list[str]) -> None:
    """Strong devices, the server, and what is deployed: a bundle and an ONNX file."""
    own = load_family("own_model:family", WEIGHTS)
    runtime = TorchRuntime(own)
    pixels = load_fashion()[0][2000:]  # unlabelled
    streams = {site: as_input(corrupt(pixels, site)).reshape(-1, 50, 1, 28, 28) for site in sites}
    experts = [train_expert(runtime, images, "roid", site) for site, images in streams.items()]
    build_bundle(runtime.groups, experts, family=runtime.family).save("own_bundle.safetensors")
    export_onnx(own, "own_model.onnx", clean=(images for images, _ in load_fashion_clean(2000).stream(0, 100)))


def timed(predict: Callable[[np.ndarray], np.ndarray], frame: np.ndarray) -> tuple[int, float]:
    """The class of a frame, and milliseconds."""
    start = time.perf_counter()
    label = int(predict(frame).argmax())
    return label, 1000 * (time.perf_counter() - start)


def main(camera: str = "snow", count: int = 3000) -> None:
    if not Path(WEIGHTS).exists():
        train()
    adapt_and_export([site for site in WEATHER if site != camera])
    pixels, labels = load_fashion()
    frames, labels = corrupt(pixels[:2000], camera)[np.arange(count) % 2000], labels[np.arange(count) % 2000]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(PLAIN, options)
    entry = session.get_inputs()[0].name
    seen = []
    with Device("own_model.onnx", "own_bundle.safetensors", threads=1) as device:  # needs no PyTorch
        for frame in frames:
            plain = timed(lambda frame: session.run(None, {entry: as_input(frame[None])})[0], frame)
            seen.append((*plain, *timed(device.predict, frame)))
    before, plain_times, after, times = np.array(seen).T
    for name, found in (("before", before), ("after", after)):
        print(f"{camera}, accuracy {name}: {100 * np.mean((found == labels)[:2000]):.1f} %")
    alone, third = np.median(plain_times), count // 3
    print(f"plain ONNX Runtime: {alone:.2f} ms per frame")
    for name, part in (("first", times[:third]), ("last", times[-third:])):
        ratio = np.median(part) / alone
        print(f"mergetta, the {name} {third} frames: {np.median(part):.2f} ms per frame, {ratio:.1f} times as much")


if __name__ == "__main__":
    main(*sys.argv[1:])
