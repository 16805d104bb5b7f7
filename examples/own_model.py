"""One's own PyTorch model, from its weights to a device that adapts: expert → bundle → ONNX → predictions.

`python examples/own_model.py`. Of the function `family` alone: `mergetta adapt photos/ --family own_model:family …`
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from mergetta import Device, TorchRuntime, build_bundle, load_family, train_expert
from mergetta.runtimes.export import export_onnx


class Net(nn.Module):
    """Any model with norm layers and a linear classifier at its end."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(8, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


def family() -> tuple[nn.Module, dict]:
    """What mergetta has to know: the model, the size of its images and its classes (also: mean, std)."""
    torch.manual_seed(0)
    return Net(), {"size": 32, "classes": ("cat", "dog", "owl")}


def main() -> None:
    rng = np.random.default_rng(0)
    runtime = TorchRuntime(load_family("own_model:family"))  # checkpoint="weights.pt" for trained weights
    sites = {"yard": 0.2, "shed": 0.6}  # two strong devices, each with unlabelled images in [0, 1] of its own
    experts = [
        train_expert(runtime, [light + 0.2 * rng.random((50, 3, 32, 32), np.float32) for _ in range(4)], "roid", site)
        for site, light in sites.items()
    ]
    bundle = build_bundle(runtime.groups, experts, family=runtime.family)
    bundle.save("own_bundle.safetensors")
    export_onnx(load_family("own_model:family"), "own_model.onnx")
    device = Device("own_model.onnx", bundle)  # the weak device needs no PyTorch from here on
    for frame in rng.integers(100, 200, (20, 48, 64, 3), dtype=np.uint8):
        print(device.classes[device.predict(frame).argmax()], device.status().phase)


if __name__ == "__main__":
    main()
