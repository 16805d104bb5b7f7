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

from mergetta import Bundle, Expert, OnnxRuntime, TorchRuntime, load_family
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
    shown = json.loads(mergetta("inspect", *model, "--json", cwd=place).stdout)
    device = json.loads(mergetta("inspect", "m.onnx", "--json", cwd=place).stdout)
    plain = json.loads(mergetta("inspect", "m.plain.onnx", "--json", cwd=place).stdout)
    assert shown["family"] == device["family"] == plain["family"] == load_family_in(place).fingerprint
    assert [group["group"] for group in device["groups"]] == [group["group"] for group in shown["groups"]]
    images = np.random.default_rng(0).random((2, 3, 8, 8), dtype=np.float32)
    same = TorchRuntime(load_family_in(place))(images, given=1.0).logits
    np.testing.assert_allclose(OnnxRuntime(place / "m.onnx")(images, given=1.0).logits, same, atol=1e-4)


def test_inspect_knows_what_a_device_writes(place: Path, tmp_path: Path) -> None:
    from mergetta.device.state import save_state

    save_state(tmp_path / "state", {"a": np.zeros(3), "n": 2}, "f", "b", 5, 6)
    shown = json.loads(mergetta("inspect", tmp_path / "state", "--json").stdout)
    assert (shown["format"], shown["family"], shown["position"]) == ("mergetta.state", "f", 5)
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
