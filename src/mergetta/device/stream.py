"""Images as they arrive on a device: a folder, an npz file, a video, a camera, or raw frames on standard input."""

from __future__ import annotations

import hashlib
import io
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mergetta.data.images import SUFFIXES, as_array, image_files, load_npz, open_image, resized
from mergetta.errors import MergettaError
from mergetta.files import read_bytes

Pixels = NDArray[np.uint8]
Done = AbstractSet[tuple[str, str]]
"""Names and contents of images that were predicted before."""
PAUSE = 1.0
"""Seconds without an item after which whoever reads a stream is idle."""
VIDEOS = {".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"}


class Item(NamedTuple):
    """One image of the stream, or why it cannot be used."""

    name: str
    """Empty in a live stream: its number will do."""
    image: Pixels | None
    problem: str = ""
    content: str = ""
    """A digest; empty if there is nothing that could be read again."""


@dataclass(frozen=True)
class ImageShape:
    """What a model takes, and whether images of another size are made to fit."""

    channels: int
    size: int
    resize: bool = True

    def fit(self, image: Pixels) -> Pixels:
        """(size, size, channels), or one sentence."""
        height, width, channels = image.shape
        if channels != self.channels:
            hint = advice(image.shape, self.channels)
            raise MergettaError(f"The image has {channels} channels, not {self.channels}{hint}.")
        if (height, width) == (self.size, self.size):
            return image
        if not self.resize:
            raise MergettaError(f"The image has {height}x{width} pixels, not {self.size}x{self.size}.")
        return resized(image, self.size)


def advice(shape: tuple[int, ...], channels: int) -> str:
    """How an array becomes an image of so many channels."""
    if shape[0] == channels:
        return ": channels come last, so give image.transpose(1, 2, 0)"
    if shape[2] == 1:
        return f": a grey image becomes one of colours by image.repeat({channels}, axis=2)"
    return ": convert it to grey" if channels == 1 else ""


def open_stream(
    source: str,
    shape: ImageShape,
    done: Callable[[], Done] = frozenset,
    frame: tuple[int, int] | None = None,
    stdin: BinaryIO | None = None,
) -> Iterator[Item]:
    """All items that are not done, or one sentence. A live stream cannot be read again and has only new ones."""
    if source == "-":
        return frames(stdin or standard_input(), shape, frame or (shape.size, shape.size))
    if source.startswith("camera:") or "://" in source:
        from mergetta.device.video import live

        return (Item("", shape.fit(image)) for image in live(source, shape.channels))
    path = Path(source)
    if path.is_dir():
        return folder(path, image_files(path), shape, done())
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return folder(path.parent, [path], shape, done())
    if path.suffix.lower() in VIDEOS:
        from mergetta.device.video import recorded

        return array(recorded(path, shape.channels), shape, done())
    return array(load_npz(path), shape, done())


def array(images: Iterable[Pixels], shape: ImageShape, done: Done) -> Iterator[Item]:
    """Each is named after its number."""
    for number, pixels in enumerate(images):
        name, content = str(number), digest(pixels.tobytes())
        if (name, content) in done:
            continue
        try:
            item = Item(name, shape.fit(pixels), content=content)
        except MergettaError as error:
            item = Item(name, None, str(error), content)
        yield item


def folder(path: Path, files: list[Path], shape: ImageShape, done: Done) -> Iterator[Item]:
    """Each is named after its file. A bad one is not fatal, and another image once its content is another."""
    for file in files:
        name, content, image, problem = file.relative_to(path).as_posix(), "", None, ""
        try:
            data = read_bytes(file)
            content = digest(data)
            if (name, content) not in done:
                image = shape.fit(as_array(open_image(Content(data), shape.channels, str(file))))
        except MergettaError as error:
            problem = str(error)
        if (name, content) not in done:
            yield Item(name, image, problem, content)


class Content(io.BytesIO):
    """Of a file; errors of Pillow quote it."""

    def __repr__(self) -> str:
        return f"of {self.getbuffer().nbytes} bytes"


def frames(stdin: BinaryIO, shape: ImageShape, frame: tuple[int, int]) -> Iterator[Item]:
    """uint8 frames, row by row, channels last; a cut-off last frame is told."""
    size = frame[0] * frame[1] * shape.channels
    while data := exactly(stdin, size):
        if len(data) < size:
            yield Item("", None, f"was cut off after {len(data)} of {size} bytes")
            return
        yield Item("", shape.fit(np.frombuffer(data, np.uint8).reshape(*frame, shape.channels)))


def standard_input() -> BinaryIO:
    """Without a buffer, whose lock a thread that waits for a frame would hold when the program ends."""
    try:
        return open(0, "rb", buffering=0, closefd=False)
    except OSError as error:
        raise MergettaError("There is no standard input to read frames from.") from error


def exactly(file: BinaryIO, size: int) -> bytes:
    """So many bytes, or fewer at the end; a pipe gives what it has."""
    data = b""
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    return data


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class Batches:
    """Lists of up to `size` items, which a thread reads ahead, so that neither a clock nor a signal waits for an item.

    A list is shorter at the end of the stream, and where its first item has waited for `max_wait` seconds. `idle` is
    called where no item comes for a second.
    """

    def __init__(
        self, items: Iterator[Item], size: int, max_wait: float | None = None, idle: Callable[[], None] = lambda: None
    ) -> None:
        self.size, self.max_wait, self.idle = size, max_wait, idle
        self._left = False
        self._queue: SimpleQueue[Item | Exception | None] = SimpleQueue()
        self._room = threading.Semaphore(size)
        self._thread = threading.Thread(target=self._read, args=(items,), name="mergetta-stream", daemon=True)

    def stop(self) -> None:
        """End with what was read; also from a signal handler."""
        self._queue.put(None)

    def _read(self, items: Iterator[Item]) -> None:
        last: Exception | None = None
        try:
            for item in items:
                self._room.acquire()
                if self._left:
                    return
                self._queue.put(item)
        except Exception as error:  # for who waits for the items
            last = error
        self._queue.put(last)

    def __iter__(self) -> Iterator[list[Item]]:
        self._thread.start()
        try:
            while True:
                batch, last, ended = self._gather()
                if batch:
                    yield batch
                if last:
                    raise last
                if ended:
                    return
        finally:
            self._left = True
            self._room.release()
            self._thread.join(0.2)  # time to let go of a camera; a pipe in which nothing comes is not waited for

    def _gather(self) -> tuple[list[Item], Exception | None, bool]:
        """(items, what went wrong after them, whether they were the last)."""
        batch: list[Item] = []
        deadline = math.inf
        while len(batch) < self.size:
            left = deadline - time.monotonic()
            try:
                item = self._queue.get(timeout=min(PAUSE, max(0.0, left)))
            except Empty:
                if left <= PAUSE:
                    break
                self.idle()
                continue
            if not isinstance(item, Item):
                return batch, item, True
            self._room.release()
            batch.append(item)
            if self.max_wait is not None and len(batch) == 1:
                deadline = time.monotonic() + self.max_wait
        return batch, None, False
