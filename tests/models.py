"""How tests tell one model from another."""

from __future__ import annotations

import torch
from torch import nn

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

HALF = ((0.5,) * 3, (0.5,) * 3)


def randomised(model: nn.Module) -> nn.Module:
    """Fresh weights are too tidy to tell architectures apart: norms of 1 and 0, zero tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.ndim < 2 and value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) * 0.5 + 0.5 * ("bias" not in name))
            elif value.is_floating_point():
                value.add_(0.02 * torch.randn(value.shape, generator=generator))
    return model.eval()


def assert_same_model(one: nn.Module, other: nn.Module, size: int) -> None:
    x = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x), atol=1e-4, rtol=1e-4)
