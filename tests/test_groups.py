"""Groups and blocks are found by structure, on architectures whose layers have nothing in common but their type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mergetta.errors import MergettaError
from mergetta.groups import Group, fingerprint, last_blocks, paper_frozen
from mergetta.models.discovery import find_blocks, find_classifier, find_groups
from mergetta.runtimes.torch_runtime import TorchRuntime


def timm_model(name: str) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, pretrained=False, num_classes=10)


class WideBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)
        self.bn2, self.conv2 = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)


class NetworkBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(WideBlock(), WideBlock())


class WideResNetLayout(nn.Module):
    """The module tree of the public WRN code: block1 to block3, and a last norm behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3)
        self.block1, self.block2, self.block3 = NetworkBlock(), NetworkBlock(), NetworkBlock()
        self.bn1 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 10)


class ResNeXtLayout(nn.Module):
    """The module tree of the public CIFAR ResNeXt code: stage_1 to stage_3 as Sequentials."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_1_3x3, self.bn_1 = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.stage_1, self.stage_2, self.stage_3 = (nn.Sequential(WideBlock(), WideBlock()) for _ in range(3))
        self.classifier = nn.Linear(4, 10)


@pytest.mark.parametrize(
    ("name", "blocks", "kind", "last"),
    [
        ("resnet18", 4, "batch", "layer4"),
        ("resnet50", 4, "batch", "layer4"),
        ("vit_tiny_patch16_224", 12, "layer", "blocks.11"),
        ("tf_efficientnet_lite0", 6, "batch", "blocks.6"),
        ("convnext_atto", 4, "layer", "stages.3"),
        ("swin_tiny_patch4_window7_224", 4, "layer", "layers.3"),
        ("mobilenetv3_small_050", 4, "batch", "blocks.4"),
    ],
)
def test_blocks_of_public_architectures(name: str, blocks: int, kind: str, last: str) -> None:
    groups = find_groups(timm_model(name))
    assert max(group.block for group in groups) == blocks
    assert {group.kind for group in groups} == {kind}
    assert any(group.name.startswith(last) for group in groups if group.block == blocks)
    assert not any(group.name.startswith(last) for group in groups if group.block < blocks)


def test_paper_frozen_is_the_last_stage_or_the_last_three_blocks() -> None:
    assert all(n.startswith("layer4") for n in paper_frozen(find_groups(timm_model("resnet18"))))
    frozen = paper_frozen(find_groups(timm_model("vit_tiny_patch16_224")))
    assert {name.rpartition(".norm")[0] for name in frozen} == {"blocks.9", "blocks.10", "blocks.11", ""}
    for name in ("convnext_atto", "resnet50_gn"):  # stages without BatchNorm are stages all the same
        groups = find_groups(timm_model(name))
        assert {group.block for group in groups if group.name in paper_frozen(groups)} == {4}


def test_something_is_always_left_to_move() -> None:
    groups = [Group("a", 1, 1, "layer"), Group("b", 1, 2, "layer")]
    assert paper_frozen(groups) == ("b",)
    assert paper_frozen(groups[:1]) == ()


@pytest.mark.parametrize("model", [WideResNetLayout(), ResNeXtLayout()])
def test_blocks_of_cifar_layouts(model: nn.Module) -> None:
    assert max(find_blocks(model).values()) == 3


def test_a_norm_behind_the_last_block_belongs_to_it() -> None:
    assert find_blocks(WideResNetLayout())["bn1"] == 3


def test_a_norm_before_the_first_block_is_the_stem() -> None:
    assert find_blocks(ResNeXtLayout())["bn_1"] == 0


def test_without_repeated_units_each_norm_is_a_block() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.Linear(2, 2))
    assert find_blocks(model) == {"1": 1, "3": 2}


def test_all_norm_types_are_found() -> None:
    class OwnRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    model = nn.Sequential(
        nn.BatchNorm1d(3), nn.LayerNorm(3), nn.GroupNorm(1, 3), nn.RMSNorm(3), OwnRMSNorm(), nn.LayerNorm(3, bias=False)
    )
    assert [(g.name, g.kind) for g in find_groups(model)] == [
        ("0.weight", "batch"),
        ("0.bias", "batch"),
        ("1.weight", "layer"),
        ("1.bias", "layer"),
        ("2.weight", "group"),
        ("2.bias", "group"),
        ("3.weight", "rms"),
        ("4.weight", "rms"),
        ("5.weight", "layer"),
    ]


def test_norms_without_parameters_are_left_alone() -> None:
    with pytest.raises(MergettaError, match="nothing to adapt"):
        find_groups(nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.LayerNorm(3, elementwise_affine=False)))


def test_blocks_can_be_overridden() -> None:
    groups = find_groups(ResNeXtLayout(), block_of=lambda name: 7 if name == "bn_1" else 1)
    assert {g.name: g.block for g in groups}["bn_1.weight"] == 7
    runtime = TorchRuntime(timm_model("resnet18"), block_of=lambda name: 2 if "layer4" in name else 1)
    assert {g.block for g in runtime.structure} == {1, 2}


def test_too_many_frozen_blocks() -> None:
    with pytest.raises(MergettaError, match="this model has 2"):
        last_blocks([Group("a", 1, 1, "batch"), Group("b", 1, 2, "batch")], 3)
    assert last_blocks([Group("a", 1, 1, "batch"), Group("b", 1, 2, "batch")], 0) == ()


def test_fingerprint_sees_weights_and_facts() -> None:
    weights = {"w": torch.arange(3.0).numpy()}
    same = fingerprint(weights, {"mean": [0.5]})
    assert same == fingerprint({"w": torch.arange(3.0).numpy()}, {"mean": [0.5]})
    assert same != fingerprint(weights, {"mean": [0.4]})
    assert same != fingerprint({"w": weights["w"] + 1e-7}, {"mean": [0.5]})


def test_classifier_is_the_last_linear_layer() -> None:
    model = timm_model("resnet18")
    assert find_classifier(model) is model.fc
