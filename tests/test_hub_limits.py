"""What a stranger, or a token that went bad, can do to a hub by the sheer amount of what it sends: little.

Memory is that of the hub's own process, asked of Linux; every case ends with a hub that answers.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mergetta.hub import frame, protocol
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store

from .hub_parts import FAMILY, family_file, free_port, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MEGABYTE = 2**20
FILES = 220
"""That the hub's process may open, so that few connections are many."""


class Process:
    """`mergetta hub serve`, with few files to open."""

    def __init__(self, folder: Path) -> None:
        settings = HubSettings.in_folder(folder)
        store = Store(settings.database, settings.blobs)
        self.secret, _ = store.create_token("device", "contribute")
        store.put_family(family_file().to_bytes(), FAMILY)
        store.close()
        self.port = free_port()
        command = [str(Path(sys.executable).with_name("mergetta")), "hub", "serve", "--folder", str(folder)]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
        deadline = time.monotonic() + 60
        while not self.healthy():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.05)
        self.before = self.peak()

    def memory(self, what: str) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{what}:\s+(\d+)", status).group(1)) / 1024  # type: ignore[union-attr]

    def peak(self) -> float:
        return self.memory("VmHWM")

    def healthy(self) -> bool:
        with suppress(OSError):
            return bool(urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/health", timeout=10).status == 200)
        return False

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def send(self, head: str, body: bytes) -> int:
        """The status of the answer, which may come before all is sent; 0 if the hub hangs up."""
        with self.connect() as connection:
            with suppress(OSError):
                connection.sendall(f"{head}\r\nHost: hub\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            with suppress(OSError):
                return int(connection.recv(12)[9:] or 0)
            return 0

    def grown(self) -> float:
        """Megabytes of memory since the start, at the worst moment; the hub must answer now."""
        assert self.healthy()
        return self.peak() - self.before


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("hub"))
    yield process
    process.process.terminate()
    process.process.wait(timeout=30)


def test_a_body_without_a_token_is_not_read(hub: Process) -> None:
    body = b"[" + b"[]," * (8 * MEGABYTE) + b"[]]"
    assert hub.send("POST /v1/reports HTTP/1.1\r\nContent-Type: application/json", body) in (0, 401)
    assert hub.grown() < 60


def test_many_mistakes_are_one(hub: Process) -> None:
    head = f"POST /v1/reports HTTP/1.1\r\nContent-Type: application/json\r\nAuthorization: Bearer {hub.secret}"
    report = {"family": FAMILY, "device": "d", "time": 0, "state": "settled", "batches": 1, "images": 1}
    much = {str(i): [] for i in range(60_000)}
    for body in ([0] * 450_000, {"a": much}, [{**report, **much}], [{**report, "weights": much}], [report] * 201):
        assert hub.send(head, json.dumps(body, separators=(",", ":")).encode()) == 422
    assert hub.send(head, b"[" + b"0," * (2 * MEGABYTE) + b"0]") in (0, 413)
    assert hub.grown() < 120


@pytest.mark.parametrize("piece", [b"x-junk: " + b"a" * 4000 + b"\r\n", b"a" * 4000], ids=["many", "one"])
@pytest.mark.parametrize("chunked", [False, True], ids=["headers", "trailers"])
def test_headers_end(hub: Process, piece: bytes, chunked: bool) -> None:
    start = b"POST /v1/reports HTTP/1.1\r\nHost: hub\r\n"
    start += b"Transfer-Encoding: chunked\r\n\r\n1\r\n0\r\n0\r\n" if chunked else b""
    with hub.connect() as connection, pytest.raises(OSError):
        connection.sendall(start + b"x-junk: ")
        for _ in range(32 * MEGABYTE // len(piece)):
            connection.sendall(piece)
    assert hub.grown() < 60


def test_requests_that_do_not_wait_for_answers(hub: Process) -> None:
    open_ones = [hub.connect() for _ in range(10)]
    for connection in open_ones:
        with suppress(OSError):
            connection.sendall(b"GET /v1/ready HTTP/1.1\r\n\r\n" * 40_000)
    assert hub.grown() < 60
    for connection in open_ones:
        connection.close()


def test_half_open_connections_push_out_themselves(hub: Process) -> None:
    open_ones = []
    for i in range(2 * FILES):
        connection = hub.connect()
        connection.sendall(b"GET / HTTP/1.1\r\n" if i % 2 else b"G")
        open_ones.append(connection)
        if i % 20 == 0:
            assert hub.healthy()
    assert hub.grown() < 60
    for connection in open_ones:
        connection.close()


def test_an_upload_waits_on_disk(hub: Process) -> None:
    head = f"POST /v1/families/{FAMILY}/experts HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {hub.secret}\r\n"
    before = hub.memory("VmRSS")
    with hub.connect() as connection:
        connection.sendall(f"{head}Content-Length: {64 * MEGABYTE}\r\n\r\n".encode())
        for _ in range(63):
            connection.sendall(bytes(MEGABYTE))
        assert hub.memory("VmRSS") < before + 20
        connection.sendall(bytes(MEGABYTE))
        assert connection.recv(12)[9:] == b"422"


def test_deadlines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(frame, "BODY_SECONDS", 0.2)
    settings = HubSettings.in_folder(tmp_path)
    store = Store(settings.database, settings.blobs)
    secret, _ = store.create_token("device", "contribute")
    store.put_family(family_file().to_bytes(), FAMILY)
    store.close()

    def answer(port: int, *pieces: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            for piece in pieces:
                connection.sendall(piece)
            with suppress(ConnectionResetError):
                return b"".join(iter(lambda: connection.recv(4096), b""))  # until it is closed
            return b""

    with serving(settings) as url:
        port = int(url.rpartition(":")[2])
        assert answer(port) == b""
        assert answer(port, b"GET /v1/health HTTP/1.1\r\n", b"Host: hub\r\n") == b""
        head = f"Host: hub\r\nAuthorization: Bearer {secret}\r\nContent-Type: application/json\r\n"
        for path in ("/v1/reports", f"/v1/families/{FAMILY}/experts"):
            late = answer(port, f"POST {path} HTTP/1.1\r\n{head}Content-Length: 9\r\n\r\n".encode(), b"[")
            assert late.startswith(b"HTTP/1.1 408") and b"too long" in late
        health = b"GET /v1/health HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n\r\n"
        assert answer(port, health).startswith(b"HTTP/1.1 200")


def test_who_leaves_during_an_upload_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = HubSettings.in_folder(tmp_path)
    store = Store(settings.database, settings.blobs)
    secret, _ = store.create_token("device", "contribute")
    store.put_family(family_file().to_bytes(), FAMILY)
    store.close()
    head = f"POST /v1/families/{FAMILY}/experts HTTP/1.1\r\nHost: hub\r\nAuthorization: Bearer {secret}\r\n"
    with serving(settings) as url, caplog.at_level(logging.INFO, "mergetta.hub"):
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=20) as connection:
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\nhalf".encode())
            time.sleep(0.2)
        deadline = time.monotonic() + 10
        while not any(" 400 " in line for line in caplog.messages) and time.monotonic() < deadline:
            time.sleep(0.01)
    (line,) = (line for line in caplog.messages if "no probe images" not in line)
    assert " 400 " in line


def test_the_access_log_says_who(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = HubSettings.in_folder(tmp_path)
    store = Store(settings.database, settings.blobs)
    secret, token = store.create_token("device", "consume")
    store.close()
    with serving(settings) as url, caplog.at_level(logging.INFO, "mergetta.hub.access"):
        request = urllib.request.Request(f"{url}/v1/families", headers={"Authorization": f"Bearer {secret}"})
        with urllib.request.urlopen(request) as answer:
            assert answer.headers["x-content-type-options"] == "nosniff"
        deadline = time.monotonic() + 10
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)
    assert re.fullmatch(rf"127.0.0.1 {token.id} GET '/v1/families' 200 [\d.]+ ms", caplog.messages[0])
    assert secret not in caplog.text
