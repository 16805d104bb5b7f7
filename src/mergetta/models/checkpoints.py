"""Weights as others publish them: pickles of state dicts in various wrappings, and safetensors.

Pickles are read with `weights_only=True`: nothing in them is ever executed.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from mergetta.errors import MergettaError
from mergetta.models.discovery import find_classifier

WRAPPINGS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "model.", "_orig_mod.")
SHOWN = 3


def read_tensors(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint file, whatever it is called."""
    try:
        with Path(path).open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise MergettaError(f"Cannot read the checkpoint {path}: {error.strerror or error}.") from error
    # A safetensors file opens with the length of a JSON object in eight bytes; a pickle or a zip file never does so.
    tensors = read_safetensors(path) if start[8:] == b"{" else state_dict_in(read_pickle(path), path)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise MergettaError(f"The checkpoint {path} holds NaN or infinite values in {name!r}.")
    return tensors


def read_safetensors(path: str | Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except Exception as error:  # safetensors raises its own type, and KeyError on types torch lacks
        raise MergettaError(f"The checkpoint {path} is truncated or damaged: {error}.") from error


def read_pickle(path: str | Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can raise anything
        blocked = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and blocked:
            raise MergettaError(
                f"The checkpoint {path} was refused, because it holds more than weights ({blocked[1]}) and reading "
                "that could run code: save its state dict alone."
            ) from error
        raise MergettaError(f"The checkpoint {path} is truncated, damaged, or no checkpoint of PyTorch.") from error


def state_dict_in(content: Any, path: str | Path) -> dict[str, Tensor]:
    """The state dict in a training checkpoint, where it may stand beside an optimiser's or the model's name."""
    candidates = [content.get(key) for key in WRAPPINGS] if isinstance(content, Mapping) else []
    for candidate in (*candidates, content):
        if isinstance(candidate, Mapping):
            tensors = {str(name): value for name, value in candidate.items() if isinstance(value, Tensor)}
            if tensors:
                return tensors
    raise MergettaError(f"The checkpoint {path} holds no state dict.")


def without_prefix(tensors: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Drop what wrappers (DataParallel, torch.compile) put before every name, unless the model has it too."""
    wanted = list(model.state_dict())
    for _ in PREFIXES:
        for prefix in PREFIXES:
            if all(name.startswith(prefix) for name in tensors) and not all(n.startswith(prefix) for n in wanted):
                tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def fitted(
    build: Callable[[int | None], nn.Module],
    tensors: dict[str, Tensor],
    source: str,
    respell: Callable[[dict[str, Tensor], nn.Module], dict[str, Tensor]] | None = None,
) -> nn.Module:
    """`build(classes)` with the tensors in it; they decide how many classes there are, None is the usual number.

    `respell` brings other spellings of the tensors' names into those of the model.
    """
    model = build(None)
    tensors = without_prefix(tensors, model)
    if respell is not None:
        tensors = respell(tensors, model)
    outputs = count_outputs(model, tensors)
    if outputs != find_classifier(model).out_features:
        model = build(outputs)
    fit(model, tensors, source)
    return model


def count_outputs(model: nn.Module, tensors: Mapping[str, Tensor]) -> int:
    """How many classes the tensors have; the model's number if its classifier is not there or of another width."""
    classifier = find_classifier(model)
    name = next(name for name, module in model.named_modules() if module is classifier)
    weight = tensors.get(f"{name}.weight")
    if weight is None or weight.ndim != 2 or weight.shape[1] != classifier.in_features:
        return classifier.out_features
    return len(weight)


def fit(model: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Load tensors into a model, or say how they differ."""
    tensors, wanted = without_counts(tensors), without_counts(model.state_dict())
    missing = [name for name in wanted if name not in tensors]
    unexpected = [name for name in tensors if name not in wanted]
    differing = [
        f"{name} {tuple(tensor.shape)} instead of {tuple(wanted[name].shape)}"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    problems = [
        f"{len(names)} {what} ({', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''})"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", differing))
        if names
    ]
    if problems:
        raise MergettaError(f"{source} does not fit: {'; '.join(problems)}.")
    model.load_state_dict(tensors, strict=False)


def without_counts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """BatchNorm's count of batches matters in training only, and old checkpoints lack it."""
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("num_batches_tracked")}
