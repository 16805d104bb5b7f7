"""The examples run as they stand."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from mergetta.data.fashion import load_fashion

from .hub_parts import free_port
from .test_cli import mergetta
from .test_docs import ROOT, blocks


def test_own_model_and_camera(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example, the commands of the documentation that do the same, and a camera, on a few images."""
    pytest.importorskip("onnxscript")
    cv2 = pytest.importorskip("cv2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    own_model = importlib.import_module("own_model")
    own_model.main("snow", 300)
    before, after, *times = capsys.readouterr().out.splitlines()
    gained = [float(line.split()[-2]) for line in (before, after)]
    assert gained[1] > gained[0] + 30
    assert [line.partition(":")[0] for line in times] == [
        "plain ONNX Runtime",
        "mergetta, the first 100 frames",
        "mergetta, the last 100 frames",
    ]
    few = tuple(part[:300] for part in load_fashion())
    for module in ("images", "labelled"):
        monkeypatch.setattr(f"mergetta.data.{module}.load_fashion", lambda: few)
    (commands,) = blocks(ROOT / "docs" / "guide" / "device.md", "bash")
    for command in commands.splitlines():
        result = mergetta(*shlex.split(command)[1:])
        assert result.returncode == 0, result.stderr
    assert "fashion:snow@5: 300 images; race-merge, batches of 1" in result.stdout
    writer = cv2.VideoWriter("clip.avi", cv2.VideoWriter.fourcc(*"MJPG"), 5, (64, 48))
    for _ in range(3):
        writer.write(np.full((48, 64, 3), 100, np.uint8))
    writer.release()
    monkeypatch.setattr(sys, "argv", ["camera.py", "own_model.onnx", "own_bundle.safetensors", "clip.avi"])
    capsys.readouterr()
    runpy.run_path(str(ROOT / "examples" / "camera.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.split()[0] in own_model.CLASSES for line in lines)


def test_fleet(tmp_path: Path, exported: Callable[[str], Path]) -> None:
    pytest.importorskip("fastapi")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", ROOT / "examples" / "fleet.sh", str(free_port()), exported("fashion-bn")],
        env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"([\d.]+) %", done.stdout.splitlines()[-1]))
    assert after < before - 20
    assert not list(tmp_path.glob("tmp.*"))


def test_notebook() -> None:
    matplotlib.use("agg")
    space: dict = {}
    for cell in json.loads((ROOT / "examples" / "fog.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), space)
    assert space["helped"][8:].mean() < space["alone"][8:].mean() - 20
    assert len(space["mended"]) == 10
