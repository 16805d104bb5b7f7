"""MobileNetV2 (Sandler et al. 2018), state-dict layout of torchvision."""

from __future__ import annotations

from torch import Tensor, nn

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""How many times a unit widens, width, units, stride of the first unit."""


def convolution(inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """With norm and activation."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """Widen, depthwise convolution, narrow; beside a shortcut where the shapes agree."""

    def __init__(self, inputs: int, outputs: int, times: int, stride: int) -> None:
        super().__init__()
        inner = times * inputs
        self.conv = nn.Sequential(
            *([convolution(inputs, inner)] if times > 1 else []),
            convolution(inner, inner, 3, stride, inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNetV2(nn.Module):
    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        features: list[nn.Module] = [convolution(3, 32, 3, 2)]
        inputs = 32
        for times, width, depth, stride in STAGES:
            for number in range(depth):
                features.append(InvertedResidual(inputs, width, times, stride if number == 0 else 1))
                inputs = width
        self.features = nn.Sequential(*features, convolution(inputs, 1280))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean(dim=(2, 3)))
