"""int8 device models: dynamic for transformers, static with calibration images for CNNs. Norm groups stay adjustable.

Needs the extra `export`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort

from mergetta.errors import MergettaError
from mergetta.runtimes.export import quiet

if TYPE_CHECKING:
    import onnx


def quantize_dynamic(model: onnx.ModelProto) -> onnx.ModelProto:
    """Weights of matrix products in int8, activations quantised on the fly: for transformers."""
    from onnxruntime.quantization import QuantType
    from onnxruntime.quantization import quantize_dynamic as quantize

    return converted(model, lambda source, target: quantize(source, target, weight_type=QuantType.QInt8))


def quantize_static(model: onnx.ModelProto, batches: Iterable[np.ndarray]) -> onnx.ModelProto:
    """Convolutions and matrix products in int8 with ranges measured on calibration images: for CNNs."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
    from onnxruntime.quantization import quantize_static as quantize

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self.batches = iter(batches)

        def get_next(self) -> dict[str, Any] | None:
            images = next(self.batches, None)
            return None if images is None else {"images": np.asarray(images, np.float32)}

    return converted(
        model,
        lambda source, target: quantize(
            source,
            target,
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=["Conv", "MatMul", "Gemm"],
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        ),
    )


def converted(model: onnx.ModelProto, convert: Any) -> onnx.ModelProto:
    """ONNX Runtime's quantisers work on files; metadata and optional inputs must survive them."""
    import onnx

    source = onnx.ModelProto()
    source.CopyFrom(model)
    ort.set_default_logger_severity(3)  # each optional input would be warned of
    with tempfile.TemporaryDirectory() as folder, quiet():
        before, after = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(source, before)
        convert(str(before), str(after))
        result = onnx.load(after)
    ort.set_default_logger_severity(2)
    lost = {entry.key for entry in model.metadata_props} - {entry.key for entry in result.metadata_props}
    for entry in model.metadata_props:
        if entry.key in lost:
            result.metadata_props.add(key=entry.key, value=entry.value)
    inputs, initializers = ({x.name for x in part} for part in (result.graph.input, result.graph.initializer))
    missing = [x.name for x in model.graph.input if x.name not in inputs]
    if missing or not {x.name for x in model.graph.input} - {"images"} <= initializers:
        raise MergettaError(f"Quantisation lost the adjustable input {(missing or ['?'])[0]!r}.")
    return result
