"""`mergetta corrupt`: published layouts from clean sets, the same for any number of processes, resumed after a kill."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergetta.data.cifar_c import CifarC
from mergetta.data.corruptions import corrupt
from mergetta.data.imagenet_c import ImagenetC

from .test_cli import mergetta

SETTINGS = "mergetta-corrupt.json"


def cifar(folder: Path, count: int = 30) -> tuple[Path, np.ndarray]:
    images = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    np.savez(folder / "cifar10_test.npz", x=images, y=np.arange(count) % 10)
    return folder / "cifar10_test.npz", images


def photographs(folder: Path, classes: int = 3, each: int = 2) -> Path:
    rng = np.random.default_rng(0)
    for c in range(classes):
        (folder / f"n{c:08d}").mkdir(parents=True)
        for i in range(each):
            pixels = np.kron(rng.integers(0, 256, (8, 10, 3), dtype=np.uint8), np.ones((32, 32, 1), np.uint8))
            Image.fromarray(pixels).save(folder / f"n{c:08d}" / f"val_{i}.png")
    (folder / "classes.txt").write_text("\n".join(f"n{c:08d}" for c in range(1000)))
    return folder


def test_cifar(tmp_path: Path) -> None:
    source, images = cifar(tmp_path)
    out = tmp_path / "C"
    arguments = ("corrupt", source, "--out", out, "--corruptions", "fog,shot_noise", "--seed", 7, "--jobs", 2)
    result = mergetta(*arguments)
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in out.iterdir()) == ["fog.npy", "labels.npy", SETTINGS, "shot_noise.npy"]
    settings = json.loads((out / SETTINGS).read_text())
    assert (settings["seed"], settings["severities"], settings["images"]) == (7, [1, 2, 3, 4, 5], 30)
    made = CifarC(out)
    assert made.description.startswith("CIFAR-10 test corrupted by mergetta ")
    assert made.description.endswith(", seed 7")
    for severity in (1, 5):
        domain = made.domain("fog", severity)
        np.testing.assert_array_equal(domain.images[np.arange(30)], corrupt(images, "fog", severity, seed=7))
        assert domain.labels.tolist() == [i % 10 for i in range(30)]

    times = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")}
    assert mergetta(*arguments).returncode == 0
    assert {path.name: path.stat().st_mtime_ns for path in out.glob("*.npy")} == times
    result = mergetta("corrupt", source, "--out", out, "--corruptions", "fog", "--seed", 8)
    assert result.returncode == 2
    assert "was made with seed 7, not 8" in " ".join(result.stderr.split())


def test_one_severity_is_where_the_published_set_has_it(tmp_path: Path) -> None:
    source, images = cifar(tmp_path)
    result = mergetta("corrupt", source, "--out", tmp_path, "--corruptions", "snow", "--severities", "4", "--jobs", 1)
    assert result.returncode == 0, result.stderr
    stacked = np.load(tmp_path / "snow.npy")
    assert stacked.shape == (150, 32, 32, 3)
    np.testing.assert_array_equal(stacked[90:120], corrupt(images, "snow", 4))
    with pytest.raises(ValueError, match="made without severity 5"):
        CifarC(tmp_path).domain("snow", 5)


def test_folder(tmp_path: Path) -> None:
    source = photographs(tmp_path / "clean")
    out = tmp_path / "C"
    arguments = ("corrupt", source, "--out", out, "--corruptions", "contrast", "--severities", "2,5", "--jobs", 1)
    assert mergetta(*arguments).returncode == 0
    files = sorted(out.rglob("*.JPEG"))
    assert len(files) == 12
    assert files[0] == out / "contrast" / "2" / "n00000000" / "val_0.JPEG"
    made, fresh = ImagenetC(out).whole("contrast", 5), ImagenetC(source).whole("contrast", 5)
    assert made.labels.tolist() == fresh.labels.tolist() == [0, 0, 1, 1, 2, 2]
    everything = np.arange(6)
    assert np.abs(made.images[everything].astype(int) - fresh.images[everything]).mean() < 2

    kept = {path: path.stat().st_mtime_ns for path in files[1:]}
    content = files[0].read_bytes()
    files[0].unlink()
    with pytest.raises(ValueError, match="has 5 of 6 images: give the same `mergetta corrupt` again"):
        ImagenetC(out).domain("contrast", 2)
    (files[0].parent / ".val_0.JPEG.1.abc").write_bytes(b"half")
    assert mergetta(*arguments).returncode == 0
    assert files[0].read_bytes() == content
    assert {path: path.stat().st_mtime_ns for path in files[1:]} == kept
    assert sorted(out.rglob("*.JPEG")) == files
    assert not list(out.rglob(".val*"))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_resumes_after_a_kill(tmp_path: Path) -> None:
    source, images = cifar(tmp_path, 250)
    out = tmp_path / "C"
    arguments = ["corrupt", source, "--out", out, "--corruptions", "zoom_blur,brightness", "--jobs", 1]
    script = Path(sys.executable).with_name("mergetta")
    process = subprocess.Popen([script, *map(str, arguments)], start_new_session=True, stderr=subprocess.DEVNULL)
    parts = out / ".parts"
    deadline = time.monotonic() + 60
    while not (parts / "zoom_blur-1.npy").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)  # the parent alone: its workers must end by themselves
    process.wait()
    while session_lives(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not session_lives(process.pid)
    assert not (out / "brightness.npy").exists()
    mark = np.zeros_like(images)
    np.save(parts / "zoom_blur-1.npy", mark)  # if it is not made again, this is what gets stacked
    result = mergetta(*arguments)
    assert result.returncode == 0, result.stderr
    assert not parts.exists()
    zoomed, brighter = np.load(out / "zoom_blur.npy"), np.load(out / "brightness.npy")
    np.testing.assert_array_equal(zoomed[:250], mark)
    np.testing.assert_array_equal(zoomed[1000:], corrupt(images, "zoom_blur", 5))
    np.testing.assert_array_equal(brighter[:250], corrupt(images, "brightness", 1))


def session_lives(session: int) -> bool:
    """Whether a process of the session runs; one that has ended and waits to be collected does not."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, _, group, *_ = stat.read_text().rpartition(")")[2].split()
            if int(group) == session and state != "Z":
                return True
    return False


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing.npz"], "There is no file or folder nothing.npz"),
        (["cifar10_test.npz", "--corruptions", "rain"], "There is no corruption 'rain'"),
        (["cifar10_test.npz", "--corruptions", ","], "Name at least one corruption"),
        (["cifar10_test.npz", "--severities", "1,6"], "There is no severity '6'"),
        (["cut.npz"], "Cannot read cut.npz as an npz file"),
        (["unlabelled.npz"], "no array named 'labels' or 'y'"),
        (["empty"], "empty has no class folders"),
        (["broken", "--corruptions", "fog", "--jobs", "1"], "Cannot read the image broken/n00000001/a.JPEG"),
        (["cifar10_test.npz", "--out", "foreign", "--corruptions", "fog"], "foreign/fog.npy is not from"),
    ],
)
def test_errors(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    source, images = cifar(tmp_path)
    (tmp_path / "cut.npz").write_bytes(source.read_bytes()[:-500])
    np.savez(tmp_path / "unlabelled.npz", x=images)
    for folder in ("empty", "foreign", "broken/n00000001"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "broken" / "n00000001" / "a.JPEG").write_bytes(b"\xff\xd8 not much")
    np.save(tmp_path / "foreign" / "fog.npy", images)
    options = [] if "--out" in arguments else ["--out", "C"]
    result = mergetta("corrupt", *arguments, *options, cwd=tmp_path)
    assert result.returncode == 2
    assert sentence in " ".join(result.stderr.split())
