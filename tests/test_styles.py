"""Style domains: statistics in the filter bank, folders of paintings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergetta import MergettaError
from mergetta.data.streams import as_input
from mergetta.data.styles import load_style, style_domains, stylise
from mergetta.data.styles.colours import moments, transport
from mergetta.data.styles.filters import mirrored
from mergetta.data.styles.patches import Patches, window
from mergetta.data.styles.pyramid import add_band, bands, filter_bank, level_count


def scenes(batch: int = 4, size: tuple[int, int] = (32, 32), channels: int = 3) -> np.ndarray:
    """Smooth random scenes with an edge and a little grain."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[: size[0], : size[1]] / max(size)
    waves = np.sin(2 * np.pi * (rng.uniform(0.5, 3, (batch, 1, 1, channels)) * x[..., None] + y[..., None]))
    square = ((np.abs(x - 0.5) < 0.25) & (np.abs(y - 0.4) < 0.25))[..., None]
    grain = rng.normal(0, 8, (batch, *size, channels))
    return np.clip(110 + 50 * waves + 60 * square + grain, 0, 255).astype(np.uint8)


def painting(size: int = 32) -> np.ndarray:
    """Orange and blue diagonal strokes."""
    y, x = np.mgrid[:size, :size]
    strokes = np.sin((x + y) * 2 * np.pi / 6) + 0.5 * np.sin((x - 2 * y) * 2 * np.pi / 17)
    noise = np.random.default_rng(1).normal(0, 10, (size, size, 3))
    colour = np.array([150, 120, 90]) + strokes[..., None] * np.array([45, 15, -40])
    return np.clip(colour + noise, 0, 255).astype(np.uint8)


def band_covariances(images: np.ndarray) -> list[np.ndarray]:
    levels = level_count(images.shape[1])
    padded, _ = mirrored(as_input(images), levels)
    return [moments(band)[1] for _, band in bands(np.fft.rfft2(padded), filter_bank(*padded.shape[2:], levels))]


def distance_to_style(images: np.ndarray, style: np.ndarray) -> float:
    """What differs between the covariances of all bands, relative to the style's."""
    pairs = list(zip(band_covariances(images), band_covariances(style[None]), strict=True))
    differences = sum(np.linalg.norm(own - want, axis=(1, 2)).mean() for own, want in pairs)
    return float(differences / sum(np.linalg.norm(want) for _, want in pairs))


@pytest.mark.parametrize("size", [32, 96])
def test_bands_take_on_the_statistics_of_the_style(size: int) -> None:
    images, style = scenes(size=(size, size)), painting(size)
    result = stylise(images, style)
    before, after = distance_to_style(images, style), distance_to_style(result, style)
    assert after < 0.3 * before
    assert after < 0.6
    assert np.abs(result.mean(axis=(1, 2)) - style.mean(axis=(0, 1))).max() < 4


def test_the_image_remains_recognisable() -> None:
    """Each result is more like its own image than like any other, with the colours taken out."""
    images = scenes(6, (64, 64))
    result = stylise(images, painting(64))
    flat, styled = (np.abs(a.astype(float).mean(axis=3)).reshape(6, -1) for a in (images, result))
    likeness = np.corrcoef(flat, styled)[:6, 6:]
    assert (np.abs(likeness).argmax(axis=1) == np.arange(6)).all()


def test_strength() -> None:
    images, style = scenes(), painting()
    np.testing.assert_array_equal(stylise(images, style, 0.0), images)
    far = [np.abs(stylise(images, style, strength).astype(float) - images).mean() for strength in (0.25, 0.5, 1.0)]
    assert 0 < far[0] < far[1] < far[2]


@pytest.mark.parametrize(("size", "channels"), [((32, 32), 3), ((28, 28), 1), ((45, 61), 3), ((224, 224), 3)])
def test_an_image_does_not_depend_on_its_batch(size: tuple[int, int], channels: int) -> None:
    images, style = scenes(3, size, channels), painting(max(size))
    before = images.copy()
    whole = stylise(images, style)
    assert whole.shape == images.shape
    assert whole.dtype == np.uint8
    np.testing.assert_array_equal(stylise(images, style), whole)
    np.testing.assert_array_equal(stylise(images[::-1][:2], style), whole[::-1][:2])
    np.testing.assert_array_equal(np.concatenate([stylise(image[None], style) for image in images]), whole)
    np.testing.assert_array_equal(images, before)


def test_chunks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    images, style = scenes(7), painting()
    whole = stylise(images, style)
    monkeypatch.setattr("mergetta.data.styles.CHUNK", 3 * images[0].size)
    np.testing.assert_array_equal(stylise(images, style), whole)


def test_flat_and_extreme_images_stay_finite() -> None:
    flat = np.stack([np.full((16, 16, 3), value, np.uint8) for value in (0, 128, 255)])
    black = np.zeros((16, 16, 3), np.uint8)
    assert stylise(flat, painting(16)).std() > 0
    assert stylise(flat, black).max() <= 1
    assert stylise(scenes(2, (8, 8)), painting(8)).shape == (2, 8, 8, 3)


def test_grey_images_stay_grey_with_the_luminance_of_the_style() -> None:
    style = painting(28)
    result = stylise(scenes(3, (28, 28), 1), style)
    assert result.shape == (3, 28, 28, 1)
    assert np.abs(result.mean(axis=(1, 2, 3)) - (style @ [0.299, 0.587, 0.114]).mean()).max() < 4


@pytest.mark.parametrize(("height", "width", "levels"), [(40, 40, 3), (64, 32, 2), (24, 56, 3), (8, 8, 1)])
def test_pyramid_rebuilds_the_image(height: int, width: int, levels: int) -> None:
    images = np.random.default_rng(0).random((2, 3, height, width), dtype=np.float32)
    bank = filter_bank(height, width, levels)
    total = np.zeros((2, 3, height, width // 2 + 1), np.complex64)
    for one, band in bands(np.fft.rfft2(images), bank):
        assert band.shape[2:] == one.size
        add_band(total, one, band, (height, width))
    assert len(bank) == 2 + 4 * (levels - 1)
    np.testing.assert_allclose(np.fft.irfft2(total, (height, width)), images, atol=2e-6)


def test_bands_are_oriented() -> None:
    """Upright stripes are seen by the first orientation, lying ones by the third."""
    stripes = np.tile(np.sin(2 * np.pi * np.arange(64) / 6), (64, 1)).astype(np.float32)[None, None]
    for images, turn in ((stripes, 0), (stripes.swapaxes(2, 3), 2)):
        found = [band.var() for _, band in bands(np.fft.rfft2(images), filter_bank(64, 64, 3))]
        assert np.argmax(found[1:5]) == turn


def test_transport_gives_the_covariance_wanted() -> None:
    rng = np.random.default_rng(0)
    have, want = (a @ a.T for a in rng.normal(size=(2, 3, 3)))
    values, vectors = np.linalg.eigh(want)
    half = vectors * values**0.5 @ vectors.T
    mapping = transport(have, half, most=1e4)
    np.testing.assert_allclose(mapping @ have @ mapping.T, want, atol=1e-3)
    np.testing.assert_allclose(mapping, mapping.T, atol=1e-6)  # symmetric: it moves least
    one = np.array([[1.0]])
    assert transport(one * 4, one * 6, most=1e4)[0, 0] == pytest.approx(3, rel=1e-3)  # from deviation 2 to 6
    assert transport(one * 0, one * 6, most=4)[0, 0] == pytest.approx(4, rel=1e-3)


def test_patches_rebuild_the_painting_they_come_from() -> None:
    source = as_input(painting(32)[None])
    covered = Patches.of(source[0], 32).cover(source)
    assert covered.shape == source.shape
    assert np.corrcoef(covered.ravel(), source.ravel())[0, 1] > 0.8
    ramp = window(8)[:, 3] / window(8)[:, 3].sum() * 4
    np.testing.assert_allclose(ramp[:4] + ramp[4:], 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"images": np.zeros((2, 16, 16, 3))}, "must be uint8"),
        ({"images": np.zeros((16, 16, 3), np.uint8)}, "must be uint8 of shape"),
        ({"images": np.zeros((0, 16, 16, 3), np.uint8)}, "must be uint8 of shape"),
        ({"images": np.zeros((1, 4, 16, 3), np.uint8)}, "at least 8 pixels"),
        ({"images": np.zeros((1, 96, 96, 3), np.uint8)}, "too small for images of 96"),
        ({"style": np.zeros((16, 16), np.uint8)}, "A style must be"),
        ({"style": np.zeros((16, 16, 3))}, "A style must be"),
        ({"strength": 1.5}, "between 0 and 1"),
        ({"strength": float("nan")}, "between 0 and 1"),
    ],
)
def test_bad_input(arguments: dict, sentence: str) -> None:
    good = {"images": np.zeros((1, 16, 16, 3), np.uint8), "style": np.zeros((16, 16, 3), np.uint8)}
    with pytest.raises(MergettaError, match=sentence):
        stylise(**{**good, **arguments})


def test_a_folder_of_paintings(tmp_path: Path) -> None:
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80] = (10, 200, 30)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    Image.fromarray(painting(64)).save(tmp_path / "Strokes.JPG")
    (tmp_path / "LICENSE.txt").write_text("not a painting")
    assert style_domains(tmp_path) == ["Strokes", "wide"]
    middle = load_style(tmp_path, "wide", 20)
    assert middle.shape == (20, 20, 3)
    assert middle.dtype == np.uint8
    assert (middle[:, 4:16] == (10, 200, 30)).all()  # the centre, its proportions kept
    assert load_style(tmp_path, "Strokes", 96).shape == (96, 96, 3)


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(MergettaError, match="no images"):
        style_domains(tmp_path)
    with pytest.raises(MergettaError, match="no folder"):
        style_domains(tmp_path / "none")
    (tmp_path / "broken.png").write_bytes(b"\x89PNG broken")
    with pytest.raises(MergettaError, match="Cannot read the image"):
        load_style(tmp_path, "broken", 32)
    with pytest.raises(MergettaError, match="no style 'monet'; it has broken"):
        load_style(tmp_path, "monet", 32)
    with pytest.raises(MergettaError, match="positive"):
        load_style(tmp_path, "broken", 0)
    (tmp_path / "broken.jpg").write_bytes(b"")
    with pytest.raises(MergettaError, match="share a name"):
        style_domains(tmp_path)
