"""From one's own model and images to a bundle, on the strong device and on a server without PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mergetta import Bundle, Expert, OnnxRuntime, RaceMerge, TorchRuntime, build_bundle, load_family
from mergetta.bench.evaluation import Score
from mergetta.data.images import read_image
from mergetta.data.labelled import numbers_of
from mergetta.data.streams import as_input
from mergetta.errors import MergettaError
from mergetta.models.watch import logits_of

from .test_boundaries import BLOCK
from .test_cli import mergetta

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4, 3)
    def forward(self, x):
        return {"logits": self.head(self.body(x)), "attentions": None}

def family():
    torch.manual_seed(0)
    return Net(), {"size": 8, "classes": ("cat", "dog", "owl")}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `place_net.py`, weights for it, and one folder of images per site."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "place_net.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        weights = {name: value + 0.1 for name, value in load_family("place_net:family").model.state_dict().items()}
    torch.save(weights, folder / "net.pt")
    rng = np.random.default_rng(0)
    for site in ("yard", "shed"):
        (folder / site).mkdir()
        for number in range(100):
            image = Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8))
            image.save(folder / site / f"{number}.png")
    (folder / "yard" / "3.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def experts(place: Path) -> dict[str, str]:
    """What the command said of each."""
    said = {}
    for site in ("yard", "shed"):
        options = ["--family", "place_net:family", "--checkpoint", "net.pt", "--batch-size", 32, "--epochs", 2]
        result = mergetta("adapt", site, "--out", f"{site}.safetensors", *options, cwd=place)
        assert result.returncode == 0, result.stderr
        said[site] = result.stdout + result.stderr
    return said


def test_adapt_leaves_out_broken_files_and_says_whether_it_helps(place: Path, experts: dict[str, str]) -> None:
    expert = Expert.load(place / "yard.safetensors")
    assert expert.provenance["samples"] == 2 * 90  # of 99 images, 9 are held back; two epochs
    assert "left out: Cannot read the image" in experts["yard"]
    assert "too few images to say whether it helps" in experts["yard"]
    assert "on 10 images held back: certainty" in experts["shed"]


def test_build_knows_the_family_without_torch(place: Path, experts: dict[str, str]) -> None:
    code = (
        "from mergetta.cli import main\nsys.argv = 'mergetta build yard.safetensors shed.safetensors --out b'.split()\n"
    )
    result = subprocess.run([sys.executable, "-c", f"{BLOCK}\n{code}main()"], capture_output=True, text=True, cwd=place)
    assert result.returncode == 0, result.stderr
    bundle, family = Bundle.load(place / "b"), load_family_in(place)
    assert bundle.family == family.fingerprint
    assert all(np.array_equal(bundle.base[n], v) for n, v in TorchRuntime(family).groups.items())
    for frozen, moving in ((0, 2), (1, 0)):
        options = ["--frozen-blocks", frozen, "--out", "f"]
        result = mergetta("build", "yard.safetensors", "shed.safetensors", *options, cwd=place)
        assert result.returncode == 0, result.stderr
        assert len([name for name in Bundle.load(place / "f").moving if "running" not in name]) == moving


def load_family_in(place: Path):  # type: ignore[no-untyped-def]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        return load_family("place_net:family", place / "net.pt")


def test_export_and_inspect_name_the_model_the_same_way(place: Path, experts: dict[str, str]) -> None:
    pytest.importorskip("onnxscript")
    model = ["place_net:family", "--checkpoint", "net.pt"]
    result = mergetta("export", "--family", *model, "--out", "m.onnx", cwd=place)
    assert result.returncode == 0, result.stderr
    assert "m.onnx (" in result.stdout and " and m.plain.onnx (" in result.stdout
    assert "without --calibration, a device adapts to clean images too" in result.stdout
    assert "exporting place_net:family: two graphs are traced" in result.stderr
    assert OnnxRuntime(place / "m.onnx").signature is None
    shown = json.loads(mergetta("inspect", *model, "--json", cwd=place).stdout)
    device = json.loads(mergetta("inspect", "m.onnx", "--json", cwd=place).stdout)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "onnx", None)  # which a device does not have
        plain = json.loads(mergetta("inspect", "m.plain.onnx", "--json", cwd=place).stdout)
    assert shown["family"] == device["family"] == plain["family"] == load_family_in(place).fingerprint
    assert (shown["size"], shown["classifier"], shown["classes"]) == (8, "4 features to 3 classes", device["classes"])
    assert [group["group"] for group in device["groups"]] == [group["group"] for group in shown["groups"]]
    images = np.random.default_rng(0).random((2, 3, 8, 8), dtype=np.float32)
    same = TorchRuntime(load_family_in(place))(images, given=1.0).logits
    np.testing.assert_allclose(OnnxRuntime(place / "m.onnx")(images, given=1.0).logits, same, atol=1e-4)


def test_an_own_model_is_at_home_where_its_clean_images_are(place: Path, experts: dict[str, str]) -> None:
    """What export is told of, the device leaves alone."""
    pytest.importorskip("onnxscript")
    model = ["--family", "place_net:family", "--checkpoint", "net.pt", "--calibration", "shed"]
    result = mergetta("export", *model, "--out", "home.onnx", cwd=place)
    assert result.returncode == 0 and "adapts to clean images" not in result.stdout, result.stderr
    clean = [read_image(file, 3, 8) for file in sorted((place / "shed").iterdir())]
    images = as_input(np.stack(clean))
    runtime = OnnxRuntime(place / "home.onnx")
    np.testing.assert_allclose(runtime.signature, runtime(images).signature, rtol=1e-4)
    adapter = RaceMerge(runtime, build_bundle(runtime.groups, [Expert.load(place / "yard.safetensors")]))
    adapter.predict(images)
    np.testing.assert_array_equal(adapter.predict(images), runtime(images, given=1.0).logits)


def test_inspect_knows_a_checkpoint_of_pytorch(place: Path) -> None:
    shown = json.loads(mergetta("inspect", "net.pt", "--json", cwd=place).stdout)
    assert (shown["format"], shown["use"]) == ("checkpoint of PyTorch", "--family module:function --checkpoint net.pt")
    assert {"tensor": "head.bias", "type": "torch.float32", "shape": "(3,)"} in shown["tensors"]


class TestEvaluate:
    @pytest.fixture(scope="class")
    @classmethod
    def labelled(cls, place: Path, experts: dict[str, str]) -> Path:
        """`m.onnx`, `b` and images that the source model predicts, in folders: cats are right, owls are not."""
        pytest.importorskip("onnxscript")
        model = ["--family", "place_net:family", "--checkpoint", "net.pt"]
        assert mergetta("export", *model, "--out", "m.onnx", cwd=place).returncode == 0
        assert mergetta("build", "yard.safetensors", "shed.safetensors", "--out", "b", cwd=place).returncode == 0
        for name, site in (("cat", "shed"), ("Owl", "yard")):
            (place / "photos" / name).mkdir(parents=True)
            for file in sorted((place / site).iterdir())[:30]:
                (place / "photos" / name / file.name).write_bytes(file.read_bytes())
        return place

    def run(self, place: Path, *options: object) -> dict:
        command = ["evaluate", "--model", "m.onnx", "--bundle", "b", "--images", "photos", "--json", *options]
        result = mergetta(*command, cwd=place)
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    def test_before_and_after(self, labelled: Path) -> None:
        found = self.run(labelled, "--html", "e.html")
        assert found["images"] == 59
        assert ["Cannot read the image" in sentence for sentence in found["broken"]] == [True]
        model = OnnxRuntime(labelled / "m.onnx")
        files = sorted((labelled / "photos" / "cat").iterdir())
        cats = as_input(np.stack([read_image(file, 3, 8) for file in files]))
        wrong = np.argmax(model(cats, given=1.0).logits, axis=1) != 0
        assert found["before"]["class_errors"][0] == pytest.approx(100 * wrong.mean())
        for score in (found["before"], found["after"]):
            confusion = np.array(score["confusion"])
            assert confusion.sum(axis=1).tolist() == [30, 0, 29]
            assert score["error"] == pytest.approx(100 - 100 * np.trace(confusion) / 59)
            assert score["class_errors"][1] is None
            assert 0 <= score["calibration_error"] <= 100
        page = (labelled / "e.html").read_text()
        assert page.index("<p class=number>") < page.index("predictions are wrong") < page.index("calibration (ECE)")
        assert "prefers-color-scheme: dark" in page

    @pytest.mark.parametrize("order", ["sorted", "correlated"])
    def test_streams(self, labelled: Path, order: str) -> None:
        """Any stream shows all images once: the source model, which does not adapt, has the same error."""
        mixed, other = self.run(labelled), self.run(labelled, "--order", order, "--batch-size", 1)
        assert other["before"]["confusion"] == mixed["before"]["confusion"]

    def test_a_list_of_labels(self, labelled: Path) -> None:
        names = [f"{folder}/{number}.png" for folder in ("cat", "Owl") for number in (1, 2)]
        rows = "".join(f"{name},{label}\n" for name, label in zip(names, (0, 0, 2, 2), strict=True))
        (labelled / "labels.csv").write_text("name,label\n" + rows)
        assert np.sum(self.run(labelled, "--labels", "labels.csv")["after"]["confusion"], axis=1).tolist() == [2, 0, 2]

    def test_a_table_for_people(self, labelled: Path) -> None:
        model = ["--family", "place_net:family", "--checkpoint", "net.pt"]
        result = mergetta("evaluate", *model, "--bundle", "b", "--images", "photos", cwd=labelled)
        assert result.returncode == 0, result.stderr
        assert "calibration (ECE)" in result.stdout
        assert "taken for" in result.stdout

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            (["--images", "yard"], "stands in no folder of a class"),
            (["--images", "."], "has the label"),
            (["--images", "none.npz"], "No such file"),
            (["--images", "yard", "--labels", "none.csv"], "Cannot read the labels none.csv: No such file"),
            (["--images", "yard", "--labels", "place_net.py"], "columns `name` and `label`"),
            (["--images", "photos", "--order", "odd"], "There is no order 'odd'"),
            (["--images", "photos", "--family", "fashion-bn"], "Give one of --model"),
            (["--images", "photos", "--checkpoint", "net.pt"], "leave out --checkpoint"),
            (["--images", "photos", "--method", "tent"], "A device runs race-merge or zo-merge"),
        ],
    )
    def test_mistakes(self, labelled: Path, options: list[str], sentence: str) -> None:
        result = mergetta("evaluate", "--model", "m.onnx", "--bundle", "b", *options, cwd=labelled)
        assert result.returncode == 2
        assert sentence in " ".join(result.stderr.split())


SUITE = """
family: place_net:family
checkpoint: net.pt
data: folder
folder: sites
domains: [night, rain, contrast, fog]
samples: 20
batch_size: 10
experts: {roid: {optimizer: sgd, lr: 1.0e-3}}
methods:
  source: {adapter: source}
  race-merge: {adapter: race-merge, bundle: {frozen_blocks: 0}}
"""


def test_own_suite(place: Path) -> None:
    """Domains of two kinds: folders (night, rain) and corruptions of clean images (contrast, fog)."""
    rng = np.random.default_rng(0)
    for site in ("clean", "night", "rain"):
        for name in ("cat", "dog", "owl"):
            folder = place / "sites" / site / name
            folder.mkdir(parents=True)
            for number in range(8):
                pixels = rng.integers(0, 100 if site == "night" else 256, (32, 32, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (place / "own.yaml").write_text(SUITE)
    command = ["bench", "own.yaml", "--seeds", 1, "--json", "r.json", "--cache", "cache", "--jobs", 1]
    result = mergetta(*command, cwd=place)
    assert result.returncode == 0, result.stderr
    found = json.loads((place / "r.json").read_text())["results"]
    assert {record["domain"] for record in found} == {"night", "rain", "contrast", "fog"}
    assert all(record["samples"] == 20 and record["data"] == "one's own images in sites" for record in found)
    for old, new, sentence in (
        ("fog]", "mist]", "has no folder 'mist', and there is no corruption of that name"),
        ("samples: 20", "samples: 25", "one's own images in sites: contrast has 24 images, not 25"),
        ("samples: 20", "samples: 20\npasses: 2", "night is not drawn at random: a second pass would show the same"),
        ("folder: sites", "folder: nowhere", "There is no folder"),
    ):
        (place / "bad.yaml").write_text(SUITE.replace(old, new))
        for options in ([], ["--dry-run"]):  # before anything is measured
            result = mergetta("bench", "bad.yaml", *command[2:], *options, cwd=place)
            assert result.returncode == 2
            assert "Traceback" not in result.stderr
            assert sentence in " ".join((result.stdout + result.stderr).split())
    result = mergetta(*command, "--samples", 30, cwd=place)
    assert (result.returncode, result.stdout) == (2, "")
    assert "The suite own has 20 images per domain, not 30" in result.stderr


def test_names_of_classes() -> None:
    assert numbers_of(["1", "0"], ["a", "b"], "") == {"1": 1, "0": 0}
    assert numbers_of(["n01", "n02"], ["0", "1"], "", in_order=True) == {"n01": 0, "n02": 1}
    for names, sentence in {
        ("n01", "n02"): "has the label 'n01', which is no class of the model",
        ("0", "7", "bag"): "has the label '7', which is no class of the model",
        ("1", "bag"): "has 'bag', the name of a class, and '1', a number: use names or numbers, not both",
    }.items():
        with pytest.raises(MergettaError, match=sentence):
            numbers_of(names, ["bag", "shoe"], "it")


def test_calibration_error_by_hand() -> None:
    """Two bins: 0.9 where both are right, 0.6 where one of two is."""
    score = Score(np.array([[0.9, 0.1], [0.9, 0.1], [0.6, 0.4], [0.6, 0.4]]), np.array([0, 0, 0, 1]))
    assert score.calibration_error == pytest.approx(100 * (2 * 0.1 + 2 * 0.1) / 4)
    assert score.error == 25


def test_inspect_knows_what_a_device_writes(place: Path, tmp_path: Path) -> None:
    from mergetta.device.state import Saved, save_state

    save_state(tmp_path / "state", Saved({"a": np.zeros(3), "n": 2}, {}), "f", "b")
    shown = json.loads(mergetta("inspect", tmp_path / "state", "--json").stdout)
    assert (shown["format"], shown["family"], shown["bundle"]) == ("mergetta.state", "f", "b")
    assert shown["tensors"] == [{"tensor": "a", "type": "float64", "shape": "(3,)"}]
    rows = [{"index": 0, "class": "cat"}, {"index": 1, "error": "cut off"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = json.loads(mergetta("inspect", tmp_path / "p.jsonl", "--json").stdout)
    assert (shown["images"], shown["errors"], shown["classes"]) == (2, 1, [{"class": "cat", "images": 1}])
    for name, content in (("x.onnx", b"\xff" * 50), ("x.json", b"{"), ("x.jsonl", b"3\n"), ("x", b"\x00" * 20)):
        (tmp_path / name).write_bytes(content)
        result = mergetta("inspect", tmp_path / name)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_logits_in_other_wrappings() -> None:
    logits = torch.ones(2, 3)
    for output in (logits, {"logits": logits, "loss": None}, {"out": logits}, (logits, None), Wrapped(logits)):
        assert logits_of(output) is logits
    for nothing in ({}, {"a": logits, "b": logits}, None, ()):
        with pytest.raises(MergettaError, match="The model must return logits"):
            logits_of(nothing)


class Wrapped:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
