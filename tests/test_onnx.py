"""The exported model: the same numbers as torch, adjustable, readable without torch or onnx."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mergetta import Family, MergettaError, OnnxRuntime, TorchRuntime, ZOMerge, build_bundle, load_family
from mergetta.adapters.forward_only.adabn import AdaBN
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.models.family import ARCHITECTURES, Preprocessing
from mergetta.runtimes.base import Runtime
from mergetta.streams.moments import batch_moments

from .contracts import RuntimeContract
from .moving import moved

pytest.importorskip("onnxscript")

from mergetta.runtimes.export import set_metadata, to_onnx


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


def changed(runtime: Runtime, scale: float = 0.1) -> dict[str, np.ndarray]:
    return moved(runtime.groups, np.random.default_rng(3), scale)


def assert_same(
    one: Runtime, other: Runtime, images: np.ndarray, groups: dict[str, np.ndarray] | None, given: float
) -> None:
    for moments in (False, True):
        outputs = [runtime(images, groups, given, moments) for runtime in (one, other)]
        for a, b in zip(*(output[: 3 + moments] for output in outputs), strict=True):
            np.testing.assert_allclose(a, b, atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("given", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("batch", [1, 5, 48])
def test_same_numbers_as_torch(
    family: Family, onnx_runtime: OnnxRuntime, images: np.ndarray, given: float, batch: int
) -> None:
    runtime = TorchRuntime(family)
    for groups in (None, changed(runtime)):
        assert_same(runtime, onnx_runtime, images[:batch], groups, given)


def test_images_alone_give_the_source_model(
    family: Family, exported: dict[str, bytes], onnx_runtime: OnnxRuntime, images: np.ndarray
) -> None:
    """Any program that runs ONNX gets from the file what the checkpoint promises, without knowing of groups."""
    import onnxruntime as ort

    (logits,) = ort.InferenceSession(exported[family.name]).run(["logits"], {"images": images})
    x = (torch.from_numpy(images) - family.preprocessing.mean[0]) / family.preprocessing.std[0]
    with torch.no_grad():
        np.testing.assert_allclose(logits, family.model.eval()(x), atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(logits, onnx_runtime(images, given=1.0).logits)


def branches_of(graph: Any) -> Iterator[Any]:
    return (a.g for node in graph.node if node.op_type == "If" for a in node.attribute if a.HasField("g"))


@pytest.mark.parametrize("int8", [False, True])
def test_without_need_no_layer_reduces_over_the_batch(int8: bool, images: np.ndarray) -> None:
    """All reductions behind the stem's are inside branches, and each branch that is not taken has none."""
    from mergetta.runtimes.quantize import quantize_static

    proto = to_onnx(load_family("fashion-bn"))
    proto = quantize_static(proto, [images]) if int8 else proto
    layers = len([g for g in OnnxRuntime(proto.SerializeToString()).structure if g.kind == "mean"])
    branches = list(branches_of(proto.graph))
    counts = [sum(node.op_type.startswith("Reduce") for node in branch.node) for branch in branches]
    assert len(branches) == 2 * layers
    assert sorted(count > 0 for count in counts) == [False] * layers + [True] * layers
    outside = [node for node in proto.graph.node if node.op_type in ("ReduceMean", "ReduceSum")]
    constants = {x.name: x for x in proto.graph.initializer}
    over_the_batch = [node for node in outside if 0 in axes_of(node, constants)]
    assert 0 < len(over_the_batch) <= 2  # the signature: mean and variance after the stem
    norms = {name for node in proto.graph.node if node.op_type == "BatchNormalization" for name in node.input}
    assert not norms & {name for node in over_the_batch for name in node.output}


def axes_of(node: Any, constants: dict[str, Any]) -> list[int]:
    from onnx import numpy_helper

    if len(node.input) > 1 and node.input[1] in constants:
        return numpy_helper.to_array(constants[node.input[1]]).reshape(-1).tolist()
    return [0]  # unknown: counted as one over the batch


def test_the_file_tells_nothing_of_the_machine_it_was_made_on(exported: dict[str, bytes]) -> None:
    """The exporter notes stack traces with every operator, those inside branches included."""
    import onnx

    for data in exported.values():
        graph = onnx.load_from_string(data).graph
        for part in (graph, *branches_of(graph)):
            assert not [entry.key for node in part.node for entry in node.metadata_props]
            assert not any(node.doc_string for node in part.node)
        assert b"site-packages" not in data
        assert str(Path(__file__).parents[1]).encode() not in data


def test_says_what_it_is(family: Family, onnx_runtime: OnnxRuntime) -> None:
    runtime = TorchRuntime(family)
    assert onnx_runtime.family == runtime.family
    assert onnx_runtime.structure == runtime.structure
    assert all(np.array_equal(onnx_runtime.groups[name], value) for name, value in runtime.groups.items())
    np.testing.assert_array_equal(onnx_runtime.classifier.weight, runtime.classifier.weight)
    np.testing.assert_array_equal(onnx_runtime.classifier.bias, runtime.classifier.bias)
    np.testing.assert_allclose(onnx_runtime.signature, runtime.signature)
    assert tuple(onnx_runtime.metadata["classes"]) == family.classes


@pytest.mark.parametrize("loss", ["entropy", "roid", "deyo"])
def test_same_trajectory_as_torch(family: Family, onnx_runtime: OnnxRuntime, images: np.ndarray, loss: str) -> None:
    runtime = TorchRuntime(family)
    bundle = build_bundle(runtime.groups, [changed(runtime) for _ in range(3)])
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
    groups = {name: value + 0.1 for name, value in runtime.groups.items()}
    for given in (0.0, 0.3, 1.0):
        one, other = (r(pixels, groups, given, moments=True) for r in (runtime, device))
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(one.moments, other.moments, atol=1e-4, rtol=1e-4)
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

    @pytest.mark.parametrize(
        ("version", "sentence"), [(99, "upgrade mergetta"), (1, "older device format .*export it again")]
    )
    def test_another_version(self, exported: dict[str, bytes], version: int, sentence: str) -> None:
        import onnx

        proto = onnx.load_from_string(exported["fashion-bn"])
        set_metadata(proto, version=version)
        with pytest.raises(MergettaError, match=sentence):
            OnnxRuntime(proto.SerializeToString())

    def test_options(self, exported: dict[str, bytes], images: np.ndarray) -> None:
        with pytest.raises(MergettaError, match="no provider 'Magic'"):
            OnnxRuntime(exported["fashion-bn"], providers=["Magic"])
        with pytest.raises(MergettaError, match="larger than the 8"):
            OnnxRuntime(exported["fashion-bn"], batch_size=8)(images)
        with pytest.raises(MergettaError, match="between 0 and 1"):
            OnnxRuntime(exported["fashion-bn"])(images, given=2.0)
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
    assert all(np.array_equal(other.groups[group], value) for group, value in one.groups.items())
    groups = changed(one, 0.2)
    before = other(images[:8]).logits
    assert np.abs(other(images[:8], groups).logits - before).max() > 0.5
    for given in (0.0, 0.3, 1.0):
        exact_output, output = (r(images, groups, given, moments=True) for r in (one, other))
        assert np.mean(exact_output.logits.argmax(axis=1) == output.logits.argmax(axis=1)) > 0.85
        if output.moments.size:
            (mean, variance), (rough, spread) = (batch_moments(o.moments) for o in (exact_output, output))
            assert np.abs((mean - rough) / np.sqrt(variance)).mean() < 0.05
            assert np.median(np.abs(np.log(spread / variance))) < 0.05
    if name == "fashion-bn":  # ranges of activations that are found on the fly are the batch's
        alone = other(images[:1], groups, 1.0).logits
        np.testing.assert_allclose(alone, other(images, groups, 1.0).logits[:1], atol=1e-3)


class TestAdaBN:
    """It needs nothing but moments, so that it runs on devices."""

    @pytest.mark.parametrize("decay", [1.0, 0.5])
    def test_the_same_as_torch(
        self, family: Family, onnx_runtime: OnnxRuntime, images: np.ndarray, decay: float
    ) -> None:
        one, other = (AdaBN(r, decay=decay) for r in (TorchRuntime(family), onnx_runtime))
        for part in (images[:1], images[:7], images, images[::-1]):
            np.testing.assert_allclose(one.predict(part), other.predict(part), atol=1e-3, rtol=1e-3)
        np.testing.assert_allclose(one.running, other.running, atol=1e-4, rtol=1e-4)
