"""A torch family → one ONNX file that serves plain inference and adaptation alike. Needs the extra `export`.

Inputs: `images` (raw pixels in [0, 1], any batch size), and as optional inputs every group by its name (the source
value unless given) and, if there is BatchNorm, `source_statistics` (the share α of the stored statistics, 0 unless
given).
Outputs: `logits`, `features`, `statistics`; `groups` (all groups in one vector, in order), `classifier_weight` and
`classifier_bias`, from which a runtime reads its constants. ONNX Runtime computes only the outputs asked for.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mergetta.errors import MergettaError
from mergetta.files import write_atomically
from mergetta.models.discovery import BlockOf, find_classifier, find_groups
from mergetta.models.family import Family
from mergetta.models.watch import Watcher, moments
from mergetta.runtimes.onnx_metadata import FORMAT, OUTPUTS, VERSION

if TYPE_CHECKING:
    import onnx


def export_onnx(family: Family, path: str | Path, size: int | None = None, block_of: BlockOf | None = None) -> None:
    """Write the device model of a family.

    >>> export_onnx(load_family("fashion-bn"), "fashion-bn.onnx")   # doctest: +SKIP
    """
    write_atomically(path, to_onnx(family, size, block_of).SerializeToString())


def to_onnx(family: Family, size: int | None = None, block_of: BlockOf | None = None) -> onnx.ModelProto:
    """The device model; `size` is the height and width of its images if the family does not say."""
    size = size or family.preprocessing.size
    if not size:
        raise MergettaError("The family does not say how large its images are: give a size.")
    model = DeviceModel(family, block_of)
    example = torch.rand(2, len(family.preprocessing.mean), size, size)
    shapes = ({0: torch.export.Dim("batch", min=1)}, None, [None] * len(model.names))
    with blended_batch_norm(), quiet():
        program = torch.onnx.export(
            model,
            (example, torch.tensor(0.0), list(model.values)),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["images", "source_statistics", *model.names],
            output_names=list(OUTPUTS),
        )
    assert program is not None
    proto = program.model_proto
    strip(proto)
    make_optional(proto, {"source_statistics": torch.tensor(0.0), **dict(zip(model.names, model.values, strict=True))})
    write_metadata(proto, family, model, size)
    return proto


class DeviceModel(nn.Module):
    """Preprocessing, the model with its groups as arguments, and what adapters look at."""

    def __init__(self, family: Family, block_of: BlockOf | None) -> None:
        super().__init__()
        self.model = copy.deepcopy(family.model).cpu().eval().requires_grad_(False)
        self.structure = find_groups(self.model, block_of)
        self.names = [group.name for group in self.structure]
        self.values = [self.model.get_parameter(name).detach().clone() for name in self.names]
        self.watcher = Watcher(self.model)
        self.classifier = find_classifier(self.model)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (family.preprocessing.mean, family.preprocessing.std))
        self.mean, self.std = mean, std

    def forward(self, images: Tensor, source_statistics: Tensor, groups: list[Tensor]) -> tuple[Tensor, ...]:
        SHARE.append(source_statistics)
        values = dict(zip(self.names, groups, strict=True))
        logits = torch.func.functional_call(self.model, values, ((images - self.mean) / self.std,))
        SHARE.pop()
        bias = self.classifier.bias if self.classifier.bias is not None else torch.zeros(self.classifier.out_features)
        everything = torch.cat([group.reshape(-1) for group in groups])
        return (
            logits,
            self.watcher.features(),
            self.watcher.statistics(),
            everything,
            self.classifier.weight * 1.0,  # an output of its own, not the parameter itself
            bias * 1.0,
        )


SHARE: list[Tensor] = []
"""α of the pass being traced: BatchNorm layers are deep in the model, out of reach of arguments."""


@contextlib.contextmanager
def blended_batch_norm() -> Iterator[None]:
    """Within this context every BatchNorm normalises with α·stored + (1 − α)·batch statistics, as ordinary ops.

    All layers, subclasses with an activation included, call `F.batch_norm`, so that is what changes for the export.
    """
    original = F.batch_norm

    def blended(
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        mean, variance = moments(x, 1)
        if running_mean is not None and running_var is not None:
            share = SHARE[-1]
            mean = share * running_mean + (1 - share) * mean
            variance = share * running_var + (1 - share) * variance
        # not `original`: under tracing that would come back here
        return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)

    F.batch_norm = blended  # type: ignore[assignment]
    try:
        yield
    finally:
        F.batch_norm = original


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The exporter narrates; errors still come through as exceptions."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def strip(proto: onnx.ModelProto) -> None:
    """Leave out the exporter's stack traces, and α where no BatchNorm uses it."""
    for node in proto.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del proto.graph.value_info[:]
    used = {name for node in proto.graph.node for name in node.input}
    for position, entry in reversed(list(enumerate(proto.graph.input))):
        if entry.name == "source_statistics" and entry.name not in used:
            del proto.graph.input[position]


def make_optional(proto: onnx.ModelProto, defaults: dict[str, Tensor]) -> None:
    """An input that is also an initializer need not be given."""
    from onnx import numpy_helper

    inputs = {entry.name for entry in proto.graph.input}
    for name, value in defaults.items():
        if name in inputs:
            proto.graph.initializer.append(numpy_helper.from_array(value.numpy(), name))


def set_metadata(proto: onnx.ModelProto, **changes: Any) -> None:
    """Change entries of an exported model's metadata."""
    for entry in proto.metadata_props:
        if entry.key == "mergetta":
            entry.value = json.dumps({**json.loads(entry.value), **changes})


def write_metadata(proto: onnx.ModelProto, family: Family, model: DeviceModel, size: int) -> None:
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "family": family.fingerprint,
        "groups": [[g.name, g.size, g.block, g.kind, g.stage] for g in model.structure],
        "channels": len(family.preprocessing.mean),
        "size": size,
        "classes": list(family.classes),
        "statistics": None if family.statistics is None else family.statistics.tolist(),
    }
    entry = proto.metadata_props.add()
    entry.key, entry.value = "mergetta", json.dumps(header)
