"""Families of timm and of Hugging Face transformers."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mergetta import MergettaError, TorchRuntime, load_family
from mergetta.models.discovery import find_groups
from mergetta.models.family import Preprocessing

from .models import HALF, assert_same_model, randomised


class TestTimm:
    @pytest.fixture(autouse=True)
    def timm(self) -> Any:
        return pytest.importorskip("timm")

    def test_checkpoint(self, timm: Any, tmp_path: Path) -> None:
        model = randomised(timm.create_model("test_resnet", num_classes=5))
        torch.save(model.state_dict(), tmp_path / "c.pth")
        family = load_family("timm:test_resnet", tmp_path / "c.pth")
        assert_same_model(family.model, model, 64)
        assert family.classes == tuple("01234")
        facts = timm.data.resolve_model_data_config(model)
        assert family.preprocessing == Preprocessing(facts["mean"], facts["std"], facts["input_size"][1])
        family.save(tmp_path / "c.safetensors")
        assert load_family(tmp_path / "c.safetensors").fingerprint == family.fingerprint

    def test_published_weights(self, timm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        create, asked = timm.create_model, []

        def published(name: str, pretrained: bool = False, **keywords: Any) -> nn.Module:
            asked.append(pretrained)
            return create(name, **keywords)

        monkeypatch.setattr(timm, "create_model", published)
        assert load_family("timm:test_vit").name == "timm-test_vit"
        assert asked == [True]

    def test_offline(self, timm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(name: str, **keywords: Any) -> nn.Module:
            raise FileNotFoundError("No connection.\nAnd more.")

        monkeypatch.setattr(timm, "create_model", offline)
        with pytest.raises(MergettaError, match=r"'timm:test_vit' cannot be had \(No connection.\): connect once"):
            load_family("timm:test_vit")

    @pytest.mark.parametrize("name", ["nonsense", "hf-hub:somebody/something", "local-dir:/tmp"])
    def test_unknown(self, name: str) -> None:
        with pytest.raises(MergettaError, match="timm has no model"):
            load_family(f"timm:{name}")


class TestHuggingFace:
    @pytest.fixture
    def hf(self) -> Any:
        return pytest.importorskip("transformers")

    @pytest.fixture
    def folder(self, hf: Any, tmp_path: Path) -> Path:
        config = hf.ViTConfig(
            hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=32,
            patch_size=8, id2label={0: "crane", 1: "dog", 2: "crane"}, label2id={"crane": 0, "dog": 1},
        )  # fmt: skip
        hf.ViTForImageClassification(config).save_pretrained(tmp_path / "tiny")
        processor = {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4],
                     "do_rescale": True, "rescale_factor": 1 / 255, "size": {"height": 32, "width": 32}}  # fmt: skip
        (tmp_path / "tiny" / "preprocessor_config.json").write_text(json.dumps(processor))
        return tmp_path / "tiny"

    def test_folder(self, hf: Any, folder: Path, tmp_path: Path) -> None:
        family = load_family(f"hf:{folder}")
        public = hf.ViTForImageClassification.from_pretrained(folder).eval()
        x = torch.rand(2, 3, 32, 32)
        with torch.no_grad():
            torch.testing.assert_close(family.model(x), public(pixel_values=x).logits)
        assert (family.name, family.classes) == ("hf-tiny", ("crane (0)", "dog", "crane (2)"))
        assert family.preprocessing == Preprocessing((0.5, 0.4, 0.3), (0.2, 0.3, 0.4), 32)
        groups = find_groups(family.model)
        assert {group.block for group in groups} == {1, 2, 3, 4}
        assert TorchRuntime(family)(x.numpy()).signature.shape == (2, 32)
        family.save(tmp_path / "c.safetensors")
        assert load_family(tmp_path / "c.safetensors").fingerprint == family.fingerprint

    def test_checkpoint(self, hf: Any, folder: Path, tmp_path: Path) -> None:
        config = hf.AutoConfig.from_pretrained(folder, num_labels=5)
        model = randomised(hf.ViTForImageClassification(config))
        torch.save({"state_dict": model.state_dict()}, tmp_path / "c.bin")
        family = load_family(f"hf:{folder}", tmp_path / "c.bin")
        assert family.classes == tuple("01234")
        assert torch.equal(family.model.model.classifier.weight, model.classifier.weight)

    def test_not_there(self, hf: Any, tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match="There is no folder"):
            load_family(f"hf:{tmp_path / 'none'}")
        with pytest.raises(MergettaError, match="a folder must have config"):
            load_family(f"hf:{tmp_path}")


class TestLibraries:
    @pytest.mark.parametrize(("name", "spared"), [("timm:resnet18", False), ("hf:somebody/something", True)])
    def test_a_torchvision_of_another_torch(self, name: str, spared: bool, tmp_path: Path) -> None:
        """In a process of its own, with a torchvision that fails as the CUDA build does beside a CPU build of torch."""
        package = tmp_path / "torchvision"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
        facts = tmp_path / "torchvision-0.28.0.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text("Name: torchvision\nVersion: 0.28.0\n")
        code = f"""
            import sys
            sys.path.insert(0, {str(tmp_path)!r})
            import mergetta
            try:
                mergetta.load_family({name!r})
            except mergetta.MergettaError as error:
                print(error)
            """
        result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
        assert "needs a torchvision that belongs to torch" in result.stdout, result.stderr
        assert "pip install --force-reinstall --no-deps torchvision==0.28.0" in result.stdout
        assert ("pip uninstall torchvision" in result.stdout) == spared


class TestPreprocessingOfHuggingFace:
    @pytest.mark.parametrize(
        ("processor", "expected"),
        [
            ({"do_normalize": False, "size": 24}, Preprocessing((0.0,) * 3, (1.0,) * 3, 24)),
            ({"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3}, Preprocessing(*HALF, 48)),
            (
                {"do_center_crop": True, "crop_size": {"height": 20, "width": 20}, "size": {"shortest_edge": 24}},
                Preprocessing(*HALF, 20),
            ),
            ({"include_top": True, "size": {"shortest_edge": 24}}, Preprocessing((0.5,) * 3, (0.25,) * 3, 24)),
        ],
    )
    def test_processors(self, processor: dict[str, Any], expected: Preprocessing) -> None:
        from mergetta.models.hf_models import preprocessing_of

        class Config:
            num_channels = 3
            image_size = 48

        found = preprocessing_of(processor, Config)
        np.testing.assert_allclose([found.mean, found.std], [expected.mean, expected.std])
        assert found.size == expected.size
