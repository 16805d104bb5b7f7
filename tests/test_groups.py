"""Groups and blocks are found by structure, on architectures whose layers have nothing in common but their type.

Moments: their layout, and how those of domains mix.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from mergetta.errors import MergettaError
from mergetta.groups import (
    SMALLEST,
    Group,
    as_mixed,
    check_groups,
    fingerprint,
    from_mixed,
    has_batch_norm,
    kind_of,
    last_blocks,
    learnable,
    mixture_shares,
    moment_pairs,
    moments_of,
    paper_frozen,
    with_moments,
)
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
    ("name", "blocks", "batch_norm", "last"),
    [
        ("resnet18", 4, True, "layer4"),
        ("resnet50", 4, True, "layer4"),
        ("vit_tiny_patch16_224", 12, False, "blocks.11"),
        ("tf_efficientnet_lite0", 6, True, "blocks.6"),
        ("convnext_atto", 4, False, "stages.3"),
        ("swin_tiny_patch4_window7_224", 4, False, "layers.3"),
        ("mobilenetv3_small_050", 4, True, "blocks.4"),
    ],
)
def test_blocks_of_public_architectures(name: str, blocks: int, batch_norm: bool, last: str) -> None:
    groups = find_groups(timm_model(name))
    assert max(group.block for group in groups) == blocks
    assert {group.kind for group in groups} == {"scale", "shift", *(("mean", "variance") if batch_norm else ())}
    assert all(group.kind == kind_of(group.name) for group in groups)
    assert has_batch_norm(groups) == batch_norm
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
    groups = [Group("a", 1, 1, "scale"), Group("b", 1, 2, "scale")]
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
        ("0.weight", "scale"),
        ("0.bias", "shift"),
        ("0.running_mean", "mean"),
        ("0.running_var", "variance"),
        ("1.weight", "scale"),
        ("1.bias", "shift"),
        ("2.weight", "scale"),
        ("2.bias", "shift"),
        ("3.weight", "scale"),
        ("4.weight", "scale"),
        ("5.weight", "scale"),
    ]


def test_norms_without_parameters_are_left_alone() -> None:
    with pytest.raises(MergettaError, match="no norm layer that could adapt"):
        find_groups(nn.Sequential(nn.GroupNorm(1, 3, affine=False), nn.LayerNorm(3, elementwise_affine=False)))
    moments = find_groups(nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.LayerNorm(3, elementwise_affine=False)))
    assert [(group.name, group.kind) for group in moments] == [
        ("0.running_mean", "mean"),
        ("0.running_var", "variance"),
    ]


def test_blocks_can_be_overridden() -> None:
    groups = find_groups(ResNeXtLayout(), block_of=lambda name: 7 if name == "bn_1" else 1)
    assert {g.name: g.block for g in groups}["bn_1.weight"] == 7
    runtime = TorchRuntime(timm_model("resnet18"), block_of=lambda name: 2 if "layer4" in name else 1)
    assert {g.block for g in runtime.structure} == {1, 2}


def test_too_many_frozen_blocks() -> None:
    with pytest.raises(MergettaError, match="this model has 2"):
        last_blocks([Group("a", 1, 1, "scale"), Group("b", 1, 2, "scale")], 3)
    assert last_blocks([Group("a", 1, 1, "scale"), Group("b", 1, 2, "scale")], 0) == ()


def test_fingerprint_sees_weights_and_facts() -> None:
    weights = {"w": torch.arange(3.0).numpy()}
    same = fingerprint(weights, {"mean": [0.5]})
    assert same == fingerprint({"w": torch.arange(3.0).numpy()}, {"mean": [0.5]})
    assert same != fingerprint(weights, {"mean": [0.4]})
    assert same != fingerprint({"w": weights["w"] + 1e-7}, {"mean": [0.5]})


def test_classifier_is_the_last_linear_layer() -> None:
    model = timm_model("resnet18")
    assert find_classifier(model) is model.fc


TWO_LAYERS = {
    "stem.weight": np.array([1.0, 2.0]),
    "stem.bias": np.array([3.0, 4.0]),
    "stem.running_mean": np.array([0.1, 0.2]),
    "stem.running_var": np.array([1.1, 1.2]),
    "norm.weight": np.array([5.0]),
    "last.running_var": np.array([1.3, 1.4, 1.5]),
    "last.running_mean": np.array([0.3, 0.4, 0.5]),
}


def test_kinds_go_by_the_last_part_of_the_name() -> None:
    names = ("a.weight", "a.b.bias", "bn.running_mean", "x.running_var", "prompts", "running_mean", "weight.gamma")
    assert [kind_of(name) for name in names] == ["scale", "shift", "mean", "variance", "scale", "mean", "scale"]


def test_moments_are_not_learnt() -> None:
    assert learnable(TWO_LAYERS) == ("stem.weight", "stem.bias", "norm.weight")
    structure = [Group(name, len(v), i, kind_of(name)) for i, (name, v) in enumerate(TWO_LAYERS.items())]
    assert not set(last_blocks(structure, 2)) - set(learnable(TWO_LAYERS))
    assert has_batch_norm(structure)
    assert not has_batch_norm(group for group in structure if group.kind in ("scale", "shift"))


@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0"])
def test_no_moment_is_frozen_or_counted_as_a_block(name: str) -> None:
    groups = find_groups(timm_model(name))
    assert paper_frozen(groups) == learnable(paper_frozen(groups))
    assert paper_frozen(groups)


def test_moments_side_by_side() -> None:
    np.testing.assert_array_equal(moments_of(TWO_LAYERS), [[0.1, 0.2, 0.3, 0.4, 0.5], [1.1, 1.2, 1.3, 1.4, 1.5]])
    assert moments_of({"a.weight": np.ones(3)}).shape == (2, 0)
    assert with_moments({"a.weight": np.ones(3)}, np.zeros((2, 0))).keys() == {"a.weight"}


def test_moments_there_and_back() -> None:
    other = np.arange(10.0).reshape(2, 5)
    changed = with_moments(TWO_LAYERS, other)
    np.testing.assert_array_equal(moments_of(changed), other)
    assert list(changed) == list(TWO_LAYERS)
    assert all(changed[name] is TWO_LAYERS[name] for name in learnable(TWO_LAYERS))
    assert all(changed[name].shape == TWO_LAYERS[name].shape for name in TWO_LAYERS)
    np.testing.assert_array_equal(changed["last.running_var"], [7, 8, 9])
    again = with_moments(changed, moments_of(TWO_LAYERS))
    assert all(np.allclose(again[name], TWO_LAYERS[name]) for name in TWO_LAYERS)


@pytest.mark.parametrize(
    "names",
    [("a.running_mean",), ("a.running_var",), ("a.running_mean", "b.running_var"), ("running_mean", "a.weight")],
)
def test_a_moment_alone_is_refused(names: tuple[str, ...]) -> None:
    values = {name: np.ones(2) for name in names}
    for use in (moment_pairs, moments_of, as_mixed, lambda v: from_mixed(v, v), lambda v: with_moments(v, np.ones(2))):
        with pytest.raises(MergettaError, match="belong together"):
            use(values)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32), st.floats(0.1, 100))
def test_the_mixture_of_domains_has_the_moments_of_the_pooled_data(
    channels: int, domains: int, seed: int, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    data = [scale * rng.normal(rng.normal(size=channels), 0.1 + rng.random(), (rng.integers(2, 9), channels))
            for _ in range(domains)]  # fmt: skip
    groups = [{"bn.running_mean": d.mean(axis=0), "bn.running_var": d.var(axis=0)} for d in data]
    shares = np.array([len(d) for d in data]) / sum(len(d) for d in data)
    mixed = [as_mixed(values) for values in groups]
    whole = from_mixed({n: sum(s * m[n] for s, m in zip(shares, mixed, strict=True)) for n in groups[0]}, groups[0])
    pooled = np.concatenate(data)
    np.testing.assert_allclose(whole["bn.running_mean"], pooled.mean(axis=0), rtol=1e-9, atol=1e-9 * scale)
    floor = SMALLEST * groups[0]["bn.running_var"]
    np.testing.assert_allclose(
        whole["bn.running_var"], np.maximum(pooled.var(axis=0), floor), rtol=1e-6, atol=1e-9 * scale**2
    )


def test_mixed_there_and_back() -> None:
    mixed = as_mixed(TWO_LAYERS)
    np.testing.assert_allclose(mixed["stem.running_var"], [1.1 + 0.01, 1.2 + 0.04])
    assert all(mixed[name] is TWO_LAYERS[name] for name in TWO_LAYERS if kind_of(name) != "variance")
    again = from_mixed(mixed, TWO_LAYERS)
    assert all(np.allclose(again[name], TWO_LAYERS[name]) for name in TWO_LAYERS)


def test_a_mixture_that_is_none_leaves_a_small_variance() -> None:
    base = {"bn.running_mean": np.zeros(2), "bn.running_var": np.array([4.0, 2.0])}
    mixed = {"bn.running_mean": np.array([3.0, 0.0]), "bn.running_var": np.array([1.0, 1.0])}
    np.testing.assert_allclose(from_mixed(mixed, base)["bn.running_var"], [SMALLEST * 4, 1.0])


def test_shares_of_a_mixture() -> None:
    np.testing.assert_allclose(mixture_shares(np.full(14, 0.1)), np.full(14, 1 / 14))
    np.testing.assert_allclose(mixture_shares(np.array([0.2, 0.3])), [0.2, 0.3])  # the source fills the rest
    np.testing.assert_allclose(mixture_shares(np.array([3.0, -1.0])), [0.75, -0.25])
    np.testing.assert_array_equal(mixture_shares(np.zeros(3)), np.zeros(3))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"stem.running_var": np.array([1.0, -1e-6])}, "negative variances in group 'stem.running_var'"),
        ({"stem.running_mean": np.array([np.nan, 0.0])}, "NaN or infinite values in group 'stem.running_mean'"),
        ({"stem.running_var": np.ones(3)}, r"shape \(3,\) in group 'stem.running_var'"),
    ],
)
def test_groups_with_wrong_moments(changes: dict[str, np.ndarray], sentence: str) -> None:
    check_groups(TWO_LAYERS, TWO_LAYERS, "It")
    check_groups({**TWO_LAYERS, "stem.running_var": np.zeros(2), "stem.bias": -np.ones(2)}, TWO_LAYERS, "It")
    with pytest.raises(MergettaError, match=sentence):
        check_groups({**TWO_LAYERS, **changes}, TWO_LAYERS, "It")
