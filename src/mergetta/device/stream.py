"""Images as they arrive on a device: a folder, an npz file, or raw frames on standard input; a bad one is not fatal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergetta.data.images import image_files, load_npz, read_image
from mergetta.errors import MergettaError


class Item(NamedTuple):
    """One image of the stream, or why it cannot be used."""

    number: int
    name: str
    image: NDArray[np.uint8] | None
    problem: str = ""


def open_stream(
    source: str,
    channels: int,
    size: int,
    start: int = 0,
    frame: tuple[int, int] | None = None,
    stdin: BinaryIO | None = None,
) -> Iterator[Item]:
    """Items from number `start` on; standard input (`-`) cannot be wound back and goes on where it is."""
    if source == "-":
        if stdin is None:
            raise MergettaError("There is no standard input to read frames from.")
        return frames(stdin, channels, frame or (size, size), start)
    path = Path(source)
    if path.is_dir():
        return folder(path, channels, size, start)
    return array(load_npz(path), channels, start)


def array(images: NDArray[np.uint8], channels: int, start: int) -> Iterator[Item]:
    for index in range(start, len(images)):
        yield checked(index, str(index), images[index], channels)


def folder(path: Path, channels: int, size: int, start: int) -> Iterator[Item]:
    for number, file in enumerate(image_files(path)[start:], start):
        name = file.relative_to(path).as_posix()
        try:
            yield Item(number, name, read_image(file, channels, size))
        except MergettaError as error:
            yield Item(number, name, None, str(error))


def frames(stdin: BinaryIO, channels: int, frame: tuple[int, int], start: int) -> Iterator[Item]:
    """uint8 frames, row by row, channels last; a cut-off last frame is told."""
    height, width = frame
    size = height * width * channels
    index = start
    while data := stdin.read(size):
        if len(data) < size:
            yield Item(index, str(index), None, f"was cut off after {len(data)} of {size} bytes")
            return
        yield Item(index, str(index), np.frombuffer(data, np.uint8).reshape(height, width, channels))
        index += 1


def checked(index: int, name: str, image: NDArray[np.uint8], channels: int) -> Item:
    if image.shape[2] != channels:
        return Item(index, name, None, f"has {image.shape[2]} channels, not {channels}")
    return Item(index, name, image)


def batched(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Lists of up to `size` items; the last may be shorter."""
    batch: list[Item] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
