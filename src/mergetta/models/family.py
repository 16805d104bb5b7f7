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
from mergetta.expert import check_statistics
from mergetta.files import decode, encode, expect, expect_names, read_bytes, write_atomically
from mergetta.groups import fingerprint
from mergetta.models.discovery import find_classifier
from mergetta.models.resnet50 import ResNet50
from mergetta.models.small_resnet import SmallResNet
from mergetta.models.small_vit import SmallViT

FORMAT, VERSION = "mergetta.checkpoint", 1
ARCHITECTURES: dict[str, Callable[..., nn.Module]] = {
    "resnet-50": ResNet50,
    "small-resnet": SmallResNet,
    "small-vit": SmallViT,
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
    model: nn.Module
    preprocessing: Preprocessing
    classes: tuple[str, ...]
    architecture: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    statistics: np.ndarray | None = None
    """Per-channel mean and variance after the stem on source data, (2, C): the source model's place in CoLA's pool."""

    def __post_init__(self) -> None:
        if self.statistics is not None:
            check_statistics(self.statistics)
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
            "statistics": None if self.statistics is None else self.statistics.tolist(),
        }
        tensors = {name: value.numpy(force=True) for name, value in self.model.state_dict().items()}
        write_atomically(path, encode(tensors, FORMAT, VERSION, header))


def load_family(name_or_path: str | Path) -> Family:
    """An embedded family by name (`fashion-bn`, `fashion-vit`), or any mergetta checkpoint by path."""
    path = EMBEDDED / f"{name_or_path}.safetensors"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        raise MergettaError(
            f"There is no family or checkpoint file {str(name_or_path)!r}; embedded: {', '.join(embedded_families())}."
        )
    source = str(path)
    tensors, header = decode(read_bytes(path), FORMAT, VERSION, source)
    architecture = expect(header, "architecture", str, source)
    if architecture not in ARCHITECTURES:
        raise MergettaError(f"{source} needs the architecture {architecture!r}, which this mergetta does not have.")
    options = expect(header, "options", dict, source)
    try:
        model = ARCHITECTURES[architecture](**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
        model.load_state_dict({name: torch.from_numpy(np.array(value)) for name, value in tensors.items()})
    except (RuntimeError, TypeError, ValueError, IndexError, ZeroDivisionError) as error:
        raise MergettaError(f"{source} does not fit its architecture {architecture!r}: {error}.") from error
    statistics = header.get("statistics")
    try:
        mean, std = (tuple(map(float, expect(header, key, list, source))) for key in ("mean", "std"))
        return Family(
            name=expect(header, "name", str, source),
            model=model.eval(),
            preprocessing=Preprocessing(mean, std, header.get("size")),
            classes=tuple(expect_names(header, "classes", source)),
            architecture=architecture,
            options=options,
            statistics=None if statistics is None else np.array(statistics, dtype=np.float32),
        )
    except (TypeError, ValueError) as error:
        raise MergettaError(f"{source} has an invalid header: {error}") from error


def embedded_families() -> list[str]:
    return sorted(path.stem for path in EMBEDDED.glob("*.safetensors"))
