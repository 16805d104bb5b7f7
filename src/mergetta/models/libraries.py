"""timm and transformers, which are not among the dependencies: the extras `timm` and `hf` have them."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from mergetta.errors import MergettaError, how_to_install

EXTRAS = {"timm": "timm", "transformers": "hf"}


def import_library(name: str) -> Any:
    """A library, or one sentence on what to install."""
    try:
        if find_spec("torchvision"):  # both import it if it is there, and transformers hides why it cannot
            import_module("torchvision")
        return import_module(name)
    except ImportError as error:
        raise MergettaError(f"{name} cannot be imported ({error}): {how_to_install(EXTRAS[name])}") from error
    except RuntimeError as error:  # its compiled operators belong to another build of torch
        build = torch.__version__.partition("+")[2]
        index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
        spared = "pip uninstall torchvision, which transformers can do without, or " if name == "transformers" else ""
        raise MergettaError(
            f"{name} needs a torchvision that belongs to torch {torch.__version__}, and the installed one does not "
            f"({error}): {spared}pip install --force-reinstall --no-deps torchvision=={version('torchvision')}{index}"
        ) from error
