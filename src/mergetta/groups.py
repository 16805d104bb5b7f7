"""Which vectors adapt: a group is the scale, the shift, the mean or the variance of one norm layer. Torch-free.

Scale and shift are the paper's learnable weights. Mean and variance are what a BatchNorm layer normalises with: its
moments. A group is called by its place in the model's state dict, and the last part of the name tells its kind.
`mergetta.models.discovery` finds the groups of a torch model; everything else only needs what is written here.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.files import sha256

Vector = NDArray[Any]
GroupValues = Mapping[str, Vector]

KINDS = {"weight": "scale", "bias": "shift", "running_mean": "mean", "running_var": "variance"}
"""The kind of a group by the last part of its name."""
SMALLEST = 1e-3
"""A merged variance is at least so many times the source's: mixtures of few directions may come out below zero."""


@dataclass(frozen=True)
class Group:
    """One vector of a norm layer. `block` is 0 for the stem, then 1, 2, … in the order of the forward pass."""

    name: str
    size: int
    block: int
    kind: str
    """scale, shift, mean or variance."""
    stage: bool = False
    """Whether blocks are stages of several units (ResNet), not the units themselves (ViT)."""


def kind_of(name: str) -> str:
    """The kind of a group by its name; what is called otherwise counts as a weight that can be learnt.

    >>> kind_of("layer1.0.bn1.running_var"), kind_of("norm.bias"), kind_of("prompts")
    ('variance', 'shift', 'scale')
    """
    return KINDS.get(name.rpartition(".")[2], "scale")


def learnable(names: Iterable[str]) -> tuple[str, ...]:
    """The groups that the paper's method merges and moves: no means and no variances."""
    return tuple(name for name in names if kind_of(name) not in ("mean", "variance"))


def has_batch_norm(structure: Iterable[Group]) -> bool:
    return any(group.kind == "mean" for group in structure)


def moment_pairs(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """(mean, variance) of each BatchNorm layer, in order; one without the other is refused."""
    return pairs_among(tuple(names))


@functools.lru_cache(maxsize=64)  # devices ask several times in every step
def pairs_among(known: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    means = [name for name in known if kind_of(name) == "mean"]
    pairs = tuple((name, f"{name.removesuffix('running_mean')}running_var") for name in means)
    alone = (set(known) - set(learnable(known))) ^ {name for pair in pairs for name in pair}
    if alone:
        raise MergettaError(f"The group {min(alone)!r} stands alone: a mean and a variance belong together.")
    return pairs


def layer_sizes(names: GroupValues) -> list[int]:
    """Channels of each BatchNorm layer, in order."""
    return [int(np.size(names[mean])) for mean, _ in moment_pairs(names)]


def moments_of(values: GroupValues, order: Iterable[str] | None = None) -> NDArray[Any]:
    """The means and the variances of all BatchNorm layers side by side, (2, channels of all of them).

    In the order of the names as given, which must be a runtime's own if they meet what it reports; a file may have
    its groups in another one.
    """
    pairs = moment_pairs(values if order is None else order)
    if not pairs:
        return np.zeros((2, 0), np.float32)
    return np.stack([np.concatenate([values[pair[row]] for pair in pairs]) for row in (0, 1)])


def with_moments(values: GroupValues, moments: NDArray[Any], order: Iterable[str] | None = None) -> dict[str, Vector]:
    """The groups with other means and variances: the inverse of `moments_of`."""
    pairs = moment_pairs(values if order is None else order)
    changed, start, rows = dict(values), 0, np.asarray(moments, dtype=np.float32)
    for pair in pairs:
        end = start + np.size(values[pair[0]])
        changed[pair[0]], changed[pair[1]] = rows[0, start:end], rows[1, start:end]
        start = end
    return changed


def as_float32(values: GroupValues) -> dict[str, Vector]:
    """As experts and bundles hold them; what is too large becomes infinite, and is refused as such."""
    with np.errstate(over="ignore"):
        return {name: np.asarray(vector, dtype=np.float32) for name, vector in values.items()}


def as_mixed(values: GroupValues) -> dict[str, Vector]:
    """The groups as they mix linearly: second moments instead of variances, so that a mixture of domains is exact."""
    seconds = {v: np.asarray(values[v]) + np.asarray(values[m]) ** 2 for m, v in moment_pairs(values)}
    return {**values, **seconds}


def from_mixed(mixed: GroupValues, base: GroupValues) -> dict[str, Vector]:
    """The inverse of `as_mixed`; `base` says how small a variance may become."""
    variances = {
        v: np.maximum(mixed[v] - mixed[m] ** 2, SMALLEST * np.asarray(base[v])) for m, v in moment_pairs(mixed)
    }
    return {**mixed, **variances}


def mixture_shares(weights: NDArray[Any]) -> NDArray[Any]:
    """What merge weights mean for moments: those of a mixture of domains, which the source fills up to one.

    Weights may add up to more (the paper's 14 × 0.1, or a multiple of the experts' mean): scales and shifts point
    further then, but no mixture has more than all of its domains.

    >>> mixture_shares(np.array([0.6, 1.0])).round(3).tolist()
    [0.375, 0.625]
    """
    return weights / max(1.0, float(np.abs(weights).sum()))


def last_blocks(groups: Iterable[Group], count: int) -> tuple[str, ...]:
    """Names of the groups in the last `count` blocks: what the paper merges but does not optimise.

    >>> last_blocks([Group("a", 4, 0, "scale"), Group("b", 4, 1, "scale"), Group("c", 4, 2, "scale")], 1)
    ('c',)
    """
    groups = [group for group in groups if group.kind not in ("mean", "variance")]
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
    wanted = 1 if has_batch_norm(groups) or any(group.stage for group in groups) else 3
    return last_blocks(groups, max(0, min(wanted, len({group.block for group in groups} - {0}) - 1)))


def fingerprint(tensors: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> str:
    """A short digest of weights and of everything else (architecture, preprocessing) that defines a family."""
    digest = sha256(json.dumps(dict(facts), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = np.ascontiguousarray(tensors[name])
        digest.update(f"{name} {tensor.dtype.str} {tensor.shape}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()[:16]


def check_base(base: GroupValues, groups: GroupValues, what: str) -> None:
    """Raise unless a base is that of a model with these groups, value by value: whoever wrote another one into a hub
    would choose what every device runs.
    """
    check_groups(base, groups, what)
    for name, vector in base.items():
        if not np.allclose(vector, groups[name], rtol=1e-3, atol=1e-5):
            raise MergettaError(f"{what} starts from another source model: its group {name!r} is not this model's.")


def check_groups(values: GroupValues, reference: GroupValues, what: str) -> None:
    """Raise unless `values` has exactly the groups of `reference`, with its sizes: vectors, all finite, and means and
    variances in pairs.
    """
    pairs = moment_pairs(values)
    uneven = [(m, v) for m, v in pairs if np.shape(values[m]) != np.shape(values[v])]
    if values.keys() == reference.keys() and not uneven:  # the usual case, checked at once: devices do so in every step
        shapes = [np.shape(vector) for vector in values.values()]
        fits = shapes == [np.shape(reference[name]) for name in values] and {len(shape) for shape in shapes} == {1}
        sound = fits and (0,) not in shapes and np.isfinite(np.concatenate(list(values.values()))).all()
        if sound and not (pairs and np.concatenate([values[variance] for _, variance in pairs]).min() < 0):
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
        if kind_of(name) == "variance" and (vector < 0).any():
            raise MergettaError(f"{what} holds negative variances in group {name!r}.")
    if uneven:
        raise MergettaError(f"{what} has a mean and a variance of different sizes: {uneven[0][0]!r}.")
