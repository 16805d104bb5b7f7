"""Texture from the painting itself: each place of an image gets a patch whose coarse colours match its own.

The idea of image quilting (Efros & Freeman 2001), on a fixed grid, with a smooth window instead of a cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from mergetta.seeds import generator

GRID = 16  # half patches across the shorter side of an image
VARIETY = 0.05  # noise on the colours looked for, so that a plain area is not one patch repeated


@dataclass(frozen=True)
class Patches:
    """Patches of two by two cells; the mean colours of the cells are what a patch is found by."""

    cell: int
    pixels: NDArray[np.float32]
    """(Q, C, 2·cell, 2·cell), faded out towards their borders."""
    keys: NDArray[np.float32]
    """(4·C + 1, Q): the colours, and minus half their squared length, so that one product ranks by distance."""

    @classmethod
    def of(cls, painting: NDArray[np.float32], size: int) -> Patches:
        """Overlapping patches of a painting (C, H, W), for images of `size` pixels."""
        cell = max(1, round(size / GRID))
        views = sliding_window_view(painting, (2 * cell, 2 * cell), axis=(1, 2))
        views = views[:, :: max(1, cell // 2), :: max(1, cell // 2)]
        pixels = views.transpose(1, 2, 0, 3, 4).reshape(-1, len(painting), 2 * cell, 2 * cell)
        colours = cell_means(pixels, cell).reshape(len(pixels), -1)
        keys = np.concatenate([colours, -(colours**2).sum(axis=1, keepdims=True) / 2], axis=1)
        return cls(cell, pixels * window(2 * cell), np.ascontiguousarray(keys.T))

    def cover(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Images (B, C, H, W) rebuilt from patches that overlap by half."""
        (batch, channels, height, width), cell, side = images.shape, self.cell, 2 * self.cell
        rows, columns = -(-height // cell) + 1, -(-width // cell) + 1
        pads = ((cell, rows * cell - height), (cell, columns * cell - width))
        cells = cell_means(np.pad(images, ((0, 0), (0, 0), *pads), mode="symmetric"), cell)
        chosen = self.pixels[self.nearest(cells)].reshape(batch, rows, columns, channels, side, side)
        total = np.zeros((batch, channels, (rows + 1) * cell, (columns + 1) * cell), np.float32)
        for down in (0, 1):
            for right in (0, 1):  # patches of one parity lie side by side
                part = chosen[:, down::2, right::2].transpose(0, 3, 1, 4, 2, 5)
                part = part.reshape(batch, channels, part.shape[2] * side, part.shape[4] * side)
                there = np.s_[..., down * cell :, right * cell :]
                total[there][..., : part.shape[2], : part.shape[3]] += part
        return total[..., cell : cell + height, cell : cell + width]

    def nearest(self, cells: NDArray[np.float32]) -> NDArray[np.intp]:
        """The patch with the nearest colours for each two by two cells of (B, C, rows, columns): (B, places)."""
        views = sliding_window_view(cells, (2, 2), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)
        wanted = views.reshape(len(cells), -1, len(self.keys) - 1)
        noise = generator(0, 0, "styles/variety").standard_normal(wanted.shape[1:], dtype=np.float32)
        wanted = wanted + np.float32(VARIETY) * noise
        wanted = np.concatenate([wanted, np.ones_like(wanted[..., :1])], axis=2)
        return np.stack([(one @ self.keys).argmax(axis=1) for one in wanted])


def cell_means(planes: NDArray[np.float32], cell: int) -> NDArray[np.float32]:
    """(…, H, W) → (…, H / cell, W / cell)."""
    *some, height, width = planes.shape
    means: NDArray[Any] = planes.reshape(*some, height // cell, cell, width // cell, cell).mean(axis=(-3, -1))
    return means


def window(side: int) -> NDArray[np.float32]:
    """Copies of it that overlap by half sum to one."""
    ramp = np.sin(np.pi * (np.arange(side) + 0.5) / side) ** 2
    return np.outer(ramp, ramp).astype(np.float32)
