"""Digital: contrast, elastic transform, pixelate, JPEG."""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from mergetta.data.corruptions.planes import Generators, Images, drawn, gaussian_blur
from mergetta.errors import MergettaError


def contrast(x: Images, rngs: Generators, share: float) -> Images:
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * share + mean


def elastic_transform(x: Images, rngs: Generators, strength: tuple[float, float, float]) -> Images:
    """A random affine map, then every pixel from a little aside, along a smooth random field."""
    alpha, sigma, affine = strength
    height, width = x.shape[1:3]
    centre, square = np.array([width, height], np.float32) / 2, min(height, width) // 3
    points = centre + square * np.array([[1, 1], [1, -1], [-1, -1]], np.float32)
    moved = points + drawn(rngs, lambda rng: rng.uniform(-affine, affine, points.shape)).astype(np.float32)
    noise = drawn(rngs, lambda rng: rng.uniform(-1, 1, (height, width, 2))).astype(np.float32)
    field = alpha * gaussian_blur(noise, sigma)
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    result = np.empty_like(x)
    for i, image in enumerate(x):
        matrix = cv2.getAffineTransform(points, moved[i])
        image = cv2.warpAffine(
            image, matrix, (width, height), flags=cv2.INTER_LINEAR, borderMode=cv2.BORDER_REFLECT_101
        )
        image = cv2.remap(
            image,
            columns + field[i, ..., 0],
            rows + field[i, ..., 1],
            cv2.INTER_LINEAR,
            borderMode=cv2.BORDER_REFLECT_101,
        )
        result[i] = image.reshape(x[i].shape)
    return result


def pixelate(x: Images, rngs: Generators, share: float) -> Images:
    rows, columns = (coarse(size, max(1, int(size * share))) for size in x.shape[1:3])
    planes = x.transpose(0, 3, 1, 2)
    return (rows @ planes @ columns.T).transpose(0, 2, 3, 1)


def coarse(size: int, cells: int) -> NDArray[np.float32]:
    """(size, size): average over `cells` equal cells, then give each pixel the value of the cell it stands in."""
    edges = np.arange(cells + 1) * size / cells
    pixels = np.arange(size)
    overlap = np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels)
    shrink = np.clip(overlap, 0, None) * cells / size
    return shrink[((pixels + 0.5) * cells / size).astype(int)].astype(np.float32)


def jpeg_compression(x: Images, rngs: Generators, quality: int) -> Images:
    pixels = np.rint(x * 255).astype(np.uint8)[..., ::-1]  # OpenCV's channel order is BGR
    result = np.empty_like(pixels)
    for i, image in enumerate(np.ascontiguousarray(pixels)):
        done, data = cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, quality])
        if not done:
            raise MergettaError("OpenCV could not encode an image as JPEG.")
        decoded = cv2.imdecode(data, cv2.IMREAD_UNCHANGED)
        assert decoded is not None
        result[i] = decoded.reshape(image.shape)
    return result[..., ::-1].astype(np.float32) / 255
