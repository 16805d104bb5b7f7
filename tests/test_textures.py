"""Drawn textures as styles: fifty different ones, the same everywhere, and the suite that needs nothing else."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.bench.inputs import family_of, source_of, target_of
from mergetta.bench.protocol import run_cell
from mergetta.bench.runner import cells_of
from mergetta.bench.store import Store
from mergetta.bench.suite import INITIAL, load_suite
from mergetta.data.fashion import load_fashion
from mergetta.data.sources import open_source
from mergetta.data.styles.textures import BRIGHTNESS, KINDS, TEXTURES, texture

DIGEST = """
import hashlib
from mergetta.data.styles.textures import TEXTURES, texture
print(hashlib.sha256(b"".join(texture(name, 28).tobytes() for name in TEXTURES)).hexdigest())
"""


@pytest.fixture(scope="module")
def drawn() -> np.ndarray:
    return np.stack([texture(name, 28) for name in TEXTURES])


def test_names() -> None:
    assert len(TEXTURES) == len(set(TEXTURES)) == 50
    assert TEXTURES[0] == "stripes_1"
    assert all(re.fullmatch(r"[a-z]+_[1-5]", name) for name in TEXTURES)


def test_every_ten_have_one_of_each_kind() -> None:
    for start in range(0, 50, 10):
        assert {name.rpartition("_")[0] for name in TEXTURES[start : start + 10]} == KINDS.keys()


def test_textures_are_grey_paintings_of_any_size(drawn: np.ndarray) -> None:
    assert drawn.shape == (50, 28, 28, 3)
    assert drawn.dtype == np.uint8
    assert (drawn == drawn[..., :1]).all()
    assert all(texture(name, 9).shape == (9, 9, 3) for name in TEXTURES[:10])
    assert texture(TEXTURES[0], 1).shape == (1, 1, 3)


def test_no_two_are_alike(drawn: np.ndarray) -> None:
    pixels = drawn[..., 0].reshape(50, -1).astype(float)
    likeness = np.abs(np.corrcoef(pixels)) - np.eye(50)
    assert likeness.max() < 0.5


def test_tones_differ_already_among_the_first_ten(drawn: np.ndarray) -> None:
    for some in (drawn[:10], drawn):
        means, deviations = some.mean(axis=(1, 2, 3)) / 255, some.std(axis=(1, 2, 3)) / 255
        assert np.ptp(means) > 0.7 * np.ptp(BRIGHTNESS)
        assert deviations.min() > 0.08
        assert deviations.max() > 1.5 * deviations.min()


def test_the_same_in_another_process(drawn: np.ndarray) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", DIGEST], capture_output=True, text=True, env=environment, check=True)
    assert other.stdout.strip() == hashlib.sha256(drawn.tobytes()).hexdigest()


def test_unknown_names_and_sizes() -> None:
    with pytest.raises(MergettaError, match="no texture 'stripes_6'; choose from stripes_1"):
        texture("stripes_6", 28)
    with pytest.raises(MergettaError, match="positive"):
        texture("stripes_1", 0)


def test_stylised_domains_are_different_and_recognisable() -> None:
    """Every result is most like its own image, in each of the first ten styles."""
    images, _ = load_fashion()
    source = open_source("fashion-styles")
    plain = images[:20].reshape(20, -1).astype(float)
    seen = set()
    for name in source.domains[:10]:
        domain = source.domain(name, 5, 20)
        styled = np.asarray(domain.images)
        assert styled.shape == (20, 28, 28, 1)
        likeness = np.corrcoef(plain, styled.reshape(20, -1))[:20, 20:]
        assert (likeness.argmax(axis=0) == np.arange(20)).mean() > 0.9
        assert np.abs(styled.astype(float) - images[:20]).mean() > 10
        seen.add(styled.tobytes())
    assert len(seen) == 10


def test_an_image_is_the_same_in_any_part_of_a_domain() -> None:
    source = open_source("fashion-styles")
    whole, part = source.domain("wood_3", 5, 30), source.domain("wood_3", 1, 5, start=10)
    np.testing.assert_array_equal(np.asarray(whole.images)[10:15], part.images)
    np.testing.assert_array_equal(whole.labels[10:15], part.labels)


@pytest.mark.parametrize("styles", [10, 20, 30, 40, 50])
@pytest.mark.parametrize("family", ["fashion-bn", "fashion-vit"])
def test_the_paper_s_conditions(family: str, styles: int) -> None:
    """As many domains, the paper's c_init, and all else as in the family's suite of corruptions."""
    suite, corruptions = load_suite("fashion-styles", family, styles=styles), load_suite(family)
    assert suite.domains == TEXTURES[:styles]
    assert suite.samples == 1000
    assert (suite.family, suite.batch_size, suite.experts) == (family, corruptions.batch_size, corruptions.experts)
    assert list(suite.methods) == [name for name in corruptions.methods if name != "zo-merge-tuned"]
    for name, method in suite.methods.items():
        expected = corruptions.methods[name]
        if method.bundle is not None and expected.bundle is not None:
            assert method.bundle.initial == INITIAL[styles]
            method = method.model_copy(update={"bundle": method.bundle.model_copy(update={"initial": 0.1})})
        assert method == expected


def test_ten_styles_unless_told() -> None:
    assert load_suite("fashion-styles").domains == TEXTURES[:10]
    with pytest.raises(MergettaError, match="choose 2 to 50 of them, not 51"):
        load_suite("fashion-styles", styles=51)


@pytest.mark.parametrize("family", ["fashion-bn", "fashion-vit"])
def test_a_suite_from_end_to_end(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MERGETTA_DATA", raising=False)
    suite = load_suite("fashion-styles", family, styles=3).restricted(["source", "bn-stats", "zo-merge"], samples=60)
    suite = suite.model_copy(update={"batch_size": 20})
    assert family_of(suite).name == family
    for cell in cells_of(suite, "roid", ["noise_1"], [0]):
        record = run_cell(suite, cell, Store(tmp_path))
        assert 0 <= record["error"] <= 100
        assert record["samples"] == 60
        assert record["data"] == source_of(suite).description
        assert "50 drawn textures" in record["data"]
    assert len(target_of(suite, "noise_1").labels) == 60
