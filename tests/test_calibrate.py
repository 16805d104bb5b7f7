"""Calibration finds the δ from which on slopes are slopes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mergetta import MergettaError, OnnxRuntime, TorchRuntime, ZOMerge, build_bundle
from mergetta.adapters.backprop.hybrid import Hybrid
from mergetta.device.methods import create
from mergetta.zeroth_order.calibrate import GRID, calibrate_delta, correlation
from mergetta.zeroth_order.spsa import DELTA

from .test_cli import mergetta

TARGET = np.linspace(-1, 1, 6)


def test_exact_losses_take_the_smallest() -> None:
    found = calibrate_delta(lambda w: float(((w - TARGET) ** 2).sum()), np.zeros(6))
    assert found.delta == GRID[0]
    assert found.agreement[GRID[0]] == pytest.approx(1)


@pytest.mark.parametrize("step", [1e-4, 1e-2])
def test_rounded_losses_need_more(step: float) -> None:
    """A loss known only to multiples of `step`: differences 2δS must be several steps, slopes S are about 4."""

    def rounded(w: np.ndarray) -> float:
        return round(float(((w - TARGET) ** 2).sum()) / step) * step

    found = calibrate_delta(rounded, np.zeros(6))
    assert step / 8 < found.delta < 20 * step


def test_correlation() -> None:
    assert correlation(np.array([1.0, 2.0]), np.array([2.0, 4.0])) == pytest.approx(1)
    assert correlation(np.zeros(2), np.ones(2)) == 0
    assert correlation(np.array([np.nan, 1]), np.ones(2)) == -1
    with pytest.raises(MergettaError, match="At least 4 directions"):
        calibrate_delta(lambda w: 0.0, np.zeros(2), directions=1)


def test_slopes_that_agree_nowhere() -> None:
    noise = np.random.default_rng(0)
    assert calibrate_delta(lambda w: float(noise.normal()), np.zeros(6)).delta is None


def test_delta_is_one_number_where_it_is_not_calibrated(bn_runtime: TorchRuntime) -> None:
    bundle = build_bundle(bn_runtime.groups, [bn_runtime.groups], family=bn_runtime.family)
    bn_runtime.metadata = {}  # type: ignore[attr-defined]
    governed = create("zo-merge", bn_runtime, bundle, {}, runs=False, head=False)  # type: ignore[arg-type]
    assert governed.adapter.delta == ZOMerge(bn_runtime, bundle).delta == Hybrid(bn_runtime, bundle).delta == DELTA  # type: ignore[attr-defined]


def test_command_writes_the_model(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    for command in (
        ["adapt", "fashion:fog@3", "--family", "fashion-vit", "--out", "e", "--batch-size", 2000, "--lr", 0.01],
        ["build", "e", "--out", "b", "--initial", 0.5],
        ["export", "--family", "fashion-vit", "--out", "m.onnx"],
        ["export", "--family", "fashion-vit", "--int8", "dynamic", "--out", "q.onnx"],
    ):
        result = mergetta(*command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    deltas = {}
    for model in ("m.onnx", "q.onnx"):
        found = mergetta(
            "calibrate", "--model", model, "--bundle", "b", "--images", "fashion:fog@3", "--json", cwd=tmp_path
        )
        assert found.returncode == 0, found.stderr
        deltas[model] = json.loads(found.stdout)["delta"]
        assert OnnxRuntime(tmp_path / model).metadata["delta"] == deltas[model]
    assert deltas["m.onnx"] < deltas["q.onnx"]  # int8 needs the larger perturbation
