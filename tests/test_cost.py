"""The cost benchmark: rows as promised, passes counted right. No test asserts a time."""

from __future__ import annotations

import pytest

from mergetta.bench import cost

pytest.importorskip("onnxscript")


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "peak_memory", lambda runtime, variant, *_: 100.0 if variant == "inference" else 150.0)
    rows = {
        (row["runtime"], row["variant"]): row for row in cost.measure_model("fashion-bn", 8, 1, 1, lambda text: None)
    }
    assert set(rows) == {("onnx", v) for v in cost.ONNX} | {("torch", v) for v in cost.TORCH}
    wanted = {"deployed": 1, "inference": 1, "adapting": 3, "two-forward": 2, "settled": 1, "int8-adapting": 3}
    assert {variant: rows["onnx", variant]["forwards"] for variant in wanted} == wanted
    assert rows["onnx", "inference"]["seconds_ratio"] == 1
    assert rows["onnx", "deployed"]["deployed_ratio"] == 1
    assert rows["torch", "tent"]["memory_ratio"] == 1.5
    keys = {"runtime", "model", "batch", "variant", "seconds_ratio", "deployed_ratio", "memory_ratio", "forwards"}
    assert keys <= set(rows["torch", "roid"])


def test_memory_is_of_a_fresh_process_without_torch(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cost.export_all("fashion-bn", tmp_path, 8)
    plain = cost.peak_memory("onnx", "inference", "fashion-bn", tmp_path, 1)
    adapting = cost.peak_memory("onnx", "adapting", "fashion-bn", tmp_path, 1)
    assert 30 < plain < 200  # this very test process holds torch and is larger
    assert adapting < 1.10 * plain
