"""A torch family → the ONNX files of a device: an adjustable one and, beside it, a plain one. Needs the extra `export`.

The adjustable file serves plain inference and adaptation alike.
Inputs: `images` (raw pixels in [0, 1], any batch size), and as optional inputs every group by its name (the source
value unless given) and, if there is BatchNorm, `given` (the share α of the mean and variance groups, one number per
channel of all layers, 1 unless given) and `observe` (whether the moments of the images are wanted though nothing is
normalised with them, false unless given). With images alone it is the source model. Where α = 1 and nothing is
observed, no layer reduces over the batch.
Outputs: `logits`, `features`, `signature`, `moments`; `groups` (all groups in one vector, in order),
`classifier_weight` and `classifier_bias`, from which a runtime reads its constants.

The plain file is for a device that has settled. Its only input is `images`, its outputs are `logits`, `features` and
`signature`, and its groups are constants whose values stand nowhere: a device hands them over when it opens the file.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.files import write_atomically
from mergetta.groups import moment_pairs
from mergetta.models.discovery import BlockOf, find_classifier, find_groups, open_batch_norms
from mergetta.models.family import Family
from mergetta.models.watch import Watcher, logits_of, spatial_moments
from mergetta.runtimes.home import with_home
from mergetta.runtimes.onnx_metadata import FORMAT, OUTPUTS, PLAIN_FORMAT, PLAIN_OUTPUTS, VERSION, plain_path

if TYPE_CHECKING:
    import onnx


def export_onnx(
    family: Family,
    path: str | Path,
    size: int | None = None,
    block_of: BlockOf | None = None,
    clean: Iterable[Array] | None = None,
) -> None:
    """Write the device model of a family, and its plain graph beside it.

    `clean` are batches such as the model was made for. What they look like to it (its signature) goes into the file,
    unless the family knows already: there a device leaves the model as it is.

    >>> export_onnx(load_family("fashion-bn"), "fashion-bn.onnx")   # doctest: +SKIP
    """
    if clean is not None:
        family = with_home(family, clean)
    write_models(path, to_onnx(family, size, block_of), to_plain_onnx(family, size, block_of))


def write_models(path: str | Path, model: onnx.ModelProto, plain: onnx.ModelProto) -> None:
    """The two files of a device, which say that they belong together."""
    set_metadata(model, plain=metadata(plain)["digest"])
    write_atomically(plain_path(path), plain.SerializeToString())
    write_atomically(path, model.SerializeToString())


def to_onnx(family: Family, size: int | None = None, block_of: BlockOf | None = None) -> onnx.ModelProto:
    """The device model; `size` is the height and width of its images if the family does not say."""
    size = image_size(family, size)
    model = DeviceModel(family, block_of)
    example = torch.rand(2, len(family.preprocessing.mean), size, size)
    shapes = ({0: torch.export.Dim("batch", min=1)}, None, None, [None] * len(model.names))
    given, observe = torch.ones(model.channels), torch.tensor(False)
    with traced_batch_norm(), quiet():
        program = torch.onnx.export(
            model,
            (example, given, observe, list(model.values)),
            dynamo=True,
            dynamic_shapes=shapes,
            input_names=["images", "given", "observe", *model.names],
            output_names=list(OUTPUTS),
        )
    assert program is not None
    proto = program.model_proto
    strip(proto)
    defaults = {"given": given, "observe": observe, **dict(zip(model.names, model.values, strict=True))}
    make_optional(proto, defaults)
    write_metadata(proto, family, model, size)
    return proto


def to_plain_onnx(family: Family, size: int | None = None, block_of: BlockOf | None = None) -> onnx.ModelProto:
    """The same network in evaluation mode, its groups being constants without values."""
    size = image_size(family, size)
    model = PlainModel(family, block_of)
    example = torch.rand(2, len(family.preprocessing.mean), size, size)
    with quiet():
        program = torch.onnx.export(
            model,
            (example, list(model.values)),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)}, [None] * len(model.names)),
            input_names=["images", *model.names],
            output_names=list(PLAIN_OUTPUTS),
        )
    assert program is not None
    proto = program.model_proto
    strip(proto)
    leave_open(proto, model.names)
    digest = hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()
    add_metadata(proto, {"format": PLAIN_FORMAT, "family": family.fingerprint, "digest": digest})
    return proto


def image_size(family: Family, size: int | None) -> int:
    """Height and width of the images: as given, or as the family says."""
    size = size or family.preprocessing.size
    if not size:
        raise MergettaError("The family does not say how large its images are: give a size.")
    return size


class DeviceModel(nn.Module):
    """Preprocessing, the model with its groups as arguments, and what adapters look at."""

    def __init__(self, family: Family, block_of: BlockOf | None) -> None:
        super().__init__()
        self.model = copy.deepcopy(family.model).cpu().eval().requires_grad_(False)
        open_batch_norms(self.model)
        self.structure = find_groups(self.model, block_of)
        self.names = [group.name for group in self.structure]
        self.values = [attrgetter(name)(self.model).detach().clone() for name in self.names]
        self.pairs = moment_pairs(self.names)
        self.channels = sum(group.size for group in self.structure if group.kind == "mean")
        self.watcher = Watcher(self.model)
        self.classifier = find_classifier(self.model)
        mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (family.preprocessing.mean, family.preprocessing.std))
        self.mean, self.std = mean, std

    def forward(self, images: Tensor, given: Tensor, observe: Tensor, groups: list[Tensor]) -> tuple[Tensor, ...]:
        values = dict(zip(self.names, groups, strict=True))
        parts = torch.split(given, [values[mean].shape[0] for mean, _ in self.pairs]) if self.pairs else ()
        shares = {id(values[mean]): part for (mean, _), part in zip(self.pairs, parts, strict=True)}
        TRACED.append(Traced(shares, observe | (given < 1).any(), images.new_zeros(images.shape[0], 1), {}))
        logits = logits_of(torch.func.functional_call(self.model, values, ((images - self.mean) / self.std,)))
        seen = TRACED.pop().seen
        for mean, variance in self.pairs:
            if id(values[mean]) not in seen:  # a layer that does not run shows what it would normalise with
                square = values[variance] + values[mean] ** 2
                seen |= {
                    id(values[n]): v.expand(len(images), -1) for n, v in ((mean, values[mean]), (variance, square))
                }
        none = images.new_zeros(images.shape[0], 0)
        means, squares = (torch.cat([none, *(seen[id(values[pair[row]])] for pair in self.pairs)], 1) for row in (0, 1))
        bias = self.classifier.bias if self.classifier.bias is not None else torch.zeros(self.classifier.out_features)
        everything = torch.cat([group if group.ndim == 1 else group.reshape(-1) for group in groups])
        return (
            logits,
            self.watcher.features(),
            self.watcher.signature(),
            torch.stack([means, F.relu(squares - means * means)], dim=1),
            everything,
            self.classifier.weight * 1.0,  # an output of its own, not the parameter itself
            bias * 1.0,
        )


class PlainModel(DeviceModel):
    """The same without anything of the batch's own."""

    def forward(self, images: Tensor, groups: list[Tensor]) -> tuple[Tensor, ...]:  # type: ignore[override]
        values = dict(zip(self.names, groups, strict=True))
        logits = logits_of(torch.func.functional_call(self.model, values, ((images - self.mean) / self.std,)))
        return logits, self.watcher.features(), self.watcher.signature(pooled=True)


class Traced(NamedTuple):
    """What BatchNorm layers go by in the pass being traced: they are deep in the model, out of reach of arguments."""

    given: dict[int, Tensor]
    """The share of what is given, (C,), by the identity of the mean group."""
    look: Tensor
    """Whether layers look at the batch: to normalise with what it has of its own, or to show that."""
    none: Tensor
    """(B, 1), zeros: moments that nobody looked at, broadcast."""
    seen: dict[int, Tensor]
    """Means and mean squares of each image, (B, C), by the identity of the mean or variance group beside them."""


TRACED: list[Traced] = []


def looking(x: Tensor, none: Tensor, share: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """What to normalise with, a share of what is given and of what the images have on average; their own moments."""
    means, squares = spatial_moments(x, none)
    own, rest = means.mean(0), 1 - share
    blended = share * mean + rest * own, share * variance + rest * F.relu(squares.mean(0) - own * own)
    return *blended, means, squares


def not_looking(x: Tensor, none: Tensor, share: Tensor, mean: Tensor, variance: Tensor) -> tuple[Tensor, ...]:
    """What is given, and nothing in the shape of `spatial_moments`."""
    nothing = none + x.new_zeros(x.shape[1])
    return mean.clone(), variance.clone(), nothing, nothing.clone()


@contextlib.contextmanager
def traced_batch_norm() -> Iterator[None]:
    """Within this context every BatchNorm normalises with α·given + (1 − α)·batch moments, as ordinary ops.

    All layers, subclasses with an activation included, call `F.batch_norm`, so that is what changes for the export.
    """
    original = F.batch_norm

    def traced(
        x: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        now = TRACED[-1]
        known = now.given[id(running_mean)], running_mean, running_var
        mean, variance, means, squares = torch.cond(now.look, looking, not_looking, (x, now.none, *known))
        now.seen[id(running_mean)], now.seen[id(running_var)] = means, squares
        # not `original`: under tracing that would come back here
        # times 1, because the exporter adds eps to an op's output, but not to a branch's
        return torch.batch_norm(x, weight, bias, mean, variance * 1.0, False, 0.0, eps, False)

    F.batch_norm = traced  # type: ignore[assignment]
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
    """Leave out the exporter's stack traces, and inputs that nothing uses: without BatchNorm there is no α."""
    strip_graph(proto.graph)
    used = {name for node in proto.graph.node for name in node.input}
    for position, entry in reversed(list(enumerate(proto.graph.input))):
        if entry.name in ("given", "observe") and entry.name not in used:
            del proto.graph.input[position]


def strip_graph(graph: onnx.GraphProto) -> None:
    for node in graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
        for attribute in node.attribute:
            if attribute.HasField("g"):  # a branch of If
                strip_graph(attribute.g)
    del graph.value_info[:]


def make_optional(proto: onnx.ModelProto, defaults: dict[str, Tensor]) -> None:
    """An input that is also an initializer need not be given."""
    from onnx import numpy_helper

    inputs = {entry.name for entry in proto.graph.input}
    for name, value in defaults.items():
        if name in inputs:
            proto.graph.initializer.append(numpy_helper.from_array(value.numpy(), name))


def leave_open(proto: onnx.ModelProto, names: Sequence[str]) -> None:
    """Turn inputs into constants that are said to stand in another file, which a device replaces as it opens this one.

    ONNX Runtime replaces no others, and does so before it optimises the graph.
    """
    from onnx import TensorProto

    for position, entry in reversed(list(enumerate(proto.graph.input))):
        if entry.name not in names:
            continue
        shape = [dimension.dim_value for dimension in entry.type.tensor_type.shape.dim]
        constant = TensorProto(name=entry.name, data_type=TensorProto.FLOAT, dims=shape)
        constant.data_location = TensorProto.EXTERNAL
        constant.external_data.add(key="location", value="groups")
        proto.graph.initializer.append(constant)
        del proto.graph.input[position]


def metadata(proto: onnx.ModelProto) -> dict[str, Any]:
    """What an exported model says about itself."""
    return next((json.loads(entry.value) for entry in proto.metadata_props if entry.key == "mergetta"), {})


def set_metadata(proto: onnx.ModelProto, **changes: Any) -> None:
    """Change entries of an exported model's metadata."""
    for entry in proto.metadata_props:
        if entry.key == "mergetta":
            entry.value = json.dumps({**json.loads(entry.value), **changes})


def add_metadata(proto: onnx.ModelProto, header: dict[str, Any]) -> None:
    entry = proto.metadata_props.add()
    entry.key, entry.value = "mergetta", json.dumps(header)


def write_metadata(proto: onnx.ModelProto, family: Family, model: DeviceModel, size: int) -> None:
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "family": family.fingerprint,
        "groups": [[g.name, g.size, g.block, g.kind, g.stage] for g in model.structure],
        "channels": len(family.preprocessing.mean),
        "size": size,
        "classes": list(family.classes),
        "signature": None if family.signature is None else family.signature.tolist(),
    }
    add_metadata(proto, header)
