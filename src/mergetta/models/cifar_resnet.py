"""CIFAR ResNets of 6n + 2 layers (He et al. 2016), state-dict layout of akamaster/pytorch_resnet_cifar10."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mergetta.errors import MergettaError


class PlainBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut without parameters (type A): every other pixel, new channels zero."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride = stride
        self.padding = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(y + x)


class CifarResNet(nn.Module):
    def __init__(self, depth: int = 20, classes: int = 10) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise MergettaError(f"A CIFAR ResNet has 6n + 2 layers (20, 32, 44, 56, 110), not {depth}.")
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = stage(16, 16, 1, depth // 6)
        self.layer2 = stage(16, 32, 2, depth // 6)
        self.layer3 = stage(32, 64, 2, depth // 6)
        self.linear = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.layer3(self.layer2(self.layer1(y)))
        return self.linear(y.mean(dim=(2, 3)))


def stage(inputs: int, outputs: int, stride: int, depth: int) -> nn.Sequential:
    first = PlainBlock(inputs, outputs, stride)
    return nn.Sequential(first, *[PlainBlock(outputs, outputs, 1) for _ in range(depth - 1)])
