"""The examples run as they stand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from .test_docs import ROOT

CLASSES = ("cat", "dog", "owl")


def test_own_model_and_camera(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript")
    cv2 = pytest.importorskip("cv2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / "examples" / "own_model.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 20 and all(line.split()[0] in CLASSES for line in lines)
    writer = cv2.VideoWriter("clip.avi", cv2.VideoWriter.fourcc(*"MJPG"), 5, (64, 48))
    for _ in range(3):
        writer.write(np.full((48, 64, 3), 100, np.uint8))
    writer.release()
    monkeypatch.setattr(sys, "argv", ["camera.py", "own_model.onnx", "own_bundle.safetensors", "clip.avi"])
    runpy.run_path(str(ROOT / "examples" / "camera.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.split()[0] in CLASSES for line in lines)
