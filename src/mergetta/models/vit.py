"""Vision transformers (Dosovitskiy et al. 2021), state-dict layout of torchvision; ViT-B/16 unless told otherwise."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Query, key and value from one matrix, as `nn.MultiheadAttention` stores them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * width))
        self.out_proj = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        return self.out_proj(y)


class EncoderLayer(nn.Module):
    """Self-attention, then a two-layer perceptron, each behind a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, eps=1e-6)
        self.self_attention = SelfAttention(width, heads)
        self.ln_2 = nn.LayerNorm(width, eps=1e-6)
        # 1 and 2 are the activation and a dropout, which have no weights.
        layers = OrderedDict([("0", nn.Linear(width, ratio * width)), ("3", nn.Linear(ratio * width, width))])
        self.mlp = nn.ModuleDict(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.ln_1(x))
        return x + self.mlp["3"](F.gelu(self.mlp["0"](self.ln_2(x))))


class Encoder(nn.Module):
    def __init__(self, tokens: int, width: int, depth: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        layers = [(f"encoder_layer_{number}", EncoderLayer(width, heads, ratio)) for number in range(depth)]
        self.layers = nn.Sequential(OrderedDict(layers))
        self.ln = nn.LayerNorm(width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    """Patch embedding, class token, encoder, linear."""

    def __init__(
        self,
        classes: int = 1000,
        size: int = 224,
        patch: int = 16,
        width: int = 768,
        depth: int = 12,
        heads: int = 12,
        ratio: int = 4,
    ) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.encoder = Encoder(1 + (size // patch) ** 2, width, depth, heads, ratio)
        self.heads = nn.Sequential(OrderedDict([("head", nn.Linear(width, classes))]))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv_proj(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(x.shape[0], -1, -1), tokens], dim=1)
        return self.heads(self.encoder(tokens)[:, 0])


EARLIER = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}
"""Torchvision's published file still has these names."""
TIMM = {
    "patch_embed.proj": "conv_proj", "cls_token": "class_token", "pos_embed": "encoder.pos_embedding",
    "blocks.": "encoder.layers.encoder_layer_", ".norm1.": ".ln_1.", ".norm2.": ".ln_2.", "norm.": "encoder.ln.",
    ".attn.qkv.": ".self_attention.in_proj_", ".attn.proj.": ".self_attention.out_proj.",
    ".mlp.fc1.": ".mlp.0.", ".mlp.fc2.": ".mlp.3.", "head.": "heads.head.",
}  # fmt: skip
"""Of timm, and of DeiT."""


def respell(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The tensors by torchvision's names of today."""
    spellings, respelt = TIMM if "cls_token" in tensors else EARLIER, {}
    for name, tensor in tensors.items():
        for old, new in spellings.items():
            name = name.replace(old, new)
        respelt[name] = tensor
    return respelt
