"""Files as they travel between machines: safetensors with one JSON header, written atomically, read with suspicion.

A mergetta file is an ordinary safetensors file whose metadata has a single key `mergetta`: a JSON object with
`format`, `version` and whatever the format adds. (A single key also keeps the bytes deterministic.)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from mergetta.errors import MergettaError

if TYPE_CHECKING:
    from hashlib import _Hash

Tensors = dict[str, NDArray[Any]]
MAX_HEADER = 16 * 2**20
UNKNOWN, SAFETENSORS = "of another kind", "a safetensors file"
BEGINNINGS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"BM": "a BMP image",
    b"RIFF": "a WebP image or an AVI video",
    b"PK\x03\x04": "a zip file, as npz files and PyTorch's checkpoints are",
    b"\x93NUMPY": "an npy file",
    b"\x80": "a pickle",
}
"""How files begin that are given for another kind by mistake."""


def sha256(data: bytes) -> _Hash:
    """A hash of the standard library, which takes 3.4 MB as soon as it is imported: not every device ever hashes."""
    import hashlib

    return hashlib.sha256(data)


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write all of `data` or nothing: temporary file beside the target, fsync, rename."""
    path = Path(path)
    if not path.name or path.is_dir():
        raise MergettaError(f"Cannot write {path}: it is a folder.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise MergettaError(f"Cannot write {path}: {error.strerror or error}.") from error


def make_durable(folder: Path) -> None:
    """Let what was renamed into or removed from a folder survive a power cut, where the system can do that."""
    with contextlib.suppress(OSError):  # Windows opens no folders
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def read_bytes(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise MergettaError(f"Cannot read {path}: {error.strerror or error}.") from error


def read_start(path: str | Path) -> bytes:
    """Enough of a file to know its kind."""
    try:
        with Path(path).open("rb") as file:
            return file.read(16)
    except OSError as error:
        raise MergettaError(f"Cannot read {path}: {error.strerror or error}.") from error


def looks_like(start: bytes) -> str:
    """What a file is by its first bytes."""
    if not start:
        return "empty"
    if start[8:10] == b'{"':
        return SAFETENSORS
    return next((kind for sign, kind in BEGINNINGS.items() if start.startswith(sign)), UNKNOWN)


def encode(tensors: Mapping[str, NDArray[Any]], format: str, version: int, header: Mapping[str, Any]) -> bytes:
    """The bytes of a mergetta file; the same content always gives the same bytes."""
    try:
        text = json.dumps({"format": format, "version": version, **header}, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise MergettaError(f"The header of this {format} cannot be written as JSON: {error}.") from error
    contiguous = {name: np.ascontiguousarray(tensors[name]) for name in sorted(tensors)}
    return safetensors.numpy.save(contiguous, metadata={"mergetta": text})


def decode(
    data: bytes, format: str, version: int, source: str = "the data", anew: str = "make it anew"
) -> tuple[Tensors, dict[str, Any]]:
    """Tensors and header of a mergetta file, or one sentence on why they cannot be used; `anew` says what to do with an
    older one.
    """
    header = read_header(data, source)
    found = header.get("format")
    if found != format:
        raise MergettaError(f"{source} is a {found!r} file, but a {format!r} file is needed here.")
    number = header.get("version")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise MergettaError(f"{source} has no valid format version ({number!r}).")
    if number > version:
        raise MergettaError(
            f"{source} has {format} version {number}, newer than this mergetta reads ({version}): upgrade mergetta."
        )
    if number < version:
        raise MergettaError(
            f"{source} has {format} version {number}, older than this mergetta reads ({version}): {anew}."
        )
    try:
        tensors = safetensors.numpy.load(data)
    except Exception as error:  # safetensors raises its own type, and KeyError on types NumPy lacks
        raise MergettaError(f"{source} is truncated or damaged: {error}.") from error
    for name, tensor in tensors.items():
        if tensor.dtype.kind == "f" and not np.isfinite(tensor).all():
            raise MergettaError(f"{source} holds NaN or infinite values in {name!r}.")
    return tensors, header


def read_header(data: bytes, source: str = "the data") -> dict[str, Any]:
    """The JSON header of a mergetta file of any format, without touching its tensors."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > MAX_HEADER or size > len(data) - 8:
        kind = looks_like(data)
        told = (
            "truncated, or not a safetensors file"
            if kind in (UNKNOWN, SAFETENSORS)
            else f"not a safetensors file: it is {kind}"
        )
        raise MergettaError(f"{source} is {told}.")
    try:
        outer = json.loads(data[8 : 8 + size])
        header = json.loads(outer["__metadata__"]["mergetta"], parse_constant=refuse)
    except (KeyError, TypeError):
        raise MergettaError(f"{source} is a safetensors file, but not one written by mergetta.") from None
    except (ValueError, RecursionError):
        raise MergettaError(f"{source} is damaged, or not a safetensors file.") from None
    if not isinstance(header, dict):
        raise MergettaError(f"{source} has a mergetta header that is not a JSON object.")
    return header


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def expect_names(header: Mapping[str, Any], key: str, source: str) -> list[str]:
    """`header[key]`, checked to be a list of different strings."""
    names = header.get(key)
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names) or len(set(names)) < len(names):
        raise MergettaError(f"{source} has no valid list of names {key!r} in its header.")
    return names


def expect(header: Mapping[str, Any], key: str, kind: type | tuple[type, ...], source: str) -> Any:
    """`header[key]`, checked to be of the given JSON type."""
    value = header.get(key)
    if not isinstance(value, kind):
        raise MergettaError(f"{source} has no valid {key!r} in its header.")
    return value
