"""Any image classifier of timm, as the family `timm:NAME`. Needs the extra `timm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from mergetta.errors import MergettaError
from mergetta.models.checkpoints import fitted, read_tensors
from mergetta.models.class_names import numbered_classes
from mergetta.models.discovery import find_classifier
from mergetta.models.family import Family, Preprocessing
from mergetta.models.libraries import import_library


def load_timm(name: str, checkpoint: str | Path | None) -> Family:
    """A timm model with its published weights, or with those of a checkpoint in its key layout."""
    if checkpoint is None:
        model = pretrained(name)
    else:
        source = f"The checkpoint {checkpoint} of 'timm:{name}'"
        model = fitted(lambda classes: build_timm(name, classes), read_tensors(checkpoint), source)
    facts = import_library("timm").data.resolve_model_data_config(model)
    preprocessing = Preprocessing(tuple(facts["mean"]), tuple(facts["std"]), facts["input_size"][-1])
    outputs = find_classifier(model).out_features
    options = {"classes": outputs}
    return Family(f"timm-{name}", model.eval(), preprocessing, numbered_classes(outputs), f"timm:{name}", options)


def build_timm(name: str, classes: int | None = None) -> nn.Module:
    """A timm model with random weights."""
    return create(name, **({} if classes is None else {"num_classes": classes}))


def pretrained(name: str) -> nn.Module:
    try:
        return create(name, pretrained=True)
    except MergettaError:
        raise
    except Exception as error:  # whatever its download clients raise
        first = str(error).strip().partition("\n")[0]
        raise MergettaError(
            f"The published weights of 'timm:{name}' cannot be had ({first}): connect once so that they are cached, or "
            "give a checkpoint."
        ) from error


def create(name: str, **keywords: Any) -> nn.Module:
    """Names that would make timm look elsewhere (hf-hub:, local-dir:) are refused: files may name models, too."""
    timm = import_library("timm")
    if not timm.is_model(name):
        raise MergettaError(f"timm has no model {name!r}: `timm.list_models()` lists them.")
    return timm.create_model(name, **keywords)
