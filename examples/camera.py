"""Predict what a camera sees, frame by frame, and adapt to it: `python examples/camera.py MODEL BUNDLE [SOURCE]`.

SOURCE is the number of a camera (default: 0), a video file or an address such as rtsp://…
"""

from __future__ import annotations

import sys

import cv2

from mergetta import Device


def main(model: str, bundle: str, source: str = "0") -> None:
    capture = cv2.VideoCapture(int(source) if source.isdecimal() else source)
    with Device(model, bundle) as device:
        grey = device.shape.channels == 1
        while (frame := capture.read()[1]) is not None:
            pixels = cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY if grey else cv2.COLOR_BGR2RGB)
            probabilities = device.predict(pixels)
            best = probabilities.argmax()
            print(f"{device.classes[best]} {probabilities[best]:.2f} · {device.status().phase}")


if __name__ == "__main__":
    main(*sys.argv[1:])
