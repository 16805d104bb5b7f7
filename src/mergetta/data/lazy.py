"""Images that are read when they are indexed, so that a domain of any size costs the memory of a batch."""

from __future__ import annotations

import io
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mergetta.data.images import as_array, checked_labels, open_image, read_npz
from mergetta.data.streams import Images
from mergetta.errors import MergettaError

Interpolation = Literal["bilinear", "bicubic"]


@lru_cache(maxsize=1)
def decoders() -> ThreadPoolExecutor:
    """One small pool for all: decoding releases Python's lock, and more threads than cores gain nothing."""
    return ThreadPoolExecutor(min(4, os.cpu_count() or 1), "mergetta-decode")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=decoders.cache_clear)  # threads do not survive a fork


class Encoded(ABC):
    """Encoded images, decoded in parallel, with the usual preprocessing of ImageNet: the shorter side is resized to
    `resize_to` (default: `size`) and the centre cut out; images of size × size are taken as they are."""

    def __init__(
        self,
        count: int,
        size: int,
        channels: int = 3,
        resize_to: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.count, self.size, self.channels = count, size, channels
        self.resize_to = size if resize_to is None else resize_to
        self.resample = Image.Resampling[interpolation.upper()]
        if not 1 <= size <= self.resize_to:
            raise MergettaError(f"Images resized to {self.resize_to} pixels cannot be cropped to {size}.")

    @abstractmethod
    def decode(self, number: int) -> Image.Image: ...

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[np.uint8]:
        chosen = np.arange(self.count)[index]
        result = np.empty((len(chosen), self.size, self.size, self.channels), np.uint8)
        for place, pixels in enumerate(decoders().map(self.pixels, chosen.tolist())):
            result[place] = pixels
        return result

    def pixels(self, number: int) -> NDArray[np.uint8]:
        return as_array(centre(self.decode(number), self.size, self.resize_to, self.resample))


def centre(image: Image.Image, size: int, resize_to: int, resample: Image.Resampling) -> Image.Image:
    """Resize and crop as torchvision does, to the pixel."""
    if image.size == (size, size):
        return image
    shorter = min(image.size)
    width, height = (int(resize_to * side / shorter) for side in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return image.resize((width, height), resample).crop((left, top, left + size, top + size))


class ImageFiles(Encoded):
    """JPEG, PNG, … files."""

    def __init__(
        self,
        paths: Sequence[str | Path],
        size: int,
        channels: int = 3,
        resize_to: int | None = None,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        super().__init__(len(paths), size, channels, resize_to, interpolation)
        self.paths = paths

    def decode(self, number: int) -> Image.Image:
        return open_image(self.paths[number], self.channels, str(self.paths[number]))


class JpegArchive(Encoded):
    """An npz file of JPEGs one after another (`jpeg`), where each begins (`off`, and the end), and labels (`y`)."""

    def __init__(
        self,
        path: Path,
        size: int = 224,
        resize_to: int | None = None,
        classes: int = 1000,
        interpolation: Interpolation = "bilinear",
    ) -> None:
        self.path = path
        self.data, self.offsets, labels = read_npz(path, ("jpeg",), ("off",), ("y",))
        if self.data.dtype != np.uint8 or self.data.ndim != 1:
            raise MergettaError(f"{path} must hold its JPEGs as uint8 (N,), not {self.data.dtype} {self.data.shape}.")
        offsets = self.offsets
        if (
            offsets.dtype.kind not in "iu"
            or offsets.ndim != 1
            or len(offsets) < 2
            or (offsets[:-1] > offsets[1:]).any()
            or (offsets[0], offsets[-1]) != (0, len(self.data))
        ):
            raise MergettaError(f"The offsets in {path} do not divide its {len(self.data)} bytes into JPEGs.")
        super().__init__(len(offsets) - 1, size, 3, resize_to, interpolation)
        self.labels = checked_labels(labels, self.count, classes, path)

    def decode(self, number: int) -> Image.Image:
        data = self.data[self.offsets[number] : self.offsets[number + 1]]
        return open_image(io.BytesIO(data.tobytes()), self.channels, f"{number} in {self.path}")


class Corrupted:
    """A view that corrupts on indexing; image i is drawn from (seed, corruption, i), whatever the batch.

    `frost` is the folder of frost's published textures, if they are to be used.
    """

    def __init__(
        self, images: Images, corruption: str, severity: int, seed: int = 0, frost: Path | None = None
    ) -> None:
        from mergetta.data.corruptions import check  # needs OpenCV, which reading images does not

        check(corruption, severity)
        self.images, self.corruption, self.severity, self.seed = images, corruption, severity, seed
        self.frost = frost

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[np.uint8]:
        from mergetta.data.corruptions import corrupt

        chosen = np.arange(len(self))[index]
        return corrupt(self.images[chosen], self.corruption, self.severity, self.seed, indices=chosen, frost=self.frost)


class Subset:
    """Some of the images, in the order of `indices`; of a `Corrupted` they stay what they are in the whole."""

    def __init__(self, images: Images, indices: NDArray[np.int64]) -> None:
        self.images, self.indices = images, np.arange(len(images))[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: NDArray[np.int64], /) -> NDArray[np.uint8]:
        return self.images[self.indices[index]]
