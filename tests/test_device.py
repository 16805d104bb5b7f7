"""The device: one loop for any method, which survives being killed at any moment."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergetta import Expert, MergettaError, OnnxRuntime, build_bundle
from mergetta.adapters.base import ADAPTING, SETTLED
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.device.agent import Agent
from mergetta.device.state import load_state, save_state
from mergetta.device.stream import Item, batched, open_stream
from mergetta.runtimes.base import Classifier

from .moving import moved
from .numpy_runtime import NumpyRuntime
from .test_cli import mergetta
from .test_governed import governed

CLASSES = list("abcd")


class TestStream:
    def test_folder_goes_on_past_bad_images(self, tmp_path: Path) -> None:
        Image.fromarray(np.full((9, 5, 3), 200, np.uint8)).save(tmp_path / "a.png")
        (tmp_path / "b.jpg").write_bytes(b"not a jpeg")
        Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "c.png")
        items = list(open_stream(str(tmp_path), 1, 28))
        assert [item.name for item in items] == ["a.png", "b.jpg", "c.png"]
        assert [item.image is None for item in items] == [False, True, False]
        assert items[0].image.shape == (28, 28, 1)
        assert "Cannot read the image" in items[1].problem
        assert [item.number for item in open_stream(str(tmp_path), 1, 28, start=2)] == [2]

    def test_npz_and_wrong_channels(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", images=np.zeros((3, 6, 6, 3), np.uint8))
        assert [item.problem for item in open_stream(str(tmp_path / "x.npz"), 1, 6)] == ["has 3 channels, not 1"] * 3
        with pytest.raises(MergettaError, match="has no images"):
            (tmp_path / "empty").mkdir()
            list(open_stream(str(tmp_path / "empty"), 1, 6))

    def test_raw_frames(self) -> None:
        pixels = np.arange(2 * 12, dtype=np.uint8).tobytes() + b"xyz"
        items = list(open_stream("-", 1, 6, frame=(3, 4), stdin=io.BytesIO(pixels)))
        assert [item.image.shape for item in items[:2]] == [(3, 4, 1)] * 2
        assert items[1].image.ravel()[0] == 12
        assert "cut off after 3 of 12 bytes" in items[2].problem

    def test_batches(self) -> None:
        items = [Item(i, "", None) for i in range(5)]
        assert [len(batch) for batch in batched(iter(items), 2)] == [2, 2, 1]


def items_of(count: int) -> list[Item]:
    rng = np.random.default_rng(0)
    return [Item(i, f"{i}", rng.integers(0, 256, (6, 6, 1)).astype(np.uint8)) for i in range(count)]


def evenly(runtime: NumpyRuntime) -> Classifier:
    """One that predicts each class as often for these images: only then are candidates tried."""
    logits = runtime(as_input(np.stack([item.image for item in items_of(500)]))).logits
    weight, bias = runtime.classifier.weight / logits.std(axis=0)[:, None], np.zeros(len(CLASSES), np.float32)
    for _ in range(500):
        found = ((logits - runtime.classifier.bias) / logits.std(axis=0) + bias).argmax(axis=1)
        bias -= 0.1 * (np.bincount(found, minlength=len(CLASSES)) / len(found) - 1 / len(CLASSES)).astype(np.float32)
    return Classifier(weight, bias)


class TestRaceMerge:
    def make(self, folder: Path) -> Agent:
        runtime, rng = NumpyRuntime(), np.random.default_rng(0)
        runtime.classifier = evenly(runtime)
        experts = [Expert(moved(runtime.groups, rng, 0.05), runtime.family, f"{i}") for i in range(4)]
        bundle = build_bundle(runtime.groups, experts)
        adapter = RaceMerge(runtime, bundle)
        return Agent(adapter, bundle.digest, CLASSES, folder / "out.jsonl", folder / "state.safetensors")

    def test_settles_counts_and_resumes(self, tmp_path: Path) -> None:
        items = items_of(1664)
        (tmp_path / "whole").mkdir()
        *_, summary = self.make(tmp_path / "whole").run(batched(iter(items), 64))
        assert (summary.images, summary.batches, summary.state, summary.steps) == (1664, 26, SETTLED, 14)
        assert 1 < summary.forwards <= 2
        agent = self.make(tmp_path)
        first = [agent.step(batch) for batch in list(batched(iter(items), 64))[:3]]
        assert first[-1].state == ADAPTING
        assert agent.adapter.state_dict()["trials.held"].dtype == np.uint8
        again = self.make(tmp_path)
        *_, resumed = again.run(batched(iter(items[again.position :]), 64))
        assert resumed == summary
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()


class TestAgent:
    def make(self, folder: Path) -> Agent:
        return Agent(governed(), "b", CLASSES, folder / "out.jsonl", folder / "state.safetensors")

    def test_writes_and_resumes(self, tmp_path: Path) -> None:
        items = items_of(50)
        (tmp_path / "whole").mkdir()
        list(self.make(tmp_path / "whole").run(batched(iter(items), 8)))
        agent = self.make(tmp_path)
        for batch in list(batched(iter(items), 8))[:3]:
            agent.step(batch)
        agent._file.write(b'{"half a li')  # the power fails in the middle of a write
        agent._file.close()
        again = self.make(tmp_path)
        assert again.position == 24
        list(again.run(batched(iter(items[24:]), 8)))
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row["index"] for row in rows] == list(range(50))
        assert {"index", "name", "label", "class", "confidence"} == set(rows[0])

    def test_bad_images_are_reported_and_counted(self, tmp_path: Path) -> None:
        items = items_of(6)
        items[2] = Item(2, "2", None, "cannot be read")
        agent = self.make(tmp_path)
        (summary,) = agent.run(batched(iter(items), 6))
        assert (summary.images, summary.bad) == (5, 1)
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert rows[2] == {"index": 2, "name": "2", "error": "cannot be read"}
        all_bad = Agent(governed(), "b", CLASSES, tmp_path / "bad.jsonl")
        (summary,) = all_bad.run(iter([[Item(0, "x", None, "gone")]]))
        assert summary.bad == 1

    def test_csv(self, tmp_path: Path) -> None:
        items = items_of(5)
        items[3] = Item(3, "3", None, "gone, too")
        for _ in Agent(governed(), "b", CLASSES, tmp_path / "out.csv").run(batched(iter(items), 2)):
            pass
        with (tmp_path / "out.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["index"] for row in rows] == list("01234")
        assert rows[3]["error"] == "gone, too"
        assert rows[0]["class"] in CLASSES

    def test_a_state_of_something_else_is_refused(self, tmp_path: Path) -> None:
        save_state(tmp_path / "s", {"a": 1, "b": np.ones(2)}, "f", "b", 3, 4)
        state, position, written = load_state(tmp_path / "s", "f", "b")
        assert (state["a"], position, written) == (1, 3, 4)
        with pytest.raises(MergettaError, match="another family"):
            load_state(tmp_path / "s", "g", "b")
        with pytest.raises(MergettaError, match="another bundle"):
            load_state(tmp_path / "s", "f", "c")
        assert load_state(tmp_path / "none", "f", "b") is None

    def test_a_lost_prediction_file_is_noticed(self, tmp_path: Path) -> None:
        list(self.make(tmp_path).run(batched(iter(items_of(8)), 4)))
        (tmp_path / "out.jsonl").write_bytes(b"")
        with pytest.raises(MergettaError, match="shorter than"):
            self.make(tmp_path)


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_device import *
agent = {kind}().make(Path({folder!r}))
for _ in agent.run(batched(iter(items_of({count})[agent.position:]), {size})):
    time.sleep(0.002)
"""


@pytest.mark.parametrize(("kind", "size"), [("TestAgent", 8), ("TestRaceMerge", 1)])
def test_killed_at_random_moments(kind: str, size: int, tmp_path: Path) -> None:
    """kill −9, again and again ($MERGETTA_KILLS times): the end is what an undisturbed run writes."""
    wanted = int(os.environ.get("MERGETTA_KILLS", "6"))
    count = 70 * wanted
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    folder.mkdir()
    whole.mkdir()
    list(globals()[kind]().make(whole).run(batched(iter(items_of(count)), size)))
    chance = random.Random(0)
    code = KILLED.format(root=str(Path(__file__).parents[1]), folder=str(folder), count=count, kind=kind, size=size)
    kills = 0
    for _ in range(3 * wanted):
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
        before = (folder / "out.jsonl").stat().st_size if (folder / "out.jsonl").exists() else 0
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            now = (folder / "out.jsonl").stat().st_size if (folder / "out.jsonl").exists() else 0
            if now != before and kills < wanted:
                time.sleep(chance.uniform(0, 0.05))
                os.kill(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.001)
        code_returned = process.wait()
        if code_returned == 0:
            break
        assert code_returned == -signal.SIGKILL, process.stderr.read().decode()
    assert kills >= wanted / 2
    assert (folder / "out.jsonl").read_bytes() == (whole / "out.jsonl").read_bytes()


def test_from_export_to_predictions(tmp_path: Path) -> None:
    """The commands of the documentation, end to end; a second start finds nothing left to do."""
    pytest.importorskip("onnxscript")
    pixels, labels = load_fashion()
    np.savez(tmp_path / "stream.npz", images=pixels[:150])
    for command in (
        ["adapt", "stream.npz", "--out", "e.safetensors", "--batch-size", 50],
        ["build", "e.safetensors", "--out", "b.safetensors"],
        ["export", "--out", "m.onnx"],
    ):
        result = mergetta(*command, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
    run = ["run", "--model", "m.onnx", "--bundle", "b.safetensors", "--images", "stream.npz", "--state", "s", "--json"]
    summary = json.loads(mergetta(*run, cwd=tmp_path).stdout)
    assert summary["images"] == 150
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert np.mean([row["label"] == label for row, label in zip(rows, labels[:150], strict=True)]) > 0.85
    assert summary["normalises"] == "what the source model was trained with"  # clean images
    again = mergetta(*run, cwd=tmp_path)
    assert again.returncode == 0
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 150
    single = mergetta(*run[:-3], "--batch-size", 1, "--out", "single.jsonl", cwd=tmp_path)
    assert "normalised with what the source model was trained with" in " ".join(single.stdout.split())
    frames = [json.loads(line)["label"] for line in (tmp_path / "single.jsonl").read_text().splitlines()]
    source = OnnxRuntime(tmp_path / "m.onnx")(as_input(pixels[:150]), given=1.0).logits.argmax(axis=1)
    assert np.mean(frames == labels[:150]) >= np.mean(source == labels[:150]) - 0.04
    assert (summary["steps"], set(summary["weights"])) == (2, {"stream", "source model"})
    plain = [*run[:7], "--json"]
    two = json.loads(mergetta(*plain, "--mirror", cwd=tmp_path).stdout)
    assert two["forwards"] >= summary["forwards"] + 0.9
    steps = json.loads(
        mergetta(*plain, "--method", "zo-merge", "-o", "max_steps=1", "-o", "lr=0.01", cwd=tmp_path).stdout
    )
    assert (steps["steps"], steps["weights"], steps["state"]) == (1, {}, "settled")
    for wrong, words in (
        (["--exclude", "fog"], "goes with --hub only"),
        (["--method", "cola"], "runs race-merge or zo-merge"),
        (["-o", "lr=0.1"], "race-merge has no option 'lr'"),
        (["-o", "temperature=-1"], "temperature must be positive"),
        (["-o", "temperature=warm"], "wrong value"),
        (["-o", "source=1"], "takes no option 'source' here"),
        (["-o", "lr"], "must be NAME=VALUE"),
    ):
        refused = mergetta(*plain, *wrong, cwd=tmp_path)
        assert refused.returncode in (1, 2) and words in " ".join(re.sub("[│╭╰─╮╯]", " ", refused.stderr).split())
    mergetta("export", "--family", "fashion-vit", "--calibration", "stream.npz", "--out", "v.onnx", cwd=tmp_path)
    assert np.shape(OnnxRuntime(tmp_path / "v.onnx").metadata["features"])[0] == 2
    wrong = mergetta("run", "--model", "v.onnx", "--bundle", "b.safetensors", "--images", "stream.npz", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "belongs to the family" in " ".join(wrong.stderr.split())
