"""A hub as a device sees it, able to misbehave, and what tests of the device's side share."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mergetta import Bundle, build_bundle

from .numpy_runtime import NumpyRuntime

FAMILY = NumpyRuntime.family
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()


def make_bundle(seed: int = 0, family: str = FAMILY, **options: Any) -> Bundle:
    rng, groups = np.random.default_rng(seed), NumpyRuntime().groups
    experts = [{n: v + 0.3 * rng.normal(size=v.shape) for n, v in groups.items()} for _ in range(4)]
    return build_bundle(groups, experts, family=family, **options)


def id_of(bundle: Bundle) -> str:
    return hashlib.sha256(bundle.to_bytes()).hexdigest()


class StubHub:
    """As much of a hub as a device sees, and able to misbehave."""

    def __init__(self) -> None:
        self.bundle: bytes | None = make_bundle().to_bytes()
        self.announced: str | None = None
        self.variant: str | None = None
        """What it says its bundle leaves out, if that is not what was asked for."""
        self.signature: str | None = None
        self.key: str | None = None
        self.misbehave: list[int] = []
        """Statuses to answer with, once each, before answering properly; −1 breaks off in the body."""
        self.retry_after = "0"
        self.requests: list[tuple[str, str, int]] = []
        self.queries: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.families: dict[str, bytes] = {}
        self.experts: dict[str, bytes] = {}
        self.reports: list[dict[str, Any]] = []
        self.connections: list[socket.socket] = []
        self.port = 0
        self.up()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def offer(self, bundle: Bundle) -> str:
        self.bundle = bundle.to_bytes()
        return id_of(bundle)

    def up(self) -> None:
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                hub.connections.append(self.connection)

            def log_message(self, *arguments: object) -> None: ...

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                hub.tokens.add(self.headers["Authorization"])
                status, headers, data = hub.answer(self.command, self.path, body, self.headers["If-None-Match"])
                hub.requests.append((self.command, self.path, status))
                self.send_response(max(status, 200))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) + 10 * (status < 0)))
                self.end_headers()
                self.wfile.write(data)
                self.close_connection |= status < 0

            do_GET = do_PUT = do_POST = handle_any

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = allow_reuse_address = True

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def down(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        while self.connections:
            with contextlib.suppress(OSError):  # closed by the other side
                self.connections.pop().shutdown(socket.SHUT_RDWR)

    def answer(self, method: str, path: str, body: bytes, etag: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.misbehave:
            return self.misbehave.pop(0), {"Retry-After": self.retry_after}, detail("busy")
        parts = urlsplit(path)
        match method, parts.path.strip("/").split("/")[1:]:
            case "GET", ["families"]:
                return 200, {}, json.dumps([{"id": family} for family in self.families]).encode()
            case "PUT", ["families", family]:
                self.families[family] = body
                return 201, {}, b"{}"
            case "GET", ["families", family, "file"] if family in self.families:
                return 200, {}, self.families[family]
            case "GET", ["families", family, "experts"]:
                return 200, {}, b"[]"
            case "POST", ["families", family, "experts"]:
                if family not in self.families:
                    return 404, {}, detail(f"There is no family '{family}'.")
                id = hashlib.sha256(body).hexdigest()
                status = 200 if id in self.experts else 201
                self.experts[id] = body
                return status, {}, json.dumps({"id": id, "state": "active", "domain": "fog"}).encode()
            case "GET", ["families", family, "current"]:
                self.queries = parse_qsl(parts.query)
                return self.answer_current(family, etag)
            case "GET", ["blobs", id] if self.bundle and id == self.id:
                return 200, {} if self.signature is None else {"X-Mergetta-Signature": self.signature}, self.bundle
            case "POST", ["reports"]:
                reports = json.loads(body)
                if any("poison" in report for report in reports):
                    return 422, {}, detail([{"msg": "poison"}])
                self.reports += reports
                return 201, {}, b"{}"
            case "GET", ["key"] if self.key:
                return 200, {}, json.dumps({"algorithm": "ed25519", "key": self.key}).encode()
        return 404, {}, detail("There is no such thing.")

    @property
    def id(self) -> str:
        """What the hub says its bundle is."""
        return self.announced or hashlib.sha256(self.bundle or b"").hexdigest()

    def answer_current(self, family: str, etag: str | None) -> tuple[int, dict[str, str], bytes]:
        if self.bundle is None:
            return 404, {}, detail("There is no bundle yet.")
        if etag == f'"{self.id}"':
            return 304, {"ETag": etag}, b""
        variant = self.variant if self.variant is not None else "v" * bool(self.queries)
        data = json.dumps({"family": family, "bundle": self.id, "variant": variant}).encode()
        signed = {} if self.signature is None else {"X-Mergetta-Signature": base64.b64encode(KEY.sign(data)).decode()}
        return 200, {"ETag": f'"{self.id}"', **signed}, data


def detail(text: object) -> bytes:
    return json.dumps({"detail": text}).encode()


def until(condition: Callable[[], object], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def cached(folder: Path) -> set[str]:
    return {path.stem.removeprefix("bundle-") for path in (folder / "hub").glob("bundle-*.safetensors")}
