"""The device: one loop for any method, which survives being killed at any moment."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mergetta import Bundle, Device, Expert, MergettaError, OnnxRuntime, build_bundle
from mergetta.adapters.base import ADAPTING, SETTLED
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.device import agent as agent_module
from mergetta.device.agent import Agent
from mergetta.device.state import Progress, Saved, load_state, save_state
from mergetta.device.stream import Batches, ImageShape, Item, open_stream
from mergetta.runtimes.base import Classifier

from .moving import moved
from .numpy_runtime import NumpyRuntime
from .test_cli import Result, mergetta
from .test_docs import ROOT, blocks
from .test_governed import governed

CLASSES = list("abcd")
GREY = ImageShape(1, 28)


class TestStream:
    def test_folder_goes_on_past_bad_images(self, tmp_path: Path) -> None:
        Image.fromarray(np.full((9, 5, 3), 200, np.uint8)).save(tmp_path / "a.png")
        (tmp_path / "b.jpg").write_bytes(b"not a jpeg")
        Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "c.png")
        items = list(open_stream(str(tmp_path), GREY))
        assert [item.name for item in items] == ["a.png", "b.jpg", "c.png"]
        assert [item.image is None for item in items] == [False, True, False]
        assert items[0].image.shape == (28, 28, 1)
        assert items[1].problem.endswith("b.jpg: cannot identify image file of 10 bytes.")

    def test_what_is_done_is_known_by_name_and_content(self, tmp_path: Path) -> None:
        for name in ("b.png", "c.png"):
            Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / name)
        (tmp_path / "bad.png").write_bytes(b"")
        done = {(item.name, item.content) for item in open_stream(str(tmp_path), GREY)}
        assert len(done) == 3
        Image.fromarray(np.ones((28, 28), np.uint8)).save(tmp_path / "b.png")
        shutil.copy(tmp_path / "c.png", tmp_path / "a.png")
        assert [item.name for item in open_stream(str(tmp_path), GREY, lambda: done)] == ["a.png", "b.png"]

    def test_npz_and_wrong_shapes(self, tmp_path: Path) -> None:
        path = str(tmp_path / "x.npz")
        np.savez(path, images=np.zeros((3, 6, 6, 3), np.uint8))
        assert [item.problem for item in open_stream(path, ImageShape(1, 6))] == [
            "The image has 3 channels, not 1: convert it to grey."
        ] * 3
        assert [item.image.shape for item in open_stream(path, ImageShape(3, 4))] == [(4, 4, 3)] * 3
        refused = open_stream(path, ImageShape(3, 4, resize=False))
        assert {item.problem for item in refused} == {"The image has 6x6 pixels, not 4x4."}
        with pytest.raises(MergettaError, match="has no images"):
            (tmp_path / "empty").mkdir()
            open_stream(str(tmp_path / "empty"), GREY)

    def test_raw_frames(self) -> None:
        pixels = np.arange(2 * 12, dtype=np.uint8).tobytes() + b"xyz"
        items = list(open_stream("-", ImageShape(1, 6), frame=(3, 4), stdin=io.BytesIO(pixels)))
        assert [item.image.shape for item in items[:2]] == [(6, 6, 1)] * 2
        assert items[1].image.ravel()[0] == 12
        assert "cut off after 3 of 12 bytes" in items[2].problem
        with pytest.raises(MergettaError, match="3x4 pixels, not 6x6"):
            list(open_stream("-", ImageShape(1, 6, resize=False), frame=(3, 4), stdin=io.BytesIO(pixels)))

    @pytest.mark.parametrize("channels", [1, 3])
    def test_videos(self, tmp_path: Path, channels: int) -> None:
        cv2 = pytest.importorskip("cv2")
        path = str(tmp_path / "clip.avi")
        writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"MJPG"), 5, (32, 16))
        for level in (0, 100, 200):
            writer.write(np.full((16, 32, 3), (level, level, level), np.uint8))
        writer.release()
        items = list(open_stream(path, ImageShape(channels, 8)))
        assert [item.name for item in items] == ["0", "1", "2"]
        assert [item.image.shape for item in items] == [(8, 8, channels)] * 3
        np.testing.assert_allclose([item.image.mean() for item in items], [0, 100, 200], atol=4)
        done = {(item.name, item.content) for item in items[:2]}
        assert [item.name for item in open_stream(path, ImageShape(channels, 8), lambda: done)] == ["2"]
        address = open_stream(f"file://{path}", ImageShape(channels, 8))  # a live stream: its end is none of its own
        assert [next(address).name for _ in range(3)] == [""] * 3
        with pytest.raises(MergettaError, match="gives no more frames"):
            next(address)
        for source, words in (
            ("camera:x", "as in camera:0"),
            ("camera:77", "cannot open camera:77"),
            (str(tmp_path / "none.mp4"), "There is no file"),
        ):
            with pytest.raises(MergettaError, match=words):
                open_stream(source, GREY)


class TestBatches:
    def test_sizes(self) -> None:
        assert [len(batch) for batch in Batches(iter([Item("", None)] * 5), 2)] == [2, 2, 1]

    def test_a_batch_does_not_wait_for_ever(self) -> None:
        more = threading.Event()

        def slow() -> Iterator[Item]:
            yield from [Item("", None)] * 3
            more.wait(60)
            yield Item("", None)

        batches = iter(Batches(slow(), 2, max_wait=0.01))
        assert [len(next(batches)) for _ in range(2)] == [2, 1]
        more.set()
        assert [len(batch) for batch in batches] == [1]

    def test_stops_with_what_was_read(self) -> None:
        forever = threading.Event()

        def stuck() -> Iterator[Item]:
            yield from [Item("", None)] * 3
            batches.stop()
            forever.wait(60)
            yield Item("", None)

        batches = Batches(stuck(), 64)
        assert [len(batch) for batch in batches] == [3]
        forever.set()

    def test_what_goes_wrong_in_the_stream_is_told_after_what_came_before(self) -> None:
        def broken() -> Iterator[Item]:
            yield Item("", None)
            raise MergettaError("gone")

        batches = iter(Batches(broken(), 64))
        assert len(next(batches)) == 1
        with pytest.raises(MergettaError, match="gone"):
            next(batches)


def items_of(count: int) -> list[Item]:
    rng = np.random.default_rng(0)
    return [Item(f"{i}", rng.integers(0, 256, (6, 6, 1)).astype(np.uint8), content=f"{i}") for i in range(count)]


def batched(items: list[Item], size: int) -> list[list[Item]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


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
        assert (summary.images, summary.batches, summary.state, summary.steps) == (1664, 26, SETTLED, 14)
        assert 1 < summary.forwards <= 2
        agent = self.make(tmp_path)
        first = [agent.step(batch) for batch in batched(items, 64)[:3]]
        assert first[-1].state == ADAPTING
        assert agent.adapter.state_dict()["trials.held"].dtype == np.uint8
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
from tests.test_device import *
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


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a bundle and a stream, made by the commands of the documentation."""
    pytest.importorskip("onnxscript")
    folder = tmp_path_factory.mktemp("deployed")
    np.savez(folder / "stream.npz", images=load_fashion()[0][:150])
    for command in (
        ["adapt", "stream.npz", "--out", "e.safetensors", "--batch-size", 50],
        ["build", "e.safetensors", "--out", "b.safetensors"],
        ["export", "--out", "m.onnx"],
    ):
        result = mergetta(*command, cwd=folder)
        assert result.returncode == 0, result.stderr
    return folder


def photos(folder: Path, numbers: Iterable[int]) -> Path:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        Image.fromarray(load_fashion()[0][number, ..., 0]).save(folder / f"{number:03}.png")
    return folder


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_base_install_reads_images() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(requirement.startswith("pillow") for requirement in project["dependencies"])


class TestRun:
    @pytest.fixture
    def run(self, deployed: Path, tmp_path: Path) -> Callable[..., Result]:
        def call(*arguments: object) -> Result:
            files = ("--model", deployed / "m.onnx", "--bundle", deployed / "b.safetensors")
            return mergetta("run", *files, *arguments, "--json", cwd=tmp_path)

        return call

    def test_a_stream_without_a_readable_image_is_an_error(self, run: Callable[..., Result], tmp_path: Path) -> None:
        photos(tmp_path / "photos", ())
        (tmp_path / "photos" / "a.png").write_bytes(b"not an image")
        result = run("--images", "photos")
        assert (result.returncode, json.loads(result.stdout)["bad"]) == (1, 1)
        assert "photos has no image that can be read (1 bad)" in result.stderr

    def test_what_lacks_a_library_is_not_done(
        self, run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        photos(tmp_path / "photos", range(3))
        arguments = ("--images", "photos", "--state", "s")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "PIL", None)
            result = run(*arguments)
        assert (result.returncode, "needs PIL" in result.stderr) == (2, True)
        assert not (tmp_path / "s").exists() and not (tmp_path / "predictions.jsonl").exists()
        assert json.loads(run(*arguments).stdout)["images"] == 3

    def test_a_folder_that_grows_is_predicted_once(self, run: Callable[..., Result], tmp_path: Path) -> None:
        arguments = ("--images", photos(tmp_path / "photos", range(2, 12)), "--state", "s", "--batch-size", 4)
        first = json.loads(run(*arguments).stdout)
        assert (first["images"], first["batches"]) == (10, 3)
        assert json.loads(run(*arguments).stdout) == {**first, "entropy": 0.0, "milliseconds": 0.0}
        photos(tmp_path / "photos", (0, 1, 12))
        shutil.copy(tmp_path / "photos" / "000.png", tmp_path / "photos" / "005.png")
        last = json.loads(run(*arguments).stdout)
        rows = rows_of(tmp_path / "predictions.jsonl")
        assert [row["index"] for row in rows] == list(range(14))
        assert [row["name"] for row in rows[10:]] == ["000.png", "001.png", "005.png", "012.png"]
        assert (last["images"], last["bad"], last["batches"]) == (14, 0, 4)

    def test_another_folder_with_what_was_learnt(self, run: Callable[..., Result], tmp_path: Path) -> None:
        monday, tuesday = photos(tmp_path / "monday", range(100)), photos(tmp_path / "tuesday", range(90, 130))
        first = json.loads(run("--images", monday, "--state", "s", "-o", "home=0", "--out", "monday.csv").stdout)
        again = json.loads(run("--images", tuesday, "--state", "s", "-o", "home=0", "--out", "tuesday.csv").stdout)
        assert (first["images"], again["images"]) == (100, 40)
        assert again["steps"] >= first["steps"] > 0
        photos(monday, (100,))
        assert json.loads(run("--images", monday, "--state", "s", "--out", "monday.csv").stdout)["images"] == 101
        (tmp_path / "monday.csv").unlink()
        assert json.loads(run("--images", monday, "--state", "s", "--out", "monday.csv").stdout)["images"] == 101
        (tmp_path / "own.jsonl").write_text("precious")
        refused = run("--images", monday, "--state", "s", "--out", "own.jsonl")
        assert (refused.returncode, (tmp_path / "own.jsonl").read_text()) == (2, "precious")
        assert "own.jsonl was not written with s" in refused.stderr
        (tmp_path / "tuesday.csv").write_text("x" * 10**5)
        damaged = run("--images", monday, "--state", "s", "--out", "tuesday.csv")
        assert (damaged.returncode, "does not hold what was written" in damaged.stderr) == (2, True)

    def test_the_summary_names_the_bundle_and_the_time_per_image(self, deployed: Path, tmp_path: Path) -> None:
        built = Bundle.load(deployed / "b.safetensors")
        bundle = replace(built, settings={**built.settings, "generation": 7})
        bundle.save(tmp_path / "b7")
        run = ("run", "--model", deployed / "m.onnx", "--bundle", tmp_path / "b7", "--images", deployed / "stream.npz")
        said = mergetta(*run, cwd=tmp_path).stdout
        assert f"bundle {bundle.digest[:12]}, generation 7; " in said
        assert re.search(r" \d+\.\d ms and \d\.\d\d forward passes per image", said) and "interrupted" not in said
        summary = json.loads(mergetta(*run, "--json", cwd=tmp_path).stdout)
        assert (summary["bundle"], summary["generation"], summary["interrupted"]) == (bundle.digest, 7, False)
        assert summary["milliseconds"] > 0

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_ends_frames_that_do_not_come(self, deployed: Path, tmp_path: Path, number: int) -> None:
        """What was read is predicted: five frames of another size, of which three are in a batch that was not full."""
        files = ["--model", str(deployed / "m.onnx"), "--bundle", str(deployed / "b.safetensors")]
        command = [*files, "--images", "-", "--frame", "56x56", "--out", "-", "--batch-size", "2", "--max-wait", "0.1"]
        with subprocess.Popen(
            [Path(sys.executable).with_name("mergetta"), "run", *command, "--json"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            assert process.stdin and process.stdout and process.stderr
            process.stdin.write(load_fashion()[0][:5].repeat(2, axis=1).repeat(2, axis=2).tobytes() + b"half a frame")
            process.stdin.flush()
            rows = [json.loads(process.stdout.readline()) for _ in range(5)]
            process.send_signal(number)
            assert process.wait(60) == 128 + number
            summary = json.loads(process.stderr.read())
            assert (process.stdout.read(), summary["images"], summary["interrupted"]) == (b"", 5, True)
        assert [row["name"] for row in rows] == list("01234")


class TestDevice:
    def test_predicts_frames_and_batches_like_run(self, deployed: Path) -> None:
        pixels, labels = load_fashion()
        files = ("--model", "m.onnx", "--bundle", "b.safetensors", "--images", "stream.npz")
        assert mergetta("run", *files, "--quiet", cwd=deployed) == Result(0, "", "")
        device = Device(deployed / "m.onnx", bundle=deployed / "b.safetensors")
        batches = [device.predict(pixels[i : i + 64]) for i in range(0, 128, 64)]
        batches.append(device.predict(pixels[128:150]))
        found = np.concatenate(batches)
        rows = rows_of(deployed / "predictions.jsonl")
        assert [row["label"] for row in rows] == found.argmax(axis=1).tolist()
        np.testing.assert_allclose([row["confidence"] for row in rows], found.max(axis=1), atol=1e-6)
        frame = device.predict(pixels[0].repeat(3, axis=0)[..., 0])
        assert frame.shape == (10,) and frame.argmax() == labels[0] and np.isclose(frame.sum(), 1)
        assert device.status().phase == SETTLED and set(device.status().weights) == {"stream", "source model"}

    def test_the_documented_lines(self, deployed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, documented in (("m.onnx", "model.onnx"), ("b.safetensors", "bundle.safetensors")):
            shutil.copy(deployed / name, tmp_path / documented)
        monkeypatch.chdir(tmp_path)
        (block,) = blocks(ROOT / "docs" / "guide" / "device.md", "python")
        space: dict[str, Any] = {"camera": load_fashion()[0][:3]}
        exec(block, space)
        assert space["device"].agent.progress.images == 3

    def test_keeps_what_was_learnt(self, deployed: Path, tmp_path: Path) -> None:
        bundle, frames = Bundle.load(deployed / "b.safetensors"), load_fashion()[0][:64]
        with Device(deployed / "m.onnx", bundle=bundle, state=tmp_path / "s") as device:
            device.predict(frames)
        again = Device(deployed / "m.onnx", bundle=bundle, state=tmp_path / "s")
        assert again.status() == device.status() != Device(deployed / "m.onnx", bundle=bundle).status()

    def test_saves_from_time_to_time_and_at_the_end(
        self, deployed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        frames, saves = load_fashion()[0][:6], []
        monkeypatch.setattr(agent_module, "SAVE_EVERY", 3600.0)
        monkeypatch.setattr(
            agent_module, "save_state", lambda path, saved, *_: saves.append(saved.learnt["domain.count"])
        )
        device = Device(deployed / "m.onnx", bundle=deployed / "b.safetensors", state=tmp_path / "s")
        for frame in frames[:3]:
            device.predict(frame)
        assert saves == []
        monkeypatch.setattr(agent_module, "SAVE_EVERY", 0.0)
        for frame in frames[3:5]:
            device.predict(frame)
        assert saves == [4, 5]
        monkeypatch.setattr(agent_module, "SAVE_EVERY", 3600.0)
        device.predict(frames[5])
        del device  # without having been closed
        assert saves == [4, 5, 6]

    def test_one_image_is_no_batch_for_an_adapter(self, deployed: Path) -> None:
        adapter = RaceMerge(OnnxRuntime(deployed / "m.onnx"), Bundle.load(deployed / "b.safetensors"))
        images = as_input(load_fashion()[0][:64])
        for _ in range(2):
            with pytest.raises(
                MergettaError, match=r"must have shape \(batch, channels, height, width\), not \(1, 28, 28\)"
            ):
                adapter.predict(images[0])
            adapter.predict(images)

    def test_says_what_is_wrong(self, deployed: Path) -> None:
        model, bundle = deployed / "m.onnx", deployed / "b.safetensors"
        for wrong, words in (
            ({}, "Give one of bundle and hub"),
            ({"bundle": bundle, "hub": "http://127.0.0.1:1"}, "Give one of bundle and hub"),
            ({"bundle": bundle, "token": "x"}, "token goes with a hub only"),
            ({"bundle": deployed / "none"}, "Cannot read"),
        ):
            with pytest.raises(MergettaError, match=words):
                Device(model, **wrong)
        device = Device(model, bundle=bundle, resize=False)
        for frame, words in (
            (
                np.zeros((28, 28), np.float32),
                r"A frame is uint8.*not float32 \(28, 28, 1\): a float image in \[0, 1\] becom",
            ),
            (np.zeros((0, 28, 28, 1), np.uint8), "A frame is uint8"),
            (np.zeros((28, 28, 3), np.uint8), "3 channels, not 1: convert it to grey"),
            (
                np.zeros((1, 28, 28), np.uint8),
                r"28 channels, not 1: channels come last, so give image.transpose\(1, 2, 0\)",
            ),
            (np.zeros((30, 28), np.uint8), "30x28 pixels, not 28x28"),
        ):
            with pytest.raises(MergettaError, match=words):
                device.predict(frame)


def test_from_export_to_predictions(deployed: Path, tmp_path: Path) -> None:
    """End to end; a second start finds nothing left to do."""
    pixels, labels = load_fashion()
    for name in ("stream.npz", "b.safetensors", "m.onnx", "m.plain.onnx"):
        shutil.copy(deployed / name, tmp_path / name)
    run = ["run", "--model", "m.onnx", "--bundle", "b.safetensors", "--images", "stream.npz", "--state", "s", "--json"]
    summary = json.loads(mergetta(*run, cwd=tmp_path).stdout)
    assert summary["images"] == 150
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert np.mean([row["label"] == label for row, label in zip(rows, labels[:150], strict=True)]) > 0.85
    assert summary["normalises"] == "what the source model was trained with"  # clean images
    assert json.loads(mergetta(*run, cwd=tmp_path).stdout)["images"] == 150
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 150
    single = mergetta(*run[:-3], "--batch-size", 1, "--out", "single.jsonl", cwd=tmp_path)
    assert "normalised with what the source model was trained with" in " ".join(single.stdout.split())
    frames = [json.loads(line)["label"] for line in (tmp_path / "single.jsonl").read_text().splitlines()]
    source = OnnxRuntime(tmp_path / "m.onnx")(as_input(pixels[:150]), given=1.0).logits.argmax(axis=1)
    assert np.mean(frames == labels[:150]) >= np.mean(source == labels[:150]) - 0.04
    assert (summary["steps"], set(summary["weights"])) == (0, {"stream", "source model"})
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
        (["-o", "temperature=warm"], "The option temperature of race-merge must be a number, not 'warm'"),
        (["-o", "probe=1"], "The option probe of race-merge must be true or false, not 1"),
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
