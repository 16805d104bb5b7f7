"""The 15 corruptions: any size, grey and colour, seeded per image, stronger with severity."""

from __future__ import annotations

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.data.corruptions import CORRUPTIONS, corrupt, fitting_strengths
from mergetta.data.corruptions.digital import coarse
from mergetta.data.corruptions.planes import motion_blurred, zoomed
from mergetta.data.corruptions.strengths import STRENGTHS, zooms
from mergetta.data.corruptions.weather import plasma, snow
from mergetta.data.fashion import load_fashion
from mergetta.seeds import generator


def photographs(batch: int = 4, size: int = 32, channels: int = 3) -> np.ndarray:
    """Smooth random scenes with edges."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size] / size
    waves = np.sin(2 * np.pi * (rng.uniform(0.5, 3, (batch, 1, 1, channels)) * x[..., None] + y[..., None]))
    square = ((np.abs(x - 0.5) < 0.25) & (np.abs(y - 0.5) < 0.25))[..., None]
    return np.clip(128 + 60 * waves + 60 * square, 0, 255).astype(np.uint8)


def test_fifteen_with_five_severities_in_every_table() -> None:
    assert len(CORRUPTIONS) == 15
    for table in STRENGTHS.values():
        assert set(table) == set(CORRUPTIONS)
        assert all(len(levels) == 5 for levels in table.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize(
    ("size", "channels"), [((28, 28), 1), ((32, 32), 3), ((40, 67), 3), ((96, 80), 3), ((9, 9), 1)]
)
def test_any_size_and_channels(name: str, size: tuple[int, int], channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, *size, channels)).astype(np.uint8)
    for severity in (1, 5):
        result = corrupt(images, name, severity)
        assert result.shape == images.shape
        assert result.dtype == np.uint8
        assert not np.array_equal(result, images) or name == "elastic_transform"


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_seeded_per_image(name: str) -> None:
    images = photographs(6)
    whole = corrupt(images, name, 5, seed=1)
    np.testing.assert_array_equal(corrupt(images, name, 5, seed=1), whole)
    np.testing.assert_array_equal(corrupt(images[2:4], name, 5, seed=1, indices=np.array([2, 3])), whole[2:4])


@pytest.mark.parametrize(
    "name",
    sorted(set(CORRUPTIONS) - {"defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"}),
)
def test_random_corruptions_differ_between_seeds_and_images(name: str) -> None:
    images = np.repeat(photographs(1), 2, axis=0)
    one, other = corrupt(images, name, 5, seed=1), corrupt(images, name, 5, seed=2)
    assert not np.array_equal(one, other)
    assert not np.array_equal(one[0], one[1])


@pytest.mark.parametrize("table", STRENGTHS)
def test_severity_increases_the_distance(table: str) -> None:
    images = load_fashion()[0][:60] if table == "grey28" else photographs(12, 32 if table == "cifar" else 96)
    rising = 0
    for name in CORRUPTIONS:
        distances = [
            np.abs(corrupt(images, name, severity, strengths=table).astype(float) - images).mean()
            for severity in (1, 3, 5)
        ]
        rising += distances[0] < distances[1] < distances[2]
    assert rising >= 12  # snow and elastic are not monotone in their published parameters


def test_noise_has_the_stated_size() -> None:
    images = np.full((20, 32, 32, 3), 128, np.uint8)
    noise = (corrupt(images, "gaussian_noise", 5).astype(float) - 128) / 255
    assert noise.std() == pytest.approx(0.10, rel=0.02)
    hit = corrupt(images, "impulse_noise", 5) != 128
    assert hit.mean() == pytest.approx(0.07, rel=0.1)
    counts = corrupt(images, "shot_noise", 5).astype(float) / 255
    assert counts.mean() == pytest.approx(128 / 255, rel=0.01)
    assert counts.var() == pytest.approx(128 / 255 / 50, rel=0.05)


def test_contrast_and_brightness_by_hand() -> None:
    images = np.array([[[[100], [200]]]], np.uint8)  # mean 150; grey28 severity 5: 0.2
    assert corrupt(images, "contrast", 5, strengths="grey28").ravel().tolist() == [140, 160]
    assert corrupt(images, "brightness", 5, strengths="grey28").ravel().tolist() == [202, 255]
    colour = np.array([[[[204, 102, 0]]]], np.uint8)  # value 204 + 76.5 is cut at 255: all channels × 1.25
    assert corrupt(colour, "brightness", 5, strengths="cifar").ravel().tolist() == [255, 128, 0]


def test_blurs_keep_flat_images_flat() -> None:
    images = np.full((2, 40, 40, 3), 77, np.uint8)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform", "pixelate"):
        assert np.abs(corrupt(images, name, 5).astype(int) - 77).max() <= 1


def test_pixelate_operator_averages_cells() -> None:
    np.testing.assert_allclose(coarse(4, 2), [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5]])
    np.testing.assert_allclose(coarse(7, 3).sum(axis=1), 1, rtol=1e-6)


def test_zoom_enlarges_about_the_centre() -> None:
    ramp = np.tile(np.linspace(0, 1, 41, dtype=np.float32), (2, 41, 1))[..., None]
    np.testing.assert_allclose(zoomed(ramp, 1.0), ramp, atol=1e-6)
    large = zoomed(ramp, 1.25)
    assert large.shape == ramp.shape
    assert large[0, 20, 20, 0] == pytest.approx(0.5, abs=0.02)
    assert (large[0, 20, 30, 0] - large[0, 20, 10, 0]) == pytest.approx(0.5 / 1.25, abs=0.02)


def test_smear_of_one_bright_pixel_by_hand() -> None:
    """Radius 1 has three steps: along 70° they end 0, 0.94 and 1.88 pixels down and 0, 0.34 and 0.68 to the side."""
    dot = np.zeros((1, 9, 9, 1), np.float32)
    dot[0, 4, 4] = 1
    weights = np.exp([0, -0.5, -2])
    expected = np.zeros((9, 9))
    expected[[4, 3, 2], [4, 4, 3]] = weights / weights.sum()
    whole = motion_blurred(dot, 1, 1.0, np.array([-70.0]), whole_pixels=True)
    np.testing.assert_allclose(whole[0, ..., 0], expected, atol=1e-6)
    shared = motion_blurred(dot, 1, 1.0, np.array([-70.0]))[0, ..., 0]
    assert shared.sum() == pytest.approx(1, abs=1e-6)
    assert np.count_nonzero(shared > 1e-6) == 6  # four pixels for each step but the first, two of them in common


def test_streaks_of_snow_are_one_pixel_wide() -> None:
    """A lone flake, which the zoom by 1 leaves alone, brightens as many pixels as the smear has steps, twice."""

    class OneFlake:
        def normal(self, mean: float, std: float, shape: tuple[int, ...]) -> np.ndarray:
            layer = np.zeros(shape)
            layer[20, 8] = 0.9
            return layer

        def uniform(self, low: float, high: float) -> float:
            return -70.0

    result = snow(np.zeros((1, 40, 40, 1), np.float32), [OneFlake()], (0, 1, 1, 0.5, 3, 4, 1.0))
    assert np.count_nonzero(result > 1e-6) == 2 * 7
    assert result.sum() == pytest.approx(2 * 0.9, abs=1e-5)


def test_zoom_factors() -> None:
    assert zooms(1.06, 0.01) == (1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06)


def test_plasma_is_fractal_noise_between_0_and_1() -> None:
    field = plasma([generator(0, i, "p") for i in range(3)], 28, 4.0)
    flat = plasma([generator(0, i, "p") for i in range(99)], 4, 100.0)
    around = (flat[:, 0, 0] + flat[:, 0, 2] + flat[:, 2, 0] + flat[:, 2, 2]) / 4
    assert np.median(np.abs(flat[:, 1, 1] - around)) < 0.02  # a hundredth of the first displacement
    assert field.shape == (3, 32, 32)
    assert field.min() == 0
    assert field.max() == 1
    neighbours = np.abs(np.diff(field, axis=1)).mean()
    strangers = np.abs(field - np.roll(field, 13, axis=1)).mean()
    assert neighbours < strangers / 2


def test_strengths_fit_the_size() -> None:
    assert fitting_strengths((1, 224, 224, 3)) == "imagenet"
    assert fitting_strengths((1, 32, 32, 3)) == "cifar"
    assert fitting_strengths((1, 28, 28, 1)) == "grey28"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "rain"}, "no corruption 'rain'"),
        ({"severity": 6}, "severity must be 1 to 5"),
        ({"images": np.zeros((2, 8, 8, 3))}, "must be uint8"),
        ({"images": np.zeros((2, 8, 8, 4), np.uint8)}, "must be uint8 of shape"),
        ({"images": np.zeros((0, 8, 8, 3), np.uint8)}, "must be uint8 of shape"),
        ({"strengths": "mnist"}, "no strengths 'mnist'"),
    ],
)
def test_bad_input(arguments: dict, sentence: str) -> None:
    with pytest.raises(MergettaError, match=sentence):
        corrupt(**{"images": np.zeros((1, 8, 8, 3), np.uint8), "name": "fog", **arguments})


@pytest.mark.parametrize(
    ("name", "size", "channels", "roughness"),
    [("frost", 32, 3, 8.4), ("frost", 28, 1, 8.4), ("fog", 32, 3, 2.2), ("fog", 28, 1, 3.6)],
)
def test_fractals_keep_their_roughness(name: str, size: int, channels: int, roughness: float) -> None:
    """Mean step between neighbouring pixels on a grey image: what decides how hard these two corruptions are."""
    found = corrupt(np.full((64, size, size, channels), 100, np.uint8), name, 5).astype(float)
    assert np.abs(np.diff(found, axis=2)).mean() == pytest.approx(roughness, rel=0.1)
