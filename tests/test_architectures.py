"""Public architectures: they compute what the libraries that publish them compute, and have blocks to freeze."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from mergetta import Family, OnnxRuntime, TorchRuntime
from mergetta.groups import learnable, paper_frozen
from mergetta.models import vit
from mergetta.models.class_names import CIFAR10
from mergetta.models.discovery import find_groups
from mergetta.models.family import ARCHITECTURES, Preprocessing
from mergetta.models.vit import VisionTransformer

from .models import IMAGENET, assert_same_model, randomised


def small_vit() -> VisionTransformer:
    return VisionTransformer(classes=7, size=32, patch=8, width=48, depth=3, heads=4)


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
