"""timm and transformers for tests, also where torchvision was built for another torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

_operators: list[torch.library.Library] = []


def import_zoo(name: str) -> Any:
    """The library, or the test is skipped.

    Both import torchvision, whose compiled operators do not load beside another build of torch than their own. Nothing
    that is tested calls them, so that they need only be declared. Users are told what to install
    (`TestLibraries` in test_families.py, without any of this).
    """
    found = find_spec("torchvision")
    if found and found.origin and not _operators:
        try:
            torch.ops.load_library(Path(found.origin).with_name("_C.so"))
        except OSError:
            _operators.append(torch.library.Library("torchvision", "DEF"))
            for operator in ("nms", "qnms"):
                _operators[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return pytest.importorskip(name)
