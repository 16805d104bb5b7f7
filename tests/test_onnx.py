"""The exported model: the same numbers as torch, adjustable, readable without torch or onnx."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mergetta import Family, MergettaError, OnnxRuntime, TorchRuntime, ZOMerge, build_bundle, load_family
from mergetta.adapters.forward_only.adabn import AdaBN
from mergetta.adapters.forward_only.dua import DUA
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.models.family import ARCHITECTURES, Preprocessing
from mergetta.runtimes.base import Runtime
from mergetta.streams.moments import batch_moments

from .contracts import RuntimeContract
from .moving import moved

pytest.importorskip("onnxscript")

from mergetta.runtimes.export import export_onnx, metadata, set_metadata, to_onnx, to_plain_onnx
from mergetta.runtimes.folded import Folded
from mergetta.runtimes.onnx_metadata import plain_path

Exported = Callable[[str], Path]


@pytest.fixture
def onnx_runtime(family: Family, exported: Exported) -> OnnxRuntime:
    return OnnxRuntime(exported(family.name).read_bytes(), threads=1)


class TestOnnxRuntime(RuntimeContract):
    @pytest.fixture
    def subject(self, onnx_runtime: OnnxRuntime) -> OnnxRuntime:
        return onnx_runtime


@pytest.fixture
def foldable(family: Family, exported: Exported) -> OnnxRuntime:
    return OnnxRuntime(exported(family.name), threads=1)


class TestFoldableRuntime(RuntimeContract):
    @pytest.fixture
    def subject(self, foldable: OnnxRuntime) -> OnnxRuntime:
        return foldable


class TestFolded:
    def test_the_same_numbers_everywhere(self, family: Family, foldable: OnnxRuntime, images: np.ndarray) -> None:
        runtime = TorchRuntime(family)
        for groups in (runtime.groups, changed(runtime)):
            folded = foldable.folded(groups)
            assert isinstance(folded, Folded)
            for batch in (1, 5, 48):
                outputs = [
                    folded(images[:batch]),
                    foldable(images[:batch], groups, 1.0),
                    runtime.folded(groups)(images[:batch]),
                ]
                for other in outputs[1:]:
                    for a, b in zip(outputs[0][:3], other[:3], strict=True):
                        np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)

    def test_no_norm_layer_is_left_behind_a_convolution(self, exported: Exported, tmp_path: Path) -> None:
        """But the stem's, whose output is looked at before it."""
        import onnx
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED  # beyond: other operators
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        groups = OnnxRuntime(exported("fashion-bn")).groups
        values = {name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in groups.items()}
        options.add_external_initializers(list(values), list(values.values()))
        ort.InferenceSession(plain_path(exported("fashion-bn")), options)
        kinds = [node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node]
        before = onnx.load(plain_path(exported("fashion-bn")), load_external_data=False).graph.node
        assert sum(node.op_type == "BatchNormalization" for node in before) == 15
        assert kinds.count("BatchNormalization") == 1
        assert "If" not in kinds

    def test_without_its_file_the_model_runs_as_it_is(
        self, exported: Exported, images: np.ndarray, tmp_path: Path
    ) -> None:
        alone = tmp_path / "alone.onnx"
        alone.write_bytes(exported("fashion-bn").read_bytes())
        runtime = OnnxRuntime(alone)
        groups = changed(runtime)
        folded = runtime.folded(groups)
        assert not isinstance(folded, Folded)
        np.testing.assert_array_equal(folded(images).logits, runtime(images, groups, 1.0).logits)
        given = OnnxRuntime(alone.read_bytes(), plain=plain_path(exported("fashion-bn")).read_bytes())
        assert isinstance(given.folded(groups), Folded)
        with pytest.raises(MergettaError, match="No such file"):
            OnnxRuntime(alone, plain=tmp_path / "none.onnx").folded(groups)

    def test_damaged_or_of_another_model(self, exported: Exported, tmp_path: Path) -> None:
        data = plain_path(exported("fashion-bn")).read_bytes()
        runtime = OnnxRuntime(exported("fashion-bn"), plain=data[: len(data) // 2])
        with pytest.raises(MergettaError, match="plain model is damaged, or not an ONNX model"):
            runtime.folded(runtime.groups)
        with pytest.raises(MergettaError, match="damaged"):
            OnnxRuntime(exported("fashion-bn"), plain=plain_path(exported("fashion-vit"))).folded(runtime.groups)
        with pytest.raises(MergettaError, match="damaged"):
            OnnxRuntime(exported("fashion-bn"), plain=exported("fashion-vit")).folded(runtime.groups)
        other = to_plain_onnx(load_family("fashion-bn"))
        set_metadata(other, digest="another export")
        with pytest.raises(MergettaError, match="does not belong to this model: export both again"):
            OnnxRuntime(exported("fashion-bn"), plain=other.SerializeToString()).folded(runtime.groups)

    def test_an_int8_model_has_none(self, exported: Exported, images: np.ndarray, tmp_path: Path) -> None:
        """Not even if the plain graph of a float model still stands where it is written."""
        from mergetta.runtimes.quantize import quantize_dynamic

        small = tmp_path / "model.onnx"
        small.write_bytes(quantize_dynamic(to_onnx(load_family("fashion-vit"))).SerializeToString())
        plain_path(small).write_bytes(plain_path(exported("fashion-vit")).read_bytes())
        runtime = OnnxRuntime(small)
        folded = runtime.folded(runtime.groups)
        np.testing.assert_array_equal(folded(images).logits, runtime(images, given=1.0).logits)
        assert not isinstance(folded, Folded)

    def test_the_device_needs_neither_onnx_nor_torch(self, exported: Exported) -> None:
        code = f"""
            import sys
            sys.modules["onnx"] = sys.modules["onnxscript"] = sys.modules["torch"] = None
            import numpy as np
            from mergetta import OnnxRuntime
            runtime = OnnxRuntime({str(exported("fashion-bn"))!r}, threads=1)
            folded = runtime.folded(runtime.groups)
            images = np.random.default_rng(0).random((4, 1, 28, 28)).astype(np.float32)
            print(type(folded).__name__, np.abs(folded(images).logits - runtime(images, given=1.0).logits).max() < 1e-4)
        """
        result = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
        assert result.stdout.split() == ["Folded", "True"], result.stderr

    def test_the_file_tells_nothing_of_the_machine_and_holds_no_groups(self, exported: Exported) -> None:
        import onnx

        for path in map(exported, ("fashion-bn", "fashion-vit")):
            data = plain_path(path).read_bytes()
            proto = onnx.load_from_string(data)
            assert b"site-packages" not in data
            assert [entry.name for entry in proto.graph.input] == ["images"]
            assert metadata(proto)["digest"] == OnnxRuntime(path).metadata["plain"]
            names = {group.name for group in OnnxRuntime(path).structure}
            assert {t.name for t in proto.graph.initializer if not t.HasField("raw_data")} >= names


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
    family: Family, exported: Exported, onnx_runtime: OnnxRuntime, images: np.ndarray
) -> None:
    """Any program that runs ONNX gets from the file what the checkpoint promises, without knowing of groups."""
    import onnxruntime as ort

    (logits,) = ort.InferenceSession(exported(family.name)).run(["logits"], {"images": images})
    x = (torch.from_numpy(images) - family.preprocessing.mean[0]) / family.preprocessing.std[0]
    with torch.no_grad():
        np.testing.assert_allclose(logits, family.model.eval()(x), atol=1e-4, rtol=1e-4)
    np.testing.assert_array_equal(logits, onnx_runtime(images, given=1.0).logits)


def branches_of(graph: Any) -> Iterator[Any]:
    return (a.g for node in graph.node if node.op_type == "If" for a in node.attribute if a.HasField("g"))


@pytest.mark.parametrize("int8", [False, True])
def test_without_need_no_layer_reduces_over_the_batch(int8: bool, images: np.ndarray, exported: Exported) -> None:
    """All reductions behind the stem's are inside branches, and each branch that is not taken has none."""
    import onnx

    from mergetta.runtimes.quantize import quantize_static

    proto = onnx.load(exported("fashion-bn"))
    proto = quantize_static(proto, [images]) if int8 else proto
    layers = len([g for g in OnnxRuntime(proto.SerializeToString()).structure if g.kind == "mean"])
    branches = list(branches_of(proto.graph))
    counts = [sum(node.op_type.startswith("Reduce") for node in branch.node) for branch in branches]
    assert len(branches) == 2 * layers  # to look at the images, or not
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


def test_the_file_tells_nothing_of_the_machine_it_was_made_on(exported: Exported) -> None:
    """The exporter notes stack traces with every operator, those inside branches included."""
    import onnx

    for data in (exported(name).read_bytes() for name in ("fashion-bn", "fashion-vit")):
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


@pytest.mark.parametrize(("name", "size"), [("vit_tiny_patch16_224", 224), ("mobilenetv3_small_050", 64)])
def test_public_architectures(name: str, size: int, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, num_classes=7).eval()
    family = Family(name, model, Preprocessing((0.5,) * 3, (0.5,) * 3, size), tuple("abcdefg"), f"timm:{name}")
    export_onnx(family, tmp_path / "model.onnx")
    runtime, device = TorchRuntime(family), OnnxRuntime(tmp_path / "model.onnx")
    pixels = np.random.default_rng(0).random((3, 3, size, size)).astype(np.float32)
    groups = {name: value + 0.1 for name, value in runtime.groups.items()}
    for given in (0.0, 0.3, 1.0):
        one, other = (r(pixels, groups, given, moments=True) for r in (runtime, device))
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-4, rtol=1e-4)
        np.testing.assert_allclose(one.moments, other.moments, atol=1e-4, rtol=1e-4)
    folded = device.folded(groups)
    assert isinstance(folded, Folded)
    np.testing.assert_allclose(folded(pixels).logits, runtime(pixels, groups, 1.0).logits, atol=1e-4, rtol=1e-4)
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
    def test_damaged(self, exported: Exported, tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match="damaged, or not an ONNX model"):
            OnnxRuntime(exported("fashion-bn").read_bytes()[:1000])
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
    def test_another_version(self, exported: Exported, version: int, sentence: str) -> None:
        import onnx

        proto = onnx.load_from_string(exported("fashion-bn").read_bytes())
        set_metadata(proto, version=version)
        with pytest.raises(MergettaError, match=sentence):
            OnnxRuntime(proto.SerializeToString())

    def test_options(self, exported: Exported, images: np.ndarray) -> None:
        with pytest.raises(MergettaError, match="no provider 'Magic'"):
            OnnxRuntime(exported("fashion-bn").read_bytes(), providers=["Magic"])
        with pytest.raises(MergettaError, match="larger than the 8"):
            OnnxRuntime(exported("fashion-bn").read_bytes(), batch_size=8)(images)
        with pytest.raises(MergettaError, match="between 0 and 1"):
            OnnxRuntime(exported("fashion-bn").read_bytes())(images, given=2.0)
        with pytest.raises(MergettaError, match="cannot take images of shape"):
            OnnxRuntime(exported("fashion-vit").read_bytes())(images[:, :, :14, :14])


@pytest.mark.parametrize("name", ["fashion-bn", "fashion-vit"])
def test_int8_stays_accurate_and_adjustable(name: str, exported: Exported) -> None:
    import onnx

    from mergetta.runtimes.quantize import quantize_dynamic, quantize_static

    pixels, labels = load_fashion()
    images = as_input(pixels[:400])
    exact = onnx.load(exported(name))
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

    @pytest.mark.parametrize("kind", [AdaBN, DUA])
    def test_the_same_as_torch(
        self, family: Family, onnx_runtime: OnnxRuntime, images: np.ndarray, kind: type[AdaBN]
    ) -> None:
        one, other = (kind(r) for r in (TorchRuntime(family), onnx_runtime))
        for part in (images[:1], images[:7], images, images[::-1]):
            np.testing.assert_allclose(one.predict(part), other.predict(part), atol=1e-3, rtol=1e-3)
        np.testing.assert_allclose(one.running, other.running, atol=1e-4, rtol=1e-4)
