"""Any image classifier of Hugging Face transformers, as the family `hf:NAME`. Needs the extra `hf`."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mergetta.errors import MergettaError
from mergetta.models.checkpoints import fitted, read_tensors
from mergetta.models.class_names import numbered_classes
from mergetta.models.discovery import find_classifier
from mergetta.models.family import Family, Preprocessing
from mergetta.models.libraries import import_library

NOT_ARCHITECTURE = {"id2label", "label2id", "num_labels", "model_type", "transformers_version",
                    "_name_or_path", "dtype", "torch_dtype", "auto_map", "problem_type"}  # fmt: skip
"""Entries of a configuration that do not change what is computed, or that stand elsewhere in a family."""


class Logits(nn.Module):
    """A transformers model as a plain classifier: images in, logits out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(pixel_values=x).logits


def load_hf(name: str, checkpoint: str | Path | None) -> Family:
    """A model of the Hugging Face hub (or a folder), with its weights or with those of a checkpoint in its layout."""
    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise MergettaError(f"There is no folder {name} with a model of transformers.")
    hf = import_library("transformers")
    try:
        config = hf.AutoConfig.from_pretrained(name, trust_remote_code=False)
        processor, _ = hf.ImageProcessingMixin.get_image_processor_dict(name)
        if checkpoint is None:
            automatic = hf.AutoModelForImageClassification
            model = automatic.from_pretrained(name, config=config, trust_remote_code=False).float()
    except Exception as error:  # whatever its download clients and configurations raise
        first = str(error).strip().partition("\n")[0]
        advice = (
            "a folder must have config.json, preprocessor_config.json and weights, as `save_pretrained` writes them"
            if Path(name).is_dir()
            else "connect once so that it is cached, or give the folder that holds it"
        )
        raise MergettaError(f"'hf:{name}' cannot be had ({first}): {advice}.") from error
    options = {**architecture_of(config), "num_labels": config.num_labels}
    if checkpoint is not None:
        source = f"The checkpoint {checkpoint} of 'hf:{name}'"

        def build(classes: int | None) -> nn.Module:
            return build_hf(config.model_type, {**options, "num_labels": classes or config.num_labels}).model

        model = fitted(build, read_tensors(checkpoint), source)
    outputs = options["num_labels"] = find_classifier(model).out_features
    return Family(
        "hf-" + re.sub(r"[^\w.+-]+", "-", Path(name).name if Path(name).is_dir() else name),
        Logits(model).eval(),
        preprocessing_of(processor, config),
        class_names(config) if outputs == config.num_labels else numbered_classes(outputs),
        f"hf:{config.model_type}",
        options,
    )


def build_hf(model_type: str, options: Mapping[str, Any]) -> Logits:
    """A model with random weights, of a class that transformers itself has."""
    hf = import_library("transformers")
    try:
        config = hf.AutoConfig.for_model(model_type, **options)
        return Logits(hf.AutoModelForImageClassification.from_config(config, trust_remote_code=False))
    except Exception as error:  # its checks of configurations raise many types
        first = str(error).strip().partition("\n")[0]
        raise MergettaError(f"transformers cannot build the image classifier {model_type!r}: {first}") from error


def architecture_of(config: Any) -> dict[str, Any]:
    """What of a configuration defines the model, as JSON has it, so that a saved family has the same fingerprint."""
    entries = json.loads(json.dumps(config.to_diff_dict()))
    return {key: value for key, value in entries.items() if key not in NOT_ARCHITECTURE}


def preprocessing_of(processor: Mapping[str, Any], config: Any) -> Preprocessing:
    """(x · 255 · factor − mean) / std of an image processor, for pixels in [0, 1]."""
    channels = getattr(config, "num_channels", 3)
    scale = 255 * processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 255.0
    mean, std = [0.0] * channels, [1.0] * channels
    if processor.get("do_normalize", True):
        mean, std = (processor.get(f"image_{key}", [0.5] * channels) for key in ("mean", "std"))
    again = std if processor.get("include_top") else [1.0] * channels  # EfficientNet divides by std a second time
    cropped = processor.get("do_center_crop") and processor.get("crop_size")
    return Preprocessing(
        tuple(m / scale for m in mean),
        tuple(s * a / scale for s, a in zip(std, again, strict=True)),
        edge(cropped or processor.get("size") or getattr(config, "image_size", None)),
    )


def edge(size: Any) -> int | None:
    """Image processors write a size as a number or by its edges."""
    if isinstance(size, Mapping):
        size = size.get("height") or size.get("shortest_edge")
    return size if isinstance(size, int) else None


def class_names(config: Any) -> tuple[str, ...]:
    """ImageNet has two cranes: a name that occurs twice gets its number."""
    names = [str(config.id2label[index]) for index in range(config.num_labels)]
    count = Counter(names)
    return tuple(f"{name} ({index})" if count[name] > 1 else name for index, name in enumerate(names))
