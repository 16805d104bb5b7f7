"""ResNeXt-29 for CIFAR (Xie et al. 2017), state-dict layout of AugMix and of RobustBench's AugMix models.

The name 32x4d is the literature's; the published weights have 4 groups, 32 channels wide in the first stage.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GroupedBottleneck(nn.Module):
    """1×1, grouped 3×3, 1×1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, groups: int, group_width: int) -> None:
        super().__init__()
        inner, outputs = groups * (width * group_width // 64), 4 * width
        self.conv_reduce = nn.Conv2d(inputs, inner, 1, bias=False)
        self.bn_reduce = nn.BatchNorm2d(inner)
        self.conv_conv = nn.Conv2d(inner, inner, 3, stride, 1, groups=groups, bias=False)
        self.bn = nn.BatchNorm2d(inner)
        self.conv_expand = nn.Conv2d(inner, outputs, 1, bias=False)
        self.bn_expand = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn_reduce(self.conv_reduce(x)))
        y = F.relu(self.bn(self.conv_conv(y)))
        return F.relu(self.bn_expand(self.conv_expand(y)) + self.downsample(x))


class ResNeXt29(nn.Module):
    def __init__(self, groups: int = 4, group_width: int = 32, classes: int = 100) -> None:
        super().__init__()
        self.conv_1_3x3 = nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        self.bn_1 = nn.BatchNorm2d(64)
        inputs = 64
        for number, width in enumerate((64, 128, 256), 1):
            blocks = []
            for block in range(3):
                stride = 2 if number > 1 and not block else 1
                blocks.append(GroupedBottleneck(inputs, width, stride, groups, group_width))
                inputs = 4 * width
            self.add_module(f"stage_{number}", nn.Sequential(*blocks))
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn_1(self.conv_1_3x3(x)))
        for number in range(1, 4):
            y = self.get_submodule(f"stage_{number}")(y)
        return self.classifier(y.mean(dim=(2, 3)))
