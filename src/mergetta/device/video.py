"""Frames of a camera, a network stream or a video file, through OpenCV."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError, how_to_install


def live(source: str, channels: int) -> Iterator[NDArray[np.uint8]]:
    """`camera:NUMBER`, or an address such as `rtsp://…`: frames until there are no more, which is told."""
    number = source.removeprefix("camera:")
    if number != source and not number.isdecimal():
        raise MergettaError(f"A camera has a number, as in camera:0, not {number!r}.")
    capture = opened(int(number) if number != source else source, source)
    return frames(capture, channels, f"{source} gives no more frames.")


def recorded(path: Path, channels: int) -> Iterator[NDArray[np.uint8]]:
    """All frames of a video file."""
    if not path.is_file():
        raise MergettaError(f"There is no file {path}.")
    return frames(opened(str(path), str(path)), channels)


def opened(source: str | int, name: str) -> Any:
    try:
        import cv2
    except ModuleNotFoundError as error:
        raise MergettaError(f"Cameras and videos need OpenCV: {how_to_install('video')}") from error
    capture = cv2.VideoCapture(source)
    if not capture.isOpened():
        raise MergettaError(f"OpenCV cannot open {name}.")
    return capture


def frames(capture: Any, channels: int, end: str = "") -> Iterator[NDArray[np.uint8]]:
    """(H, W, C) in the model's number of channels; `end` is what is wrong with an end."""
    import cv2

    try:
        while True:
            read, frame = capture.read()
            if not read:
                break
            pixels = cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY if channels == 1 else cv2.COLOR_BGR2RGB)
            yield pixels[..., None] if channels == 1 else pixels
    finally:
        capture.release()
    if end:
        raise MergettaError(end)
