"""The device from the outside: `mergetta run`, and `Device` in Python."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mergetta import Bundle, Device, MergettaError, OnnxRuntime
from mergetta.adapters.base import SETTLED
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.cli.run import in_runs
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.device import agent as agent_module
from mergetta.device.agent import Summary
from mergetta.device.stream import ImageShape

from .test_agent import rows_of
from .test_cli import Result, mergetta
from .test_docs import ROOT, blocks

CLASSES = list("abcd")
GREY = ImageShape(1, 28)


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

    def test_runs_are_told_only_where_they_count(self) -> None:
        """Before the first image they are as likely as not, and predictions stay what they are."""
        told = {runs: in_runs(Summary(runs=runs)) for runs in (None, 0.5, 0.73, 0.9)}
        assert told == {None: "", 0.5: "", 0.73: "", 0.9: "; classes come in runs"}

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
            agent_module,
            "save_state",
            lambda path, saved, *_: saves.append(saved.learnt["adapter/adapter/domain.count"]),
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
        (["-o", "temperature=-1"], "temperature must be at least"),
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
