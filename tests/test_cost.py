"""The cost benchmark: rows as promised, passes counted right. No test asserts a time."""

from __future__ import annotations

import pytest

from mergetta.bench import cost

pytest.importorskip("onnxscript")


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cost, "peak_memory", lambda runtime, variant, *_: cost.Memory(100.0 if variant == "inference" else 150.0, 50.0)
    )
    rows = {
        (row["runtime"], row["variant"]): row for row in cost.measure_model("fashion-bn", 8, 1, 1, lambda text: None)
    }
    assert set(rows) == {("onnx", v) for v in cost.ONNX} | {("torch", v) for v in cost.TORCH}
    wanted = {
        "deployed": 1,
        "inference": 1,
        "adapting": 3,
        "two-forward": 2,
        "settled": 1,
        "folded": 1,
        "int8-adapting": 3,
    }
    assert {variant: rows["onnx", variant]["forwards"] for variant in wanted} == wanted
    assert 1 <= rows["onnx", "race-merge"]["forwards"] <= 3
    assert rows["onnx", "inference"]["seconds_ratio"] == 1
    assert rows["onnx", "deployed"]["deployed_ratio"] == 1
    assert rows["torch", "tent"]["memory_ratio"] == 1.5
    keys = {"runtime", "model", "batch", "variant", "seconds_ratio", "deployed_ratio", "memory_ratio", "forwards"}
    assert keys <= set(rows["torch", "roid"])


def test_memory_is_of_a_fresh_process_without_torch(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cost.export_all("fashion-bn", tmp_path, 8)
    plain = cost.peak_memory("onnx", "inference", "fashion-bn", tmp_path, 1)
    adapting, plus = (
        cost.peak_memory("onnx", variant, "fashion-bn", tmp_path, 1) for variant in ("adapting", "race-merge")
    )
    assert 30 < plain.peak < 200  # this very test process holds torch and is larger
    assert max(adapting.peak, plus.peak) < 1.10 * plain.peak
    assert 0 <= plain.heap < plain.peak


def test_the_page_shows_every_row() -> None:
    row = {"runtime": "onnx", "model": "fashion-bn", "batch": 64, "forwards": 3.0, "memory_mb": 80, "heap_mb": 40}
    ratios = {"seconds_ratio": 3.04, "deployed_ratio": 4.2, "memory_ratio": 1.03}
    text = cost.cost_page([{**row, **ratios, "variant": variant} for variant in ("inference", "adapting")])
    assert text.count("<td>adapting</td>") == 1 and "<svg" in text and "3.04" in text
