"""A small pre-norm vision transformer with a class token (Dosovitskiy et al. 2021): the family `fashion-vit`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TransformerBlock(nn.Module):
    """Self-attention, then a two-layer perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, ratio * width)
        self.fc2 = nn.Linear(ratio * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class SmallViT(nn.Module):
    """Patch and position embedding, class token, blocks, final norm, linear."""

    def __init__(
        self,
        channels: int = 1,
        classes: int = 10,
        size: int = 28,
        patch: int = 7,
        width: int = 64,
        depth: int = 6,
        heads: int = 4,
        ratio: int = 3,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(channels, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 1 + (size // patch) ** 2, width) * 0.02)
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads, ratio) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch_embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1) + self.positions
        return self.head(self.norm(self.blocks(tokens))[:, 0])
