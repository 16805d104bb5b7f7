"""What a runtime is: it runs a forward pass with given groups. Adapters know nothing else of the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from mergetta.arrays import Array, array_namespace
from mergetta.errors import MergettaError
from mergetta.groups import Group, GroupValues, Vector, check_groups

TOLERANCE = 1e-3  # rounding of resized or augmented pixels


class Output(NamedTuple):
    """Arrays of the same library as the images."""

    logits: Array
    """(B, K)"""
    features: Array
    """(B, F): the input of the classifier."""
    signature: Array
    """(2, C): per-channel mean and variance after the stem, over this batch."""
    moments: Array | None = None
    """If asked for, (B, 2, C): mean and variance of each image in the input of every BatchNorm layer, side by side."""


PIXELS = 16 * 32 * 32
"""Pixels that go through a model at once if images do not depend on each other: 16 small images, or one large one. More
are not faster per image (measured from ResNet-20 to ResNet-50), and what lies between layers takes memory."""


def portion_of(images: Array) -> int:
    """How many of these images go through a model at once if they do not depend on each other."""
    height, width = images.shape[2:]
    return int(max(1, PIXELS // (height * width)))


def joined(outputs: Sequence[Output]) -> Output:
    """One output for several parts of a batch. Those that do not depend on each other may go one after the other."""
    if len(outputs) == 1:
        return outputs[0]
    xp = array_namespace(outputs[0].logits)
    logits, features = (xp.concat([getattr(each, name) for each in outputs]) for name in ("logits", "features"))
    means, variances = xp.unstack(xp.stack([each.signature for each in outputs]), axis=1)
    shares = xp.asarray([len(each.logits) / len(logits) for each in outputs], dtype=means.dtype, device=means.device)
    mean = shares @ means
    variance = shares @ (variances + (means - mean) ** 2)
    seen = [each.moments for each in outputs if each.moments is not None]
    return Output(logits, features, xp.stack([mean, variance]), xp.concat(seen) if len(seen) == len(outputs) else None)


Predict = Callable[[Array], Output]
"""One forward pass over raw pixels in [0, 1], NCHW."""


class Classifier(NamedTuple):
    weight: np.ndarray
    """(K, F)"""
    bias: np.ndarray
    """(K,); zeros if the layer has none."""


@runtime_checkable
class Runtime(Protocol):
    """A pure function of images and groups; nothing is loaded and remembered."""

    @property
    def family(self) -> str:
        """Fingerprint of the source model; empty if it has none."""

    @property
    def structure(self) -> tuple[Group, ...]:
        """Names, sizes, blocks and kinds of the groups, in the order of the forward pass."""

    @property
    def groups(self) -> dict[str, Vector]:
        """The source values θ₀."""

    @property
    def classes(self) -> int:
        """How many it tells apart."""

    @property
    def classifier(self) -> Classifier:
        """The last linear layer; of many classes it is large, so a device reads it only if it is asked for."""

    @property
    def signature(self) -> np.ndarray | None:
        """`Output.signature` on source data, if the family has one: the source model's place in CoLA's pool."""

    forwarded: int
    """How many images have gone through a forward pass."""

    def __call__(
        self, images: Array, groups: GroupValues | None = None, given: float | Vector = 0.0, moments: bool = False
    ) -> Output:
        """One forward pass over raw pixels in [0, 1], NCHW; preprocessing is the runtime's.

        `groups` are the source's unless given. `given` is the share α of their means and variances in what BatchNorm
        normalises with, for all channels or one number for each (as `moments_of` lays them out); the rest is the
        batch's own. 1 is independent of the batch. `moments` asks for those of each image at every BatchNorm layer.
        """

    def folded(self, groups: GroupValues) -> Predict:
        """The model with these groups for good, for a caller that has settled on them.

        It gives what `self(images, groups, given=1.0)` gives, at the cost of a plain model where the runtime can fold
        norm layers into the convolutions, and counts its images as `forwarded` here. Making it takes a moment.
        """


def unfolded(runtime: Runtime, groups: GroupValues) -> Predict:
    """`Runtime.folded` where nothing can be folded: the runtime itself, with a copy of the groups."""
    kept = copy_of(groups, runtime)

    def predict(images: Array) -> Output:
        return runtime(images, kept, 1.0)

    return predict


def copy_of(groups: GroupValues, runtime: Runtime) -> dict[str, Vector]:
    """Float32 vectors that nobody else can change, or one sentence if they are not groups of this runtime."""
    check_groups(groups, runtime.groups, "The set of groups")
    return {name: np.array(value, dtype=np.float32) for name, value in groups.items()}


def shares_of(given: float | Vector, channels: int) -> Vector:
    """One share per BatchNorm channel, or one sentence."""
    shares = np.asarray(given, dtype=np.float32)
    if not (shares.shape in ((), (channels,)) and ((shares >= 0) & (shares <= 1)).all()):
        raise MergettaError(f"given must lie between 0 and 1, as one number or one per channel, not {given}.")
    return np.broadcast_to(shares, channels)


def check_images(images: Array, channels: int | None) -> None:
    """One sentence on what is wrong with a batch, if anything is."""
    shape = tuple(images.shape)
    if len(shape) != 4 or not all(shape[1:]):
        raise MergettaError(f"Images must have shape (batch, channels, height, width), not {shape}.")
    if not shape[0]:
        raise MergettaError("The batch has no images.")
    if channels is not None and shape[1] != channels:
        raise MergettaError(f"The model takes images of {channels} channels, not {shape[1]}.")
    xp = array_namespace(images)
    low, high = float(xp.min(images)), float(xp.max(images))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise MergettaError("The images hold NaN or infinite pixels.")
    if low < -TOLERANCE or high > 1 + TOLERANCE:
        raise MergettaError(f"Pixels must lie in [0, 1], not in [{low:g}, {high:g}]: divide bytes by 255.")
