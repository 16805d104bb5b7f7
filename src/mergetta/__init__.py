"""mergetta keeps a deployed image classifier accurate when its data changes, on devices that only run inference.

    from mergetta import Bundle, RaceMerge, TorchRuntime

    adapter = RaceMerge(TorchRuntime(family), Bundle.load("bundle.safetensors"))
    for images in stream:                     # NCHW, raw pixels in [0, 1]
        logits = adapter.predict(images)

Importing mergetta is fast and needs no PyTorch; each name below is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mergetta.errors import MergettaError, how_to_install

if TYPE_CHECKING:
    from mergetta.adapters import create_adapter, list_adapters
    from mergetta.adapters.backprop.expert_training import train_expert
    from mergetta.adapters.forward_only.race_merge import RaceMerge
    from mergetta.adapters.forward_only.zo_merge import ZOMerge
    from mergetta.bundle import Bundle
    from mergetta.device.device import Device
    from mergetta.expert import Expert
    from mergetta.merging import build_bundle
    from mergetta.models.family import Family, load_family
    from mergetta.runtimes.onnx_runtime import OnnxRuntime
    from mergetta.runtimes.torch_runtime import TorchRuntime

__version__ = "0.1.0"

_HOMES = {
    "Bundle": "mergetta.bundle",
    "Device": "mergetta.device.device",
    "Expert": "mergetta.expert",
    "Family": "mergetta.models.family",
    "OnnxRuntime": "mergetta.runtimes.onnx_runtime",
    "RaceMerge": "mergetta.adapters.forward_only.race_merge",
    "TorchRuntime": "mergetta.runtimes.torch_runtime",
    "ZOMerge": "mergetta.adapters.forward_only.zo_merge",
    "build_bundle": "mergetta.merging",
    "create_adapter": "mergetta.adapters",
    "list_adapters": "mergetta.adapters",
    "load_family": "mergetta.models.family",
    "train_expert": "mergetta.adapters.backprop.expert_training",
}

__all__ = [
    "Bundle",
    "Device",
    "Expert",
    "Family",
    "MergettaError",
    "OnnxRuntime",
    "RaceMerge",
    "TorchRuntime",
    "ZOMerge",
    "build_bundle",
    "create_adapter",
    "list_adapters",
    "load_family",
    "train_expert",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mergetta' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MergettaError(f"{name} needs PyTorch: {how_to_install('torch')}") from error


def __dir__() -> list[str]:
    return sorted(__all__)
