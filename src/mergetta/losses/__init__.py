"""Label-free objectives, each written once for NumPy and torch."""

from __future__ import annotations

from typing import Any

from mergetta.errors import MergettaError
from mergetta.losses.base import Evaluation, Forward, Loss
from mergetta.losses.deyo import Deyo
from mergetta.losses.entropy import Entropy
from mergetta.losses.roid import Roid

LOSSES: dict[str, type[Loss]] = {"entropy": Entropy, "roid": Roid, "deyo": Deyo}


def create_loss(name: str, **options: Any) -> Loss:
    """A loss by name: `entropy`, `roid` or `deyo`."""
    if name not in LOSSES:
        raise MergettaError(f"There is no loss {name!r}; choose one of {', '.join(LOSSES)}.")
    return LOSSES[name](**options)


__all__ = ["LOSSES", "Deyo", "Entropy", "Evaluation", "Forward", "Loss", "Roid", "create_loss"]
