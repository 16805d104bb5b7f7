"""A family: one architecture, one source checkpoint, one preprocessing; and its checkpoint file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mergetta.errors import MergettaError
from mergetta.expert import check_moments
from mergetta.files import decode, encode, expect, expect_names, read_bytes, write_atomically
from mergetta.groups import fingerprint
from mergetta.models.cifar_resnet import CifarResNet
from mergetta.models.discovery import find_classifier
from mergetta.models.efficientnet_lite import EfficientNetLite0
from mergetta.models.mobilenet_v2 import MobileNetV2
from mergetta.models.resnet50 import ResNet50
from mergetta.models.resnext29 import ResNeXt29
from mergetta.models.small_resnet import SmallResNet
from mergetta.models.small_vit import SmallViT
from mergetta.models.vit import VisionTransformer
from mergetta.models.wide_resnet import WideResNet

FORMAT, VERSION = "mergetta.checkpoint", 2
ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "cifar-resnet": CifarResNet,
    "efficientnet-lite0": EfficientNetLite0,
    "mobilenet-v2": MobileNetV2,
    "resnet-50": ResNet50,
    "resnext-29": ResNeXt29,
    "small-resnet": SmallResNet,
    "small-vit": SmallViT,
    "vit": VisionTransformer,
    "wide-resnet": WideResNet,
}
EMBEDDED = Path(__file__).parent / "embedded"


@dataclass(frozen=True)
class Preprocessing:
    """What the checkpoint expects of its input: raw pixels in [0, 1] become (x − mean) / std, per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: int | None = None
    """Height and width that image files are resized to; None leaves them as they are."""

    def __post_init__(self) -> None:
        numbers = [*self.mean, *self.std]
        if not self.mean or len(self.mean) != len(self.std) or not np.isfinite(numbers).all() or min(self.std) <= 0:
            raise MergettaError(
                f"Preprocessing needs a mean and a positive std per channel, not {self.mean}, {self.std}."
            )
        if self.size is not None and (not isinstance(self.size, int) or self.size < 1):
            raise MergettaError(f"The size of the images must be a positive number, not {self.size!r}.")


@dataclass(frozen=True)
class Family:
    """A source model with everything needed to feed it and to recognise its relatives."""

    name: str
    """The first part of the fingerprint."""
    model: nn.Module
    """With norm layers and a linear classifier at its end."""
    preprocessing: Preprocessing
    """Mean, standard deviation and size that the model expects."""
    classes: tuple[str, ...]
    """Their names, in the order of the logits."""
    architecture: str
    """What `save` writes down so that `load_family` can build the model again."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    signature: np.ndarray | None = None
    """Per-channel mean and variance after the stem on source data, (2, C): the source model's place in CoLA's pool."""

    def __post_init__(self) -> None:
        if self.signature is not None:
            check_moments(self.signature, "The family's signature")
        outputs = find_classifier(self.model).out_features
        if len(self.classes) != outputs:
            raise MergettaError(f"The model has {outputs} outputs, but {len(self.classes)} class names.")

    @cached_property
    def fingerprint(self) -> str:
        """Name and digest: what experts, bundles and device models must agree on."""
        tensors = {name: value.numpy(force=True) for name, value in self.model.state_dict().items()}
        facts = {
            "architecture": self.architecture,
            "options": dict(self.options),
            "preprocessing": dataclasses.asdict(self.preprocessing),
        }
        return f"{self.name}-{fingerprint(tensors, facts)}"

    def save(self, path: str | Path) -> None:
        """Write the checkpoint file that `load_family` reads."""
        header = {
            "name": self.name,
            "architecture": self.architecture,
            "options": dict(self.options),
            "mean": self.preprocessing.mean,
            "std": self.preprocessing.std,
            "size": self.preprocessing.size,
            "classes": self.classes,
            "signature": None if self.signature is None else self.signature.tolist(),
        }
        tensors = {name: value.numpy(force=True) for name, value in self.model.state_dict().items()}
        write_atomically(path, encode(tensors, FORMAT, VERSION, header))


def load_family(name: str | Path, checkpoint: str | Path | None = None, name_as: str | None = None) -> Family:
    """A family by name, or by the path of a mergetta checkpoint.

    Parameters
    ----------
    name
        The embedded `fashion-bn`, `fashion-vit`; public ones with the file they are published as (`resnet-20`,
        `wrn-28-10`, `resnet-50`, `mobilenet-v2`, `vit-b-16`, `deit-tiny`, …); `timm:NAME` and `hf:NAME`,
        with their published weights unless a checkpoint is given; `module:function`, one's own.
    checkpoint
        Weights for the family: a state dict or a safetensors file.
    name_as
        Another name for the family.

    Examples
    --------
    >>> load_family("fashion-bn").classes[:2]
    ('T-shirt/top', 'Trouser')
    """
    family = find_family(str(name), checkpoint)
    return dataclasses.replace(family, name=name_as) if name_as else family


def find_family(name: str, checkpoint: str | Path | None) -> Family:
    from mergetta.models import own, zoo  # here, because they make families

    if recipe := zoo.find_recipe(name):
        return zoo.load_public(name, recipe, checkpoint)
    path = EMBEDDED / f"{name}.safetensors"
    if not path.is_file():
        path = Path(name)
    if path.is_file():
        if checkpoint is not None:
            raise MergettaError(f"The family {name!r} has weights of its own: leave out the checkpoint {checkpoint}.")
        return read_family(path)
    if name.startswith("timm:"):
        from mergetta.models.timm_models import load_timm

        return load_timm(name.removeprefix("timm:"), checkpoint)
    if name.startswith("hf:"):
        from mergetta.models.hf_models import load_hf

        return load_hf(name.removeprefix("hf:"), checkpoint)
    if own.PATTERN.fullmatch(name):
        return own.load_own(name, checkpoint)
    if path.is_dir():
        raise MergettaError(f"{name} is a folder, not a checkpoint file; a folder of Hugging Face is hf:{name}.")
    if path.suffix or path.name != name:
        raise MergettaError(f"There is no file {name}.")
    raise MergettaError(
        f"There is no family or checkpoint file {name!r}; embedded: {', '.join(embedded_families())}; public: "
        f"{', '.join(zoo.NAMES)}, timm:NAME, hf:NAME; one's own: module:function."
    )


def read_family(path: Path) -> Family:
    """What `Family.save` wrote."""
    source = str(path)
    tensors, header = decode(read_bytes(path), FORMAT, VERSION, source)
    architecture = expect(header, "architecture", str, source)
    options = expect(header, "options", dict, source)
    try:
        model = build_model(architecture, options, source)
        model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    except MergettaError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise MergettaError(f"{source} does not fit its architecture {architecture!r}: {error}.") from error
    signature = header.get("signature")
    try:
        mean, std = (tuple(map(float, expect(header, key, list, source))) for key in ("mean", "std"))
        return Family(
            name=expect(header, "name", str, source),
            model=model.eval(),
            preprocessing=Preprocessing(mean, std, header.get("size")),
            classes=tuple(expect_names(header, "classes", source)),
            architecture=architecture,
            options=options,
            signature=None if signature is None else np.array(signature, dtype=np.float32),
        )
    except (TypeError, ValueError) as error:
        raise MergettaError(f"{source} has an invalid header: {error}") from error


def build_model(architecture: str, options: Mapping[str, Any], source: str) -> nn.Module:
    """A model that a file asks for. Only what can be built without running the file's choice of code."""
    if architecture in ARCHITECTURES:
        return ARCHITECTURES[architecture](**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
    library, _, name = architecture.partition(":")
    if library == "timm":
        from mergetta.models.timm_models import build_timm

        return build_timm(name, **options)
    if library == "hf":
        from mergetta.models.hf_models import build_hf

        return build_hf(name, options)
    hint = f": give it as the checkpoint of the family {architecture!r}" if name else ""
    raise MergettaError(f"{source} needs the architecture {architecture!r}, which this mergetta does not have{hint}.")


def embedded_families() -> list[str]:
    return sorted(path.stem for path in EMBEDDED.glob("*.safetensors"))
