"""Frost's published textures: cut out of given files, in colour and grey, and named in what results are kept under."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergetta import MergettaError
from mergetta.data.cifar_c import CifarC
from mergetta.data.corruptions import corrupt
from mergetta.data.corruptions.weather import drawn_ice, load_textures
from mergetta.data.frost_textures import find_textures, textures_digest
from mergetta.data.imagenet_c import ImagenetC
from mergetta.data.images import load_images
from mergetta.data.sources import open_source
from mergetta.seeds import generator

from .test_cli import mergetta

WIDE, HIGH = 400, 300
BLACK = np.zeros((40, 32, 32, 3), np.uint8)
SUFFIXES = ("png", "png", "png", "jpg", "jpg")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with a small CIFAR-10; `frost` is not in it yet."""
    images = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    (tmp_path / "cifar10").mkdir()
    np.savez(tmp_path / "cifar10" / "cifar10_test.npz", x=images, y=np.arange(12) % 10)
    return tmp_path


def write_textures(folder: Path, red: int = 20) -> Path:
    """Five flat textures, the second half transparent; texture i has the red 20 · i."""
    folder.mkdir()
    for number, suffix in enumerate(SUFFIXES, 1):
        pixels = np.full((HIGH, WIDE, 4), (red * number, 100, 200, 255), np.uint8)
        pixels[:, WIDE // 2 :, 3] = 0
        image = Image.fromarray(pixels)
        (image if suffix == "png" else image.convert("RGB")).save(folder / f"frost{number}.{suffix}", quality=100)
    return folder


def test_one_texture_per_image_by_hand(tmp_path: Path) -> None:
    folder = write_textures(tmp_path / "frost")
    found = corrupt(BLACK, "frost", 5, frost=folder).astype(float)  # 0.45 of the texture, whatever its alpha
    assert np.abs(found[..., 1] - 45).max() <= 1
    assert np.abs(found[..., 2] - 90).max() <= 1
    reds = found[..., 0].reshape(len(found), -1)
    assert np.ptp(reds, axis=1).max() <= 1  # one texture for the whole image
    assert set(np.rint(np.median(reds, axis=1) / 9)) == {1, 2, 3, 4, 5}
    np.testing.assert_array_equal(corrupt(BLACK[7:9], "frost", 5, indices=np.array([7, 8]), frost=folder), found[7:9])
    grey = corrupt(np.zeros((9, 28, 28, 1), np.uint8), "frost", 5, frost=folder)
    darkest, lightest = (0.45 * (0.299 * red + 0.587 * 100 + 0.114 * 200) for red in (20, 100))
    assert darkest - 1 <= grey.min() <= grey.max() <= lightest + 1


def test_a_piece_of_the_scaled_texture(tmp_path: Path) -> None:
    """A ramp of one level per five pixels has one level per pixel after scaling by 0.2, and none to spare for 224."""
    folder = write_textures(tmp_path / "frost")
    ramp = np.broadcast_to((np.arange(WIDE) // 5)[None, :, None], (HIGH, WIDE, 3)).astype(np.uint8)
    for number, suffix in enumerate(SUFFIXES, 1):
        (folder / f"frost{number}.{suffix}").unlink()
        Image.fromarray(ramp).save(folder / f"frost{number}.png")
    small = load_textures(folder, 0.2, (32, 32, 3))
    assert [texture.shape for texture in small] == [(60, 80, 3)] * 5
    np.testing.assert_allclose(small[0][0, :, 0] * 255, np.arange(80), atol=1e-4)
    assert load_textures(folder, 1.0, (224, 224, 3))[0].shape == (300, 400, 3)
    assert load_textures(folder, 1.0, (600, 100, 3))[0].shape == (600, 800, 3)  # enlarged to cover the image
    starts = {tuple(piece[0, :2, 0]) for piece in corrupt(BLACK + 100, "frost", 5, frost=folder).astype(int)}
    assert len(starts) > 10  # pieces begin in many places


def test_missing_textures_are_named(tmp_path: Path) -> None:
    folder = write_textures(tmp_path / "frost")
    (folder / "frost4.jpg").unlink()
    with pytest.raises(MergettaError, match=r"frost has no frost4\.png or frost4\.jpg"):
        corrupt(BLACK, "frost", 5, frost=folder)


def test_drawn_ice_is_as_bright_as_the_published() -> None:
    """Means per channel, spread between images and spread within one, of pieces of the published files at 32 pixels."""
    ice = drawn_ice([generator(0, i, "frost") for i in range(400)], (32, 32, 3))
    np.testing.assert_allclose(ice.mean(axis=(0, 1, 2)), [0.57, 0.65, 0.70], atol=0.03)
    assert ice.mean(axis=(1, 2, 3)).std() == pytest.approx(0.154, abs=0.015)
    assert ice.std(axis=(1, 2)).mean() == pytest.approx(0.08, abs=0.015)


def test_found_in_or_beside_a_dataset(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_textures(data / "cifar10") is None
    (data / "frost").mkdir()  # as ImageNet-C has one, with severities in it
    (data / "frost" / "5").mkdir()
    assert find_textures(data / "cifar10") is None
    (data / "frost" / "5").rmdir()
    (data / "frost").rmdir()
    beside = write_textures(data / "frost")
    assert find_textures(data / "cifar10") == beside
    inside = write_textures(data / "cifar10" / "frost")
    assert find_textures(data / "cifar10") == inside
    monkeypatch.chdir(data / "cifar10")
    assert find_textures(Path()) == inside


def test_digest_and_description_say_which(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGETTA_DATA", str(data))
    drawn = open_source("cifar10-c")
    write_textures(data / "frost")
    genuine = open_source("cifar10-c")
    assert drawn.description == "CIFAR-10 test corrupted by mergetta"
    assert genuine.description == "CIFAR-10 test corrupted by mergetta with the published frost textures"
    assert drawn.digest != genuine.digest
    one, other = (source.domain("frost", 5, 12).images[np.arange(12)] for source in (drawn, genuine))
    assert not np.array_equal(one, other)
    np.testing.assert_array_equal(
        other, corrupt(np.load(data / "cifar10" / "cifar10_test.npz")["x"], "frost", 5, frost=data / "frost")
    )
    fog = [source.domain("fog", 5, 12).images[np.arange(12)] for source in (drawn, genuine)]
    np.testing.assert_array_equal(*fog)
    (data / "frost").rename(data / "before")
    write_textures(data / "frost", red=30)
    assert open_source("cifar10-c").digest not in (drawn.digest, genuine.digest)


def test_imagenet_uses_them_too(tmp_path: Path) -> None:
    folder = tmp_path / "imagenet"
    (folder / "val" / "n00000000").mkdir(parents=True)
    Image.fromarray(np.zeros((224, 224, 3), np.uint8)).save(folder / "val" / "n00000000" / "a.png")
    (folder / "classes.txt").write_text("\n".join(f"n{c:08d}" for c in range(1000)))
    drawn = open_source("imagenet-c", folder)
    textures = write_textures(tmp_path / "frost")
    genuine = open_source("imagenet-c", folder)
    assert genuine.description == "ImageNet validation corrupted by mergetta with the published frost textures"
    assert genuine.digest != drawn.digest
    pixels = ImagenetC(folder).domain("frost", 5).images[np.arange(1)]
    np.testing.assert_array_equal(pixels, corrupt(np.zeros((1, 224, 224, 3), np.uint8), "frost", 5, frost=textures))


def test_embedded_images_do_not_depend_on_the_machine(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> tuple[np.ndarray, np.ndarray, str]:
        source = open_source("fashion")
        return (
            source.domain("frost", 5, 20).images[np.arange(20)],
            load_images("fashion:frost@5", 1)[:20],
            source.digest,
        )

    monkeypatch.delenv("MERGETTA_DATA", raising=False)
    before = found()
    write_textures(data / "frost")
    monkeypatch.setenv("MERGETTA_DATA", str(data))
    for one, other in zip(before, found(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_corrupt_keeps_which_textures_made_a_set(data: Path) -> None:
    source = data / "cifar10" / "cifar10_test.npz"
    textures = write_textures(data / "ice")
    arguments = ("corrupt", source, "--corruptions", "frost", "--severities", 5, "--jobs", 1)
    result = mergetta(*arguments, "--out", data / "C", "--frost", textures)
    assert result.returncode == 0, result.stderr
    made = CifarC(data / "C")
    assert made.description.endswith(", seed 0 with the published frost textures")
    assert json.loads((data / "C" / "mergetta-corrupt.json").read_text())["frost"] == textures_digest(textures)
    images = np.load(source)["x"]
    np.testing.assert_array_equal(made.domain("frost", 5).images, corrupt(images, "frost", 5, frost=textures))
    result = mergetta(*arguments, "--out", data / "C")
    assert result.returncode == 2
    assert f"was made with frost {textures_digest(textures)}, not drawn" in " ".join(result.stderr.split())
