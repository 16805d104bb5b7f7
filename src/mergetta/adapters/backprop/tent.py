"""Tent (Wang et al. 2021): minimise the mean prediction entropy."""

from __future__ import annotations

from typing import Any

from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.losses import Entropy
from mergetta.runtimes.torch_runtime import TorchRuntime


class Tent(BackpropAdapter):
    def __init__(self, runtime: TorchRuntime, **options: Any) -> None:
        super().__init__(runtime, Entropy(), **{"nesterov": False, **options})
