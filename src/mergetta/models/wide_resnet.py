"""Wide ResNets for CIFAR (Zagoruyko & Komodakis 2016), state-dict layout of RobustBench's model "Standard"."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mergetta.errors import MergettaError


class WideBlock(nn.Module):
    """Norm and activation before each of two convolutions; a change of width also takes them into the shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        if inputs != outputs:
            self.convShortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
        self.widens = inputs != outputs

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        y = self.conv2(F.relu(self.bn2(self.conv1(active))))
        return y + (self.convShortcut(active) if self.widens else x)


class Stage(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, depth: int) -> None:
        super().__init__()
        first = WideBlock(inputs, outputs, stride)
        self.layer = nn.Sequential(first, *[WideBlock(outputs, outputs, 1) for _ in range(depth - 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class WideResNet(nn.Module):
    def __init__(self, depth: int = 28, width: int = 10, classes: int = 10) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4 or width < 1:
            raise MergettaError(f"A wide ResNet has 6n + 4 layers and a width of at least 1, not {depth} and {width}.")
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.block1 = Stage(16, 16 * width, 1, depth // 6)
        self.block2 = Stage(16 * width, 32 * width, 2, depth // 6)
        self.block3 = Stage(32 * width, 64 * width, 2, depth // 6)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block3(self.block2(self.block1(self.conv1(x))))
        return self.fc(F.relu(self.bn1(y)).mean(dim=(2, 3)))
