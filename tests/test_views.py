"""Second views: what they do by hand, the same for NumPy and torch, the same whichever images are kept."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from mergetta import MergettaError
from mergetta.losses import Roid
from mergetta.losses.views import (
    DRAWS,
    Draws,
    brightness,
    colour_and_geometry,
    contrast,
    gamma,
    grey,
    hue,
    mirror,
    move,
    occlude,
    saturation,
    shuffle_patches,
    shuffle_pixels,
)
from mergetta.seeds import generator

PER_IMAGE = partial(colour_and_geometry, draws=DRAWS["per-image"])
VIEWS = [colour_and_geometry, PER_IMAGE, shuffle_patches, shuffle_pixels, occlude]


def picture(batch: int = 5, channels: int = 3, height: int = 13, width: int = 18) -> np.ndarray:
    return np.random.default_rng(1).random((batch, channels, height, width)).astype(np.float32)


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("channels", [1, 3])
def test_same_for_numpy_and_torch(view, channels: int) -> None:  # type: ignore[no-untyped-def]
    images = picture(channels=channels)
    keep = np.array([True, False, True, True, False])
    one = view(images, generator(0, 0, "v"), keep)
    other = view(torch.from_numpy(images), generator(0, 0, "v"), keep)
    assert one.shape == (3, channels, 13, 18)
    np.testing.assert_allclose(one, other.numpy(), atol=1e-5)
    assert one.min() >= 0
    assert one.max() <= 1


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_does_not_depend_on_who_else_is_kept(view) -> None:  # type: ignore[no-untyped-def]
    images = picture()
    everyone = view(images, generator(0, 0, "v"), np.ones(5, bool))
    keep = np.array([False, True, False, False, True])
    np.testing.assert_array_equal(view(images, generator(0, 0, "v"), keep), everyone[keep])
    assert len(view(images, generator(0, 0, "v"), np.zeros(5, bool))) == 0


def test_colours_by_hand() -> None:
    image = np.array([0.2, 0.4, 0.6]).reshape(1, 3, 1, 1)
    luma = 0.299 * 0.2 + 0.587 * 0.4 + 0.114 * 0.6
    np.testing.assert_allclose(brightness(image, np.array([2.0])).ravel(), [0.4, 0.8, 1.0])
    np.testing.assert_allclose(gamma(image, np.array([2.0])).ravel(), [0.04, 0.16, 0.36])
    np.testing.assert_allclose(grey(image).ravel(), [luma])
    np.testing.assert_allclose(saturation(image, np.array([0.0])).ravel(), [luma] * 3)
    np.testing.assert_allclose(contrast(image, np.array([0.0])).ravel(), [luma] * 3)
    np.testing.assert_allclose(hue(image, np.array([0.0])).ravel(), image.ravel(), atol=1e-9)


def test_hue_keeps_luma_and_leaves_grey_alone() -> None:
    image = np.full((1, 3, 2, 2), 0.5) + np.array([0.05, -0.02, 0.03]).reshape(1, 3, 1, 1)
    turned = hue(image, np.array([0.06]))
    np.testing.assert_allclose(grey(turned), grey(image), atol=1e-4)
    assert np.abs(turned - image).max() > 1e-3
    flat = np.full((1, 3, 2, 2), 0.5)
    np.testing.assert_allclose(hue(flat, np.array([0.3])), flat, atol=1e-4)


def test_mirror_by_hand() -> None:
    np.testing.assert_allclose(mirror(np.array([-1.5, 0.0, 2.0, 3.0, 3.25, 6.0, 7.0]), 4), [1.5, 0, 2, 3, 2.75, 0, 1])
    np.testing.assert_allclose(mirror(np.array([-3.0, 5.0]), 1), [0, 0])


class Fixed:
    """A generator whose draws are chosen: no turn, scale 1; flip or not; no shift, or the largest down and right."""

    def __init__(self, flip: bool = False, shift: float | None = None) -> None:
        self.flip, self.shift = flip, shift

    def uniform(self, low: float, high: float, size: object) -> np.ndarray:
        if (low, high) == (0, 1):
            return np.full(size, 0.1 if self.flip else 0.9)
        return np.full(size, high if high == self.shift else (low + high) / 2)


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_move_by_nothing_and_by_a_flip(draws: Draws) -> None:
    images = picture()
    keep = np.ones(5, bool)
    np.testing.assert_allclose(move(images, Fixed(), keep, draws), images, atol=1e-6)
    np.testing.assert_allclose(move(images, Fixed(flip=True), keep, draws), images[..., ::-1], atol=1e-6)


@pytest.mark.parametrize(("name", "pixels"), [("published", 4), ("per-image", 2)])
def test_largest_shift_of_32_pixels(name: str, pixels: int) -> None:
    """1/16 of the image padded by half its size on each side is 1/8 of the image itself; the variant has half of it."""
    images, draws = picture(height=32, width=32), DRAWS[name]
    moved = move(images, Fixed(shift=draws.shift), np.ones(5, bool), draws)
    np.testing.assert_allclose(moved[:, :, pixels:, pixels:], images[:, :, :-pixels, :-pixels], atol=1e-6)
    np.testing.assert_allclose(moved[:, :, pixels - 1, pixels:], images[:, :, 1, :-pixels], atol=1e-6)  # mirrored


@pytest.mark.parametrize("draws", DRAWS.values(), ids=DRAWS)
def test_shifts_are_drawn_up_to_the_largest(draws: Draws) -> None:
    drawn = [draws.uniform(generator(0, i, "v"), -draws.shift, draws.shift, np.ones(4, bool)) for i in range(300)]
    assert 0.95 * draws.shift < np.abs(drawn).max() <= draws.shift


def test_once_per_batch_or_per_image() -> None:
    """Five times the same picture: the published views of it are equal, those of the variant differ."""
    images = np.repeat(picture(batch=1), 5, axis=0)
    keep = np.array([True, False, True, True, True])
    published = colour_and_geometry(images, generator(0, 0, "v"), keep)
    assert not np.allclose(published[0], images[0], atol=1e-3)
    for view in published[1:]:
        np.testing.assert_array_equal(view, published[0])
    own = PER_IMAGE(images, generator(0, 0, "v"), keep)
    assert all(not np.allclose(own[i], own[j], atol=1e-3) for i in range(4) for j in range(i))


def test_the_loss_takes_its_views_by_name() -> None:
    images = np.repeat(picture(batch=1), 4, axis=0)
    seen = []

    def forward(batch: np.ndarray) -> np.ndarray:
        seen.append(batch)
        return np.arange(len(batch))[:, None] * np.array([[1.0, 0.5, -1.0]])

    for options in ({}, {"views": "published"}, {"views": "per-image"}):
        Roid(**options).evaluate(forward, images, generator(0, 0, "v"))
    default, published, own = seen[1::2]
    assert len(default) > 1
    np.testing.assert_array_equal(default, published)
    np.testing.assert_array_equal(default[0], default[1])
    assert not np.allclose(own[0], own[1], atol=1e-3)
    with pytest.raises(MergettaError, match="no views 'each'; choose one of published, per-image"):
        Roid(views="each")


def test_shuffles_are_permutations() -> None:
    images = picture(height=12, width=16)
    keep = np.ones(5, bool)
    for view in (shuffle_patches, shuffle_pixels):
        shuffled = view(images, generator(0, 0, "v"), keep)
        assert not np.array_equal(shuffled, images)
        np.testing.assert_array_equal(np.sort(shuffled.reshape(5, 3, -1)), np.sort(images.reshape(5, 3, -1)))
    patches = shuffle_patches(images, generator(0, 0, "v"), keep)
    tiles = {images[0, :, y : y + 3, x : x + 4].tobytes() for y in range(0, 12, 3) for x in range(0, 16, 4)}
    assert {patches[0, :, y : y + 3, x : x + 4].tobytes() for y in range(0, 12, 3) for x in range(0, 16, 4)} == tiles


def test_patches_leave_the_remainder() -> None:
    images = picture(height=13, width=18)
    shuffled = shuffle_patches(images, generator(0, 0, "v"), np.ones(5, bool))
    np.testing.assert_array_equal(shuffled[:, :, 12:], images[:, :, 12:])
    np.testing.assert_array_equal(shuffled[:, :, :, 16:], images[:, :, :, 16:])


def test_occlusion() -> None:
    images = picture(height=8, width=8)
    hidden = occlude(images, generator(0, 0, "v"), np.ones(5, bool))
    np.testing.assert_allclose(hidden[:, :, 4, 4], images.mean(axis=(2, 3)), rtol=1e-5)
    np.testing.assert_array_equal(hidden[:, :, 0], images[:, :, 0])
