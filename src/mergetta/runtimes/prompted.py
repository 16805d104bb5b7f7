"""A vision transformer with prompt tokens behind its class token (Jia et al. 2022): to adapters, just one more group.

Here and not in `models`, because the model stays the family's own: the prompts are put into the runtime's private copy,
whatever library it comes from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergetta.errors import MergettaError
from mergetta.groups import Group
from mergetta.models.discovery import find_first_block, find_stem, norm_layers
from mergetta.models.family import Family
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.seeds import generator


class PromptedRuntime(TorchRuntime):
    """The groups of the family, behind a group `prompts` of count × width.

    It is another model than the family's, even at its start, and its fingerprint says so: experts and bundles of the
    family do not fit it.
    """

    def __init__(self, family: Family | nn.Module, count: int = 3, seed: int = 0, **options: Any) -> None:
        super().__init__(family, **options)
        if count < 1:
            raise MergettaError(f"There must be at least one prompt, not {count}.")
        block, width = find_first_block(self.model), find_width(self.model)
        if block is None or width is None:
            raise MergettaError("Prompts need a vision transformer with a class token, and this model is none.")
        prompts = first_prompts(self.model, count, width, seed).to(self.device)
        self.model.register_parameter("prompts", nn.Parameter(prompts, requires_grad=False))
        block.register_forward_pre_hook(self._insert)
        self._open((Group("prompts", count * width, 0, "prompts"), *self.structure))
        self.family = f"{self.family}+{count}-prompts" if self.family else ""

    def _insert(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tokens, *others = inputs
        prompts = getattr(self.model, "prompts").expand(len(tokens), -1, -1)  # noqa: B009
        return torch.cat([tokens[:, :1], prompts, tokens[:, 1:]], dim=1), *others


def find_width(model: nn.Module) -> int | None:
    """Of the tokens, if there is a class token: a parameter (1, 1, C) as wide as the first block's norm layer."""
    block = find_first_block(model)
    norm = next(iter(norm_layers(block).values()), None) if block is not None else None
    if norm is None:
        return None
    width = int(norm.get_parameter("weight").numel())
    return width if any(p.shape == (1, 1, width) for p in model.parameters()) else None


def first_prompts(model: nn.Module, count: int, width: int, seed: int) -> Tensor:
    """Uniform as VPT has it: Xavier's bound for the patch embedding."""
    stem: Any = find_stem(model)
    bound = math.sqrt(6 / ((stem.weight[0].numel() if stem is not None else 0) + width))
    values = generator(seed, 0, "prompts").uniform(-bound, bound, (1, count, width))
    return torch.from_numpy(values.astype(np.float32))
