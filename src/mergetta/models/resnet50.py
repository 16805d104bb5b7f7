"""ResNet-50 (He et al. 2016), state-dict layout of torchvision and timm, the stride on the 3×3 convolution.

Keras has it as published first: the stride on the first 1×1 convolution, and ε = 1e-3.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, keras: bool) -> None:
        super().__init__()
        outputs = 4 * width
        first, second = (stride, 1) if keras else (1, stride)
        self.conv1 = nn.Conv2d(inputs, width, 1, first, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, second, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet50(nn.Module):
    def __init__(self, classes: int = 1000, keras: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        inputs = 64
        for number, (width, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if number > 1 and not block else 1, keras))
                inputs = 4 * width
            self.add_module(f"layer{number}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inputs, classes)
        if keras:
            for layer in self.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.eps = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for number in range(1, 5):
            y = self.get_submodule(f"layer{number}")(y)
        return self.fc(y.mean(dim=(2, 3)))
