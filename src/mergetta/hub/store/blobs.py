"""Content-addressed bytes: a blob is named by its SHA-256, written once, never changed."""

from __future__ import annotations

import contextlib
import hashlib
import re
from datetime import UTC, datetime
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO, cast

import fsspec

from mergetta.errors import MergettaError
from mergetta.files import make_durable, write_atomically

DIGEST = re.compile(r"[0-9a-f]{64}")
SPOOLED = 2**18
"""Bytes of what is on its way in that are held in memory."""


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Blobs:
    """A folder, or anything fsspec reaches. What `put` has returned from is durable.

    On a local disk that takes fsync and a rename, which fsspec does not do; object stores do it by themselves.
    """

    def __init__(self, address: str) -> None:
        self.local = "://" not in address
        self.root = str(Path(address).absolute()) if self.local else address.rstrip("/")
        options = {"skip_instance_cache": True}  # a cached one would keep the credentials of its first use
        try:
            self._system: Any = fsspec.core.url_to_fs(self.root, **options)[0]
        except (ValueError, ImportError) as error:
            raise MergettaError(f"Blobs cannot be kept at {address!r}: {error}.") from error

    def path(self, digest: str) -> str:
        if not DIGEST.fullmatch(digest):
            raise ValueError(f"{digest!r} is not a digest")
        return f"{self.root}/{digest[:2]}/{digest}"

    def put(self, data: bytes, digest: str | None = None) -> str:
        """With the digest, if it is known."""
        digest = digest or digest_of(data)
        path = self.path(digest)
        if self.local:
            if not self._holds(Path(path), data):
                write_atomically(path, data)
                make_durable(Path(path).parent)
                make_durable(Path(self.root))  # its entry for the folder that may be new
        else:
            self._system.pipe_file(path, data)
        return digest

    def spool(self) -> BinaryIO:
        """For what is on its way in: if it is large, a file on disk without a name, of which a crash leaves nothing."""
        if self.local:
            Path(self.root).mkdir(parents=True, exist_ok=True)
        return cast(BinaryIO, SpooledTemporaryFile(SPOOLED, dir=self.root if self.local else None))

    def _holds(self, path: Path, data: bytes) -> bool:
        """Whether the very same content is there already; what is damaged is written again."""
        try:
            return path.stat().st_size == len(data) and path.read_bytes() == data
        except OSError:
            return False

    def delete(self, digest: str) -> None:
        self.delete_file(self.path(digest))

    def delete_file(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(path)

    def paths(self) -> dict[str, str]:
        """Of all blobs, by digest; what a crash has left half written is there by another name."""
        return {path.rpartition("/")[2]: path for path in self._system.find(self.root)}

    def age(self, path: str) -> float:
        """Seconds since it was written."""
        written: datetime = self._system.modified(path)
        return (datetime.now(UTC) - written).total_seconds()

    def get(self, digest: str) -> bytes:
        """FileNotFoundError if there is none; ValueError if what is there is not what was put."""
        data = bytes(self._system.cat_file(self.path(digest)))
        if digest_of(data) != digest:
            raise ValueError(f"the blob {digest} is damaged")
        return data
