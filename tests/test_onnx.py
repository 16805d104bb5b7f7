"""The exported model: the same numbers as torch, adjustable, readable without torch or onnx."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mergetta import Family, MergettaError, OnnxRuntime, TorchRuntime, ZOMerge, build_bundle, load_family
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.models.family import ARCHITECTURES, Preprocessing
from mergetta.runtimes.base import Runtime

from .contracts import RuntimeContract

pytest.importorskip("onnxscript")

from mergetta.runtimes.export import to_onnx


@pytest.fixture(scope="session")
def exported() -> dict[str, bytes]:
    return {name: to_onnx(load_family(name)).SerializeToString() for name in ("fashion-bn", "fashion-vit")}


@pytest.fixture
def onnx_runtime(family: Family, exported: dict[str, bytes]) -> OnnxRuntime:
    return OnnxRuntime(exported[family.name], threads=1)


class TestOnnxRuntime(RuntimeContract):
    @pytest.fixture
    def subject(self, onnx_runtime: OnnxRuntime) -> OnnxRuntime:
        return onnx_runtime


def moved(runtime: Runtime, scale: float = 0.1) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: value + scale * rng.normal(size=value.shape) for name, value in runtime.groups.items()}


def assert_same(one: Runtime, other: Runtime, images: np.ndarray, share: float) -> None:
    for a, b in zip(one(images, share), other(images, share), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("batch", [1, 5, 48])
def test_same_numbers_as_torch(
    family: Family, onnx_runtime: OnnxRuntime, images: np.ndarray, share: float, batch: int
) -> None:
    runtime = TorchRuntime(family)
    assert_same(runtime, onnx_runtime, images[:batch], share)
    groups = moved(runtime)
    runtime.load(groups)
    onnx_runtime.load(groups)
    assert_same(runtime, onnx_runtime, images[:batch], share)


def test_says_what_it_is(family: Family, onnx_runtime: OnnxRuntime) -> None:
    runtime = TorchRuntime(family)
    assert onnx_runtime.family == runtime.family
    assert onnx_runtime.structure == runtime.structure
    assert all(np.array_equal(onnx_runtime.groups[name], value) for name, value in runtime.groups.items())
    np.testing.assert_array_equal(onnx_runtime.classifier.weight, runtime.classifier.weight)
    np.testing.assert_array_equal(onnx_runtime.classifier.bias, runtime.classifier.bias)
    np.testing.assert_allclose(onnx_runtime.statistics, runtime.statistics)
    assert tuple(onnx_runtime.metadata["classes"]) == family.classes


@pytest.mark.parametrize("loss", ["entropy", "roid", "deyo"])
def test_same_trajectory_as_torch(family: Family, onnx_runtime: OnnxRuntime, images: np.ndarray, loss: str) -> None:
    runtime = TorchRuntime(family)
    bundle = build_bundle(runtime.groups, [moved(runtime) for _ in range(3)])
    one, other = (ZOMerge(r, bundle, loss=loss, lr=1e-3, delta=0.1) for r in (runtime, onnx_runtime))
    for _ in range(4):
        np.testing.assert_allclose(one.predict(images), other.predict(images), atol=1e-3)
    for name, value in one.coefficients.items():
        np.testing.assert_allclose(value, other.coefficients[name], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "size"), [("resnet50", 64), ("vit_tiny_patch16_224", 224), ("tf_efficientnet_lite0", 128)]
)
def test_public_architectures(name: str, size: int) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=7).eval()
    family = Family(name, model, Preprocessing((0.5,) * 3, (0.5,) * 3, size), tuple("abcdefg"), f"timm:{name}")
    runtime, device = TorchRuntime(family), OnnxRuntime(to_onnx(family).SerializeToString())
    pixels = np.random.default_rng(0).random((3, 3, size, size)).astype(np.float32)
    for share in (0.0, 1.0):
        np.testing.assert_allclose(runtime(pixels, share).logits, device(pixels, share).logits, atol=1e-4, rtol=1e-4)
    assert device.structure == runtime.structure


def test_our_resnet50_is_the_public_one() -> None:
    """Same keys, same numbers as timm's on random weights."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    public, ours = timm.create_model("resnet50", pretrained=False).eval(), ARCHITECTURES["resnet-50"]().eval()
    ours.load_state_dict(public.state_dict())
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), public(x), atol=1e-4, rtol=1e-4)


class TestBadModels:
    def test_damaged(self, exported: dict[str, bytes], tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match="damaged, or not an ONNX model"):
            OnnxRuntime(exported["fashion-bn"][:1000])
        with pytest.raises(MergettaError, match="No such file"):
            OnnxRuntime(tmp_path / "none.onnx")

    def test_not_ours(self) -> None:
        import onnx
        from onnx import TensorProto, helper

        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
        y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1])
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
        proto: onnx.ModelProto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        with pytest.raises(MergettaError, match="not written by `mergetta export`"):
            OnnxRuntime(proto.SerializeToString())

    def test_from_the_future(self) -> None:
        proto = to_onnx(load_family("fashion-bn"))
        entry = next(e for e in proto.metadata_props if e.key == "mergetta")
        entry.value = json.dumps({**json.loads(entry.value), "version": 99})
        with pytest.raises(MergettaError, match="upgrade mergetta"):
            OnnxRuntime(proto.SerializeToString())

    def test_options(self, exported: dict[str, bytes], images: np.ndarray) -> None:
        with pytest.raises(MergettaError, match="no provider 'Magic'"):
            OnnxRuntime(exported["fashion-bn"], providers=["Magic"])
        with pytest.raises(MergettaError, match="larger than the 8"):
            OnnxRuntime(exported["fashion-bn"], batch_size=8)(images)
        with pytest.raises(MergettaError, match="between 0 and 1"):
            OnnxRuntime(exported["fashion-bn"])(images, source_statistics=2.0)
        with pytest.raises(MergettaError, match="cannot take images of shape"):
            OnnxRuntime(exported["fashion-vit"])(images[:, :, :14, :14])


@pytest.mark.parametrize("name", ["fashion-bn", "fashion-vit"])
def test_int8_stays_accurate_and_adjustable(name: str) -> None:
    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    pixels, labels = load_fashion()
    images = as_input(pixels[:400])
    exact = to_onnx(load_family(name))
    small = quantize_dynamic(exact) if name == "fashion-vit" else quantize_static(exact, [as_input(pixels[3000:3200])])
    assert len(small.SerializeToString()) < 0.5 * len(exact.SerializeToString())
    one, other = OnnxRuntime(exact.SerializeToString()), OnnxRuntime(small.SerializeToString())
    errors = [np.mean(r(images).logits.argmax(axis=1) != labels[:400]) for r in (one, other)]
    assert abs(errors[0] - errors[1]) < 0.04
    assert other.structure == one.structure
    assert all(np.array_equal(other.groups[name], value) for name, value in one.groups.items())
    groups = moved(one, 0.2)
    before = other(images[:8]).logits
    for runtime in (one, other):
        runtime.load(groups)
    assert np.abs(other(images[:8]).logits - before).max() > 0.5
    assert np.mean(one(images).logits.argmax(axis=1) == other(images).logits.argmax(axis=1)) > 0.85
