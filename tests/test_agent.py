"""The loop of a device, with any method: it survives being killed at any moment."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergetta import Expert, MergettaError, build_bundle
from mergetta.adapters.base import ADAPTING, SETTLED
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.data.streams import as_input
from mergetta.device.agent import Agent
from mergetta.device.state import Progress, Saved, load_state, save_state
from mergetta.device.stream import ImageShape, Item
from mergetta.files import encode
from mergetta.runtimes.base import Classifier

from .moving import moved
from .numpy_runtime import NumpyRuntime
from .test_governed import governed

CLASSES = list("abcd")
GREY = ImageShape(1, 28)


def items_of(count: int) -> list[Item]:
    rng = np.random.default_rng(0)
    return [Item(f"{i}", rng.integers(0, 256, (6, 6, 1)).astype(np.uint8), content=f"{i}") for i in range(count)]


def batched(items: list[Item], size: int) -> list[list[Item]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
        *_, summary = self.make(tmp_path / "whole").run(batched(items, 64))
        assert (summary.images, summary.batches, summary.state, summary.steps) == (
            1664,
            26,
            SETTLED,
            20,
        )  # of 8 candidates the best 6 twice more
        assert 1 < summary.forwards <= 2
        agent = self.make(tmp_path)
        first = [agent.step(batch) for batch in batched(items, 64)[:3]]
        assert first[-1].state == ADAPTING
        assert agent.adapter.state_dict()["trials.held"].dtype == np.uint8
        agent.save()
        again = self.make(tmp_path)
        *_, resumed = again.run(batched(items[again.position :], 64))
        assert resumed == summary
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()


class TestAgent:
    def make(self, folder: Path) -> Agent:
        return Agent(governed(), "b", CLASSES, folder / "out.jsonl", folder / "state.safetensors")

    def test_writes_and_resumes(self, tmp_path: Path) -> None:
        items = items_of(50)
        (tmp_path / "whole").mkdir()
        list(self.make(tmp_path / "whole").run(batched(items, 8)))
        agent = self.make(tmp_path)
        for batch in batched(items, 8)[:3]:
            agent.step(batch)
        agent.close()
        with (tmp_path / "out.jsonl").open("ab") as file:
            file.write(b'{"half a li')  # the power fails in the middle of a write
        again = self.make(tmp_path)
        assert again.position == 24
        list(again.run(batched(items[24:], 8)))
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [row["index"] for row in rows] == list(range(50))
        assert {"index", "name", "content", "label", "class", "confidence"} == set(rows[0])

    def test_bad_images_are_reported_and_counted(self, tmp_path: Path) -> None:
        items = items_of(6)
        items[2] = Item("2", None, "cannot be read")
        agent = self.make(tmp_path)
        (summary,) = agent.run(batched(items, 6))
        assert (summary.images, summary.bad) == (5, 1)
        rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert rows[2] == {"index": 2, "name": "2", "error": "cannot be read"}
        all_bad = Agent(governed(), "b", CLASSES, tmp_path / "bad.jsonl")
        (summary,) = all_bad.run(iter([[Item("x", None, "gone")]]))
        assert summary.bad == 1

    def test_csv(self, tmp_path: Path) -> None:
        items = items_of(5)
        items[3] = Item("3", None, "gone, too")
        for _ in Agent(governed(), "b", CLASSES, tmp_path / "out.csv").run(batched(items, 2)):
            pass
        with (tmp_path / "out.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["index"] for row in rows] == list("01234")
        assert rows[3]["error"] == "gone, too"
        assert rows[0]["class"] in CLASSES

    def test_a_state_of_something_else_is_refused(self, tmp_path: Path) -> None:
        save_state(tmp_path / "s", Saved({"a": 1, "b": np.ones(2)}, {"out": Progress(3, 4)}), "f", "b")
        saved = load_state(tmp_path / "s", "f", "b")
        assert (saved.learnt["a"], saved.progress) == (1, {"out": Progress(3, 4)})
        with pytest.raises(MergettaError, match="another family"):
            load_state(tmp_path / "s", "g", "b")
        with pytest.raises(MergettaError, match="another bundle"):
            load_state(tmp_path / "s", "f", "c")
        assert load_state(tmp_path / "none", "f", "b") is None

    def test_one_of_before_the_filter_and_the_steps_says_what_to_do(self, tmp_path: Path) -> None:
        header = {"family": "f", "bundle": "b", "progress": {}, "numbers": {}}
        (tmp_path / "s").write_bytes(encode({}, "mergetta.state", 3, header))
        with pytest.raises(MergettaError, match="delete it to start anew"):
            load_state(tmp_path / "s", "f", "b")

    def test_a_crash_in_the_first_batch_of_another_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def another() -> Agent:
            return Agent(governed(), "b", CLASSES, tmp_path / "other.jsonl", tmp_path / "state.safetensors")

        list(self.make(tmp_path).run(batched(items_of(8), 4)))
        agent = another()
        monkeypatch.setattr(agent, "finish", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            agent.step(items_of(4))
        assert len(rows_of(tmp_path / "other.jsonl")) == 4
        list(another().run(batched(items_of(8), 4)))
        assert [row["index"] for row in rows_of(tmp_path / "other.jsonl")] == list(range(8))

    def test_single_frames_do_not_wait_for_the_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both files are brought to the disk once a second; whoever follows the rows sees them at once."""
        clock, synced = [0.0], []
        monkeypatch.setattr(time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(os, "fsync", synced.append)
        agent = self.make(tmp_path)
        for number, batch in enumerate(batched(items_of(120), 1), 1):
            clock[0] += 1 / 30
            agent.step(batch)
            assert len(rows_of(tmp_path / "out.jsonl")) == number
        assert len(synced) <= 2 * 5
        assert 120 - 31 <= self.make(tmp_path).position < 120
        agent.close()
        assert self.make(tmp_path).position == 120

    def test_half_a_batch_is_not_saved(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The adapter has learnt from a batch whose rows could not be written: none of it counts."""
        (tmp_path / "whole").mkdir()
        list(self.make(tmp_path / "whole").run(batched(items_of(40), 4)))
        agent, steps = self.make(tmp_path), batched(items_of(40), 4)
        agent.step(steps[0])
        agent.save()
        agent.step(steps[1])
        monkeypatch.setattr(agent, "_write", lambda rows: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(agent.run(steps[2:]))
        again = self.make(tmp_path)
        assert again.position == 4
        list(again.run(steps[1:]))
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole" / "out.jsonl").read_bytes()

    def test_moved_together(self, tmp_path: Path) -> None:
        list(self.make(tmp_path / "here").run(batched(items_of(8), 4)))
        (tmp_path / "here").rename(tmp_path / "there")
        assert self.make(tmp_path / "there").position == 8

    def test_a_lost_prediction_file_is_noticed(self, tmp_path: Path) -> None:
        list(self.make(tmp_path).run(batched(items_of(8), 4)))
        (tmp_path / "out.jsonl").write_bytes(b"")
        with pytest.raises(MergettaError, match="shorter than"):
            self.make(tmp_path)


KILLED = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from typing import Any
from tests.test_agent import *
from mergetta.device import agent as module
module.SYNC_EVERY = 0.02  # so that a few batches are lost with every kill, and others are not
agent = {kind}().make(Path({folder!r}))
for _ in agent.run(batched(items_of({count})[agent.position:], {size})):
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
    list(globals()[kind]().make(whole).run(batched(items_of(count), size)))
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
