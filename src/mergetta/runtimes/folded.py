"""A model whose groups are constants: ONNX Runtime folds the norm layers into the convolutions when it opens it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.groups import GroupValues
from mergetta.runtimes.base import Output, copy_of
from mergetta.runtimes.onnx_metadata import PLAIN_FORMAT, PLAIN_OUTPUTS
from mergetta.runtimes.onnx_session import in_portions, metadata_of, open_session, run_session

if TYPE_CHECKING:
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

OUTPUTS = list(PLAIN_OUTPUTS)


class Folded:
    """A session of its own over the plain graph of a runtime, with one set of groups for good.

    The plain file names its groups and leaves their values open. They are handed over before the session optimises its
    graph, so that no norm layer is left behind a convolution and the device needs no package to edit a graph with.
    """

    def __init__(self, runtime: OnnxRuntime, plain: str | Path | bytes, groups: GroupValues) -> None:
        self.runtime, self._plain = runtime, plain
        # Where a norm layer is not folded (LayerNorm), the session goes on reading these very arrays.
        self._constants = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in copy_of(groups, runtime).items()}
        self.runtime.sessions.get(self, self._open)

    def _open(self) -> Any:
        runtime, source = self.runtime, "the plain model" if isinstance(self._plain, bytes) else str(self._plain)
        session = open_session(self._plain, source, runtime.threads, runtime.providers, self._constants)
        header = metadata_of(session)
        if header.get("format") != PLAIN_FORMAT or header.get("digest") != runtime.metadata["plain"]:
            raise MergettaError(f"{source} does not belong to this model: export both again.")
        return session

    def __call__(self, images: Array) -> Output:
        x = self.runtime.prepare(images)
        self.runtime.forwarded += len(x)
        session = self.runtime.sessions.get(self, self._open)
        return in_portions(x, lambda part: Output(*run_session(session, OUTPUTS, {"images": part})))
