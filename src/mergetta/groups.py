"""Which weights adapt: a group is the scale or the shift of one norm layer. Torch-free.

`mergetta.models.discovery` finds the groups of a torch model; everything else only needs what is written here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError

Vector = NDArray[Any]
GroupValues = Mapping[str, Vector]


@dataclass(frozen=True)
class Group:
    """One learnable tensor. `block` is 0 for the stem, then 1, 2, … in the order of the forward pass."""

    name: str
    size: int
    block: int
    kind: str
    """Of its norm layer: batch, layer, group or rms."""
    stage: bool = False
    """Whether blocks are stages of several units (ResNet), not the units themselves (ViT)."""


def last_blocks(groups: Iterable[Group], count: int) -> tuple[str, ...]:
    """Names of the groups in the last `count` blocks: what the paper merges but does not optimise.

    >>> last_blocks([Group("a", 4, 0, "layer"), Group("b", 4, 1, "layer"), Group("c", 4, 2, "layer")], 1)
    ('c',)
    """
    groups = list(groups)
    blocks = sorted({group.block for group in groups if group.block > 0})
    if not 0 <= count <= len(blocks):
        raise MergettaError(f"Cannot freeze the last {count} blocks: this model has {len(blocks)}.")
    chosen = set(blocks[len(blocks) - count :])
    return tuple(group.name for group in groups if group.block in chosen)


def paper_frozen(groups: Iterable[Group]) -> tuple[str, ...]:
    """What the paper does not optimise: the last stage of a CNN, the last three blocks of a transformer.

    At least one block is left to move.
    """
    groups = list(groups)
    wanted = 1 if any(group.stage or group.kind == "batch" for group in groups) else 3
    return last_blocks(groups, max(0, min(wanted, len({group.block for group in groups} - {0}) - 1)))


def fingerprint(tensors: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> str:
    """A short digest of weights and of everything else (architecture, preprocessing) that defines a family."""
    digest = hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()[:16]


def check_groups(values: GroupValues, reference: GroupValues, what: str) -> None:
    """Raise unless `values` has exactly the groups of `reference`, with its sizes: vectors, all finite."""
    if values.keys() == reference.keys():  # the usual case, checked at once: devices load groups in every step
        shapes = [np.shape(vector) for vector in values.values()]
        fits = shapes == [np.shape(reference[name]) for name in values] and {len(shape) for shape in shapes} == {1}
        if fits and (0,) not in shapes and np.isfinite(np.concatenate(list(values.values()))).all():
            return
    missing = [name for name in reference if name not in values]
    if missing:
        raise MergettaError(f"{what} lacks the group {missing[0]!r} ({len(missing)} missing): wrong family?")
    extra = [name for name in values if name not in reference]
    if extra:
        raise MergettaError(f"{what} has an unknown group {extra[0]!r} ({len(extra)} unknown): wrong family?")
    for name, vector in values.items():
        if np.shape(vector) != np.shape(reference[name]):
            raise MergettaError(
                f"{what} has shape {np.shape(vector)} in group {name!r}, expected {np.shape(reference[name])}."
            )
        if np.ndim(vector) != 1 or not np.size(vector):
            raise MergettaError(f"{what} has shape {np.shape(vector)} in group {name!r}; a vector is needed.")
        if not np.isfinite(vector).all():
            raise MergettaError(f"{what} holds NaN or infinite values in group {name!r}.")
