"""A small residual BatchNorm CNN (He et al. 2016, CIFAR style): the family `fashion-bn`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """Stem of stride 2, one stage per width (each after the first halves the resolution), average, linear."""

    def __init__(
        self, channels: int = 1, classes: int = 10, widths: tuple[int, ...] = (16, 32, 64), depth: int = 2
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, widths[0], 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(widths[0])
        inputs = widths[0]
        stages = []
        for i, width in enumerate(widths):
            blocks = [ResidualBlock(inputs if j == 0 else width, width, 2 if i and not j else 1) for j in range(depth)]
            stages.append(nn.Sequential(*blocks))
            inputs = width
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stages(F.relu(self.bn(self.conv(x))))
        return self.head(y.mean(dim=(2, 3)))
