"""One's own families: `module:function`, a function that returns a `Family`, or a model and keywords."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mergetta.errors import MergettaError
from mergetta.models.checkpoints import fit, read_tensors, without_prefix
from mergetta.models.class_names import numbered_classes
from mergetta.models.discovery import find_classifier, find_stem
from mergetta.models.family import Family, Preprocessing

PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_own(name: str, checkpoint: str | Path | None) -> Family:
    """Call the function; a checkpoint, if given, replaces the weights of what it returns.

    Without one it is called twice: a model whose weights are drawn anew each time was never trained.
    """
    family = made(name)
    if checkpoint is not None:
        fit(family.model, without_prefix(read_tensors(checkpoint), family.model), f"The checkpoint {checkpoint}")
        return family
    again = made(name).model.state_dict()
    if any(not torch.equal(value, again[key]) for key, value in family.model.state_dict().items()):
        raise MergettaError(f"{name} makes a model with random weights: give its checkpoint.")
    return family


def made(name: str) -> Family:
    """What the function makes, as a family."""
    match called(name):
        case Family() as family:
            pass
        case nn.Module() as model:
            family = family_of(name, model, {})
        case (nn.Module() as model, dict() as keywords):
            family = family_of(name, model, keywords)
        case other:
            raise MergettaError(
                f"{name} must return a Family, or a model and a dict of mean, std, size, classes, not {type(other)}."
            )
    return family


def family_of(name: str, model: nn.Module, keywords: dict[str, Any]) -> Family:
    """Without keywords: pixels as they are, classes by number."""
    unknown = keywords.keys() - {"mean", "std", "size", "classes"}
    if unknown:
        raise MergettaError(f"{name} returns the unknown keyword {min(unknown)!r}; known: mean, std, size, classes.")
    channels = getattr(find_stem(model), "in_channels", 3)
    mean, std = (tuple(keywords.get(key, (value,) * channels)) for key, value in (("mean", 0.0), ("std", 1.0)))
    classes = tuple(keywords.get("classes") or numbered_classes(find_classifier(model).out_features))
    preprocessing = Preprocessing(mean, std, keywords.get("size"))
    return Family(name.replace(":", "-"), model.eval(), preprocessing, classes, name)


def called(name: str) -> Any:
    """What the function returns; an error of one's own code is told with its place."""
    try:
        return find_function(name)()
    except MergettaError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise MergettaError(
            f"{name} fails in line {place.lineno} of {place.filename}: {type(error).__name__}: {error}."
        ) from error


def find_function(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it; an installed command does not
        sys.path.append(here)
    try:
        function = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise MergettaError(f"There is no family {name!r}: {error}.") from error
    except AttributeError as error:
        raise MergettaError(f"There is no family {name!r}: the module has no {attribute!r}.") from error
    if not callable(function):
        raise MergettaError(f"{name} is not a function.")
    return function
