"""Runs an exported model with NumPy and ONNX Runtime alone: the runtime of weak devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mergetta.arrays import Array
from mergetta.errors import MergettaError
from mergetta.files import expect
from mergetta.groups import Group, GroupValues, Vector, check_groups
from mergetta.runtimes.base import Classifier, Output, Predict, check_images, shares_of, unfolded
from mergetta.runtimes.folded import Folded
from mergetta.runtimes.onnx_metadata import FORMAT, OUTPUTS, VERSION, plain_path
from mergetta.runtimes.onnx_session import Sessions, in_portions, metadata_of, open_session, run_session


class OnnxRuntime:
    """One ONNX file, adjustable norm layers, no PyTorch.

    Parameters
    ----------
    model
        The file that `mergetta export` wrote, or its content.
    threads
        Per operator (default: ONNX Runtime's choice).
    providers
        ONNX Runtime's execution providers, in the order in which they are tried.
    batch_size
        Larger batches are refused.
    plain
        The graph for `folded` (default: the file that `mergetta export` writes beside the model).

    Examples
    --------
    >>> OnnxRuntime("fashion-bn.onnx")(np.zeros((2, 1, 28, 28), np.float32)).logits   # doctest: +SKIP
    """

    def __init__(
        self,
        model: str | Path | bytes,
        threads: int | None = None,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        batch_size: int | None = None,
        plain: str | Path | bytes | None = None,
    ) -> None:
        self._model, self.threads, self.providers, self.batch_size = model, threads, tuple(providers), batch_size
        self.sessions = Sessions(model)
        source, session = self._source, self._session
        header = read_metadata(session, source)
        self.metadata = header
        self.family: str = expect(header, "family", str, source)
        self.structure = tuple(Group(*fields) for fields in expect(header, "groups", list, source))
        self.forwarded = 0
        if plain is None and not isinstance(model, bytes) and plain_path(model).is_file():
            plain = plain_path(model)
        self._plain = plain if "plain" in header else None
        optional = {entry.name for entry in session.get_overridable_initializers()}
        missing = [group.name for group in self.structure if group.name not in optional]
        if missing:
            raise MergettaError(
                f"{source} does not take the group {missing[0]!r} as an optional input: export it again."
            )
        self._blends = "given" in optional
        self._channels = sum(group.size for group in self.structure if group.kind == "mean")

    @property
    def _source(self) -> str:
        return "the model" if isinstance(self._model, bytes) else str(self._model)

    @property
    def _session(self) -> Any:
        """The adjustable one."""
        return self.sessions.get(self, lambda: open_session(self._model, self._source, self.threads, self.providers))

    @cached_property
    def _constants(self) -> list[np.ndarray]:
        return self._read("groups", "classifier_bias")

    def _read(self, *names: str) -> list[np.ndarray]:
        return run_session(self._session, list(names), self._blank())

    @cached_property
    def groups(self) -> dict[str, Vector]:
        ends = np.cumsum([group.size for group in self.structure])[:-1]
        parts = np.split(self._constants[0], ends)
        return {group.name: part for group, part in zip(self.structure, parts, strict=True)}

    @property
    def classes(self) -> int:
        return len(self._constants[1])

    @cached_property
    def classifier(self) -> Classifier:
        return Classifier(self._read("classifier_weight")[0], self._constants[1])

    @cached_property
    def signature(self) -> np.ndarray | None:
        values = self.metadata.get("signature")
        return None if values is None else np.array(values, dtype=np.float32)

    def _feed(self, groups: GroupValues | None) -> dict[str, np.ndarray]:
        if groups is None:
            return {}
        check_groups(groups, self.groups, "The set of groups")
        return {name: np.ascontiguousarray(value, dtype=np.float32) for name, value in groups.items()}

    def __call__(
        self, images: Array, groups: GroupValues | None = None, given: float | Vector = 0.0, moments: bool = False
    ) -> Output:
        shares = shares_of(given, self._channels)
        x = self.prepare(images)
        feeds = self._feed(groups)
        if self._blends:
            feeds |= {"given": np.ascontiguousarray(shares), "observe": np.array(moments)}
        self.forwarded += len(x)
        session, outputs = self._session, ["logits", "features", "signature", *(["moments"] if moments else [])]

        def run(part: np.ndarray) -> Output:
            return Output(*run_session(session, outputs, {"images": part, **feeds}, once=whole and moments))

        whole = bool((shares < 1).any())
        return run(x) if whole else in_portions(x, run)

    def folded(self, groups: GroupValues) -> Predict:
        """Another session, in the place of the one that is open. An int8 model, or one whose plain graph is not there,
        has nothing to fold and runs as it is.
        """
        return unfolded(self, groups) if self._plain is None else Folded(self, self._plain, groups)

    def prepare(self, images: Array) -> np.ndarray:
        """Pixels as sessions take them, or one sentence."""
        try:
            x = np.ascontiguousarray(images, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise MergettaError(f"Images must be an array of numbers: {error}.") from error
        check_images(x, self.metadata["channels"])
        if self.batch_size and len(x) > self.batch_size:
            raise MergettaError(
                f"A batch of {len(x)} images is larger than the {self.batch_size} this device was set to."
            )
        return x

    def _blank(self) -> dict[str, np.ndarray]:
        size = int(self.metadata["size"])
        return {"images": np.zeros((1, int(self.metadata["channels"]), size, size), np.float32)}


def read_metadata(session: Any, source: str) -> dict[str, Any]:
    header = metadata_of(session)
    if header.get("format") != FORMAT:
        raise MergettaError(f"{source} was not written by `mergetta export`: its groups are not adjustable.")
    if not isinstance(header.get("version"), int) or header["version"] > VERSION:
        raise MergettaError(
            f"{source} has a device format newer than this mergetta reads ({VERSION}): upgrade mergetta."
        )
    if header["version"] < VERSION:
        raise MergettaError(f"{source} has an older device format ({header['version']}): export it again.")
    present = {output.name for output in session.get_outputs()}
    if not set(OUTPUTS) <= present:
        raise MergettaError(f"{source} lacks the output {min(set(OUTPUTS) - present)!r}: export it again.")
    return header
