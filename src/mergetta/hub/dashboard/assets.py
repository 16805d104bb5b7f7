"""What the pages load: our own small files, and plotly's packaged JavaScript. Nothing comes from another server."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import HTTPException, Request, Response

PLOTLY = "plotly.min.js"
KINDS = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
FOR_EVER = "public, max-age=31536000, immutable"
"""For an address that changes with its content."""
ASK_AGAIN = "no-cache"
"""Kept, but checked each time: our modules import each other by plain names."""


@dataclass(frozen=True)
class Asset:
    data: bytes
    zipped: bytes
    kind: str
    digest: str
    caching: str

    @classmethod
    def read(cls, file: Traversable, caching: str) -> Asset:
        data = file.read_bytes()
        kind = KINDS["." + file.name.rpartition(".")[2]]
        return cls(data, gzip.compress(data, 6, mtime=0), kind, hashlib.sha256(data).hexdigest()[:16], caching)

    def answer(self, request: Request) -> Response:
        headers = {
            "ETag": f'"{self.digest}"',
            "Cache-Control": self.caching,
            "Vary": "Accept-Encoding",
        }
        if self.digest in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(self.zipped, headers={**headers, "Content-Encoding": "gzip"}, media_type=self.kind)
        return Response(self.data, headers=headers, media_type=self.kind)


@cache
def own_assets() -> dict[str, Asset]:
    """By name, all in memory: no path from outside ever reaches the file system."""
    files = (resources.files(__package__) / "static").iterdir()
    return {file.name: Asset.read(file, ASK_AGAIN) for file in files if file.name.endswith(tuple(KINDS))}


@cache
def plotly() -> Asset:
    try:
        return Asset.read(resources.files("plotly") / "package_data" / PLOTLY, FOR_EVER)
    except (ModuleNotFoundError, FileNotFoundError):
        raise HTTPException(404, "plotly is not installed: `pip install 'mergetta[hub]'`.") from None


@cache
def plotly_version() -> str:
    """Part of the address that pages load plotly from, so that a new version is fetched."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("plotly")
    except PackageNotFoundError:
        return "none"
