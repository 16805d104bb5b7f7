"""Where a model is at home: what the images that it was made for look like to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from mergetta.arrays import Array, to_numpy
from mergetta.errors import MergettaError
from mergetta.models.family import Family
from mergetta.runtimes.torch_runtime import TorchRuntime
from mergetta.streams.moments import StreamMoments


def with_home(family: Family, clean: Iterable[Array]) -> Family:
    """The family with the signature of clean images, given in batches; one that has a signature stays as it is."""
    if family.signature is not None:
        return family
    runtime, seen = TorchRuntime(family), None
    for images in clean:
        signature = to_numpy(runtime(images, given=1.0).signature)
        seen = seen or StreamMoments(signature.shape[1])
        seen.add(signature, len(images))
    if seen is None:
        raise MergettaError("A signature needs at least one clean image to be measured on.")
    return dataclasses.replace(family, signature=seen.value().astype(np.float32))
