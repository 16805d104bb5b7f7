"""Finds in any torch model what mergetta needs, by structure and never by name: groups, blocks, stem, classifier."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mergetta.errors import MergettaError
from mergetta.groups import KINDS, Group

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
BlockOf = Callable[[str], int]


def norm_kind(module: nn.Module) -> str | None:
    """batch, layer, group or rms for a norm layer; None for anything else."""
    for kind, types in (
        ("batch", _BatchNorm),
        ("layer", nn.LayerNorm),
        ("group", nn.GroupNorm),
        ("rms", nn.RMSNorm),
    ):
        if isinstance(module, types):
            return kind
    # Libraries define RMSNorm of their own: a parameter vector called weight and nothing below it.
    if type(module).__name__.lower().endswith("rmsnorm") and not list(module.children()):
        return "rms"
    return None


def norm_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Norm layers with affine parameters or with moments, in the order of definition."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) or (norm_kind(module) and getattr(module, "weight", None) is not None)
    }


def open_batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorm layers by name, made to normalise with their means and variances and to leave these alone.

    A layer that was trained without any gets zeros and ones.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, _BatchNorm)}
    for layer in layers.values():
        if layer.running_mean is None or layer.running_var is None:
            layer.running_mean, layer.running_var = torch.zeros(layer.num_features), torch.ones(layer.num_features)
        layer.track_running_stats = False
    return layers


def find_groups(model: nn.Module, block_of: BlockOf | None = None) -> tuple[Group, ...]:
    """Scale and shift of every norm layer, and what BatchNorm normalises with. `block_of(layer name)` overrides the
    blocks found.
    """
    layers = norm_layers(model)
    if not layers:
        raise MergettaError("The model has no norm layer that could adapt.")
    blocks = {name: block_of(name) for name in layers} if block_of else find_blocks(model)
    stage = any(is_stage(model.get_submodule(name)) for name in block_modules(model, layers))
    return tuple(
        Group(f"{layer}.{part}", value.numel(), blocks[layer], kind, stage)
        for layer, module in layers.items()
        for part, kind in KINDS.items()
        if (value := getattr(module, part, None)) is not None
    )


def find_blocks(model: nn.Module) -> dict[str, int]:
    """Norm layer name → block: 0 before the first block; what follows a block belongs to it.

    The unit of a network is the module class that occurs more than once and holds the most norm layers (the
    outermost, if several hold the same). A convolution with its norm is not a unit if larger ones hold at least half of
    the norm layers. If the units stand in several containers, as the residual blocks of a
    ResNet do, a block is a container, that is a stage: what WRN code calls block1 to block3, and what SAR and DeYO
    freeze. If they stand in one, as in a ViT, a block is a unit. Without repeated units each norm layer is one.
    """
    layers = norm_layers(model)
    starts = block_modules(model, layers) or list(layers)
    blocks: dict[str, int] = {}
    current = 0
    for name in layers:
        for index, start in enumerate(starts, 1):
            if name == start or name.startswith(f"{start}."):
                current = index
        blocks[name] = current
    return blocks


def block_modules(model: nn.Module, layers: dict[str, nn.Module]) -> list[str]:
    """Names of the modules that are the blocks, in order."""
    members: dict[type, list[str]] = defaultdict(list)
    held: dict[type, set[str]] = defaultdict(set)
    for name, module in model.named_modules():
        inside = {layer for layer in layers if layer.startswith(f"{name}.")}
        if not name or not inside or isinstance(module, CONTAINERS) or norm_kind(module):
            continue
        if any(name.startswith(f"{outer}.") for outer in members[type(module)]):
            continue
        members[type(module)].append(name)
        held[type(module)] |= inside
    repeated = [kind for kind, names in members.items() if len(names) > 1]
    if not repeated:
        return []
    large = [k for k in repeated if len(held[k]) >= 2 * len(members[k]) and 2 * len(held[k]) >= len(layers)]
    unit = max(large or repeated, key=lambda kind: (len(held[kind]), -len(members[kind])))
    parents = list(dict.fromkeys(name.rpartition(".")[0] for name in members[unit]))
    return parents if len(parents) > 1 else members[unit]


def is_stage(block: nn.Module) -> bool:
    """Whether a block holds several units, as a stage of a ResNet does, rather than being one."""
    return isinstance(block, CONTAINERS) or bool(block_modules(block, norm_layers(block)))


def find_classifier(model: nn.Module) -> nn.Linear:
    """The last linear layer."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linear:
        raise MergettaError("The model has no linear layer to take as its classifier.")
    return linear[-1]


def find_stem(model: nn.Module) -> nn.Module | None:
    """The first convolution, whose output tells domains apart; None if the model has none."""
    return next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)


def find_first_block(model: nn.Module) -> nn.Module | None:
    """The first repeated unit, whose input is the token sequence of a transformer."""
    starts = block_modules(model, norm_layers(model))
    return model.get_submodule(starts[0]) if starts else None
