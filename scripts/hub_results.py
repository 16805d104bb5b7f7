"""The measurements behind docs/guide/hub.md, on a hub of its own process with SQLite and files in a temporary folder.

python scripts/hub_results.py load      # requests per second, latency at half that rate, 200 uploads at once; 1 minute
python scripts/hub_results.py polls     # conditional polls by 20,000 devices with a token each; half a minute
python scripts/hub_results.py flood     # too many bodies, headers, connections, mistakes: memory and health; 1 minute
python scripts/hub_results.py scale     # one more expert among 10 … 10,000 at the size of ViT-B/16; 10 minutes, 2 GB
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mergetta import Bundle, Expert, TorchRuntime, load_family
from mergetta.family_file import FamilyFile
from mergetta.groups import learnable
from mergetta.hub.builder import Builder
from mergetta.hub.records import Variant
from mergetta.hub.settings import HubSettings, Limits
from mergetta.hub.store import Store


class RunningHub:
    """`mergetta hub serve` on a free port."""

    def __init__(self, folder: Path, **places: str) -> None:
        """With the addresses of database and blobs, if they are not below the folder."""
        self.settings = HubSettings.in_folder(folder).model_copy(update=places)
        store = self.store()
        self.token, _ = store.create_token("load", "admin")
        store.close()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self.start()

    def store(self) -> Store:
        return Store(self.settings.database, self.settings.blobs)

    def start(self) -> None:
        command = [
            str(Path(sys.executable).parent / "mergetta"),
            "hub",
            "serve",
            "--no-probe",
            "--port",
            str(self.port),
        ]
        places = ["--database", self.settings.database, "--blobs", self.settings.blobs]
        self.process = subprocess.Popen([*command, *places], stdout=subprocess.DEVNULL)
        for _ in range(2400):  # two minutes: the machine may be busy
            with contextlib.suppress(OSError):
                if self.call("GET", "/v1/health")[0] == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError("the hub does not start")

    def call(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
        request.add_header("Authorization", f"Bearer {self.token}")
        request.add_header("Content-Type", "application/octet-stream")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def bundle(self, family: str, experts: int) -> Bundle:
        """The bundle, once it holds so many experts."""
        for _ in range(600):
            status, data = self.call("GET", f"/v1/families/{family}/bundle")
            if status == 200:
                bundle = Bundle.from_bytes(data)
                if bundle.settings["experts"] == experts:
                    return bundle
            time.sleep(0.1)
        raise RuntimeError(f"no bundle of {experts} experts")

    def memory(self, what: str) -> float:
        """Megabytes, by Linux's name for them."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(what)) / 1024

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextlib.contextmanager
def running_hub() -> Iterator[RunningHub]:
    with tempfile.TemporaryDirectory() as name:
        hub = RunningHub(Path(name))
        try:
            yield hub
        finally:
            hub.stop()


def fabricated(runtime: TorchRuntime, seed: int) -> Expert:
    """Like an honest expert in size and in what it shares with the others."""
    common, own = np.random.default_rng(0), np.random.default_rng(seed + 1)
    groups = dict(runtime.groups)
    for name in learnable(groups):
        size = groups[name].shape
        groups[name] = groups[name] + 0.02 * (common.normal(size=size) + own.normal(size=size))
    provenance = {"method": "roid", "samples": 4000}
    return Expert(groups, runtime.family, f"domain-{seed}", provenance=provenance)


async def answer_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> tuple[int, int]:
    """Status and length of the body."""
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head[9:12])
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    if length and status != 304:
        await reader.readexactly(length)
    return status, length


async def hammer(
    port: int, requests: Sequence[bytes], seconds: float, connections: int, rate: float | None = None
) -> dict[str, Any]:
    """As many requests as go through (or `rate` per second), in turn; latency counts from when one was due."""
    latencies: list[float] = []
    turn = itertools.cycle(requests)
    statuses: dict[str, int] = {}
    start = time.perf_counter()

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = 0
        while (now := time.perf_counter()) - start < seconds:
            due = now
            if rate is not None:
                due = start + (sent * connections + number) / rate
                await asyncio.sleep(max(0.0, due - now))
            try:
                status, _ = await answer_of(reader, writer, next(turn))
            except (OSError, asyncio.IncompleteReadError):
                statuses["broken"] = statuses.get("broken", 0) + 1
                return
            latencies.append(time.perf_counter() - due)
            statuses[str(status)] = statuses.get(str(status), 0) + 1
            sent += 1
        writer.close()

    await asyncio.gather(*(one(number) for number in range(connections)))
    passed = time.perf_counter() - start
    return {
        "per_second": round(len(latencies) / passed),
        "p50_ms": round(1000 * float(np.percentile(latencies, 50)), 1),
        "p99_ms": round(1000 * float(np.percentile(latencies, 99)), 1),
        "statuses": statuses,
    }


async def upload_all(port: int, requests: list[bytes]) -> list[int]:
    """All at once, each on a connection of its own."""

    async def one(request: bytes) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        status, _ = await answer_of(reader, writer, request)
        writer.close()
        return status

    return await asyncio.gather(*(one(request) for request in requests))


def request_of(method: str, path: str, token: str, headers: dict[str, str] | None = None, body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: hub", f"Authorization: Bearer {token}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    lines += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def load() -> None:
    runtime = TorchRuntime(load_family("fashion-bn"))
    family = runtime.family
    path = f"/v1/families/{family}/bundle"
    with running_hub() as hub:
        assert hub.call("PUT", f"/v1/families/{family}", FamilyFile.of_runtime(runtime).to_bytes())[0] == 201
        contents = [fabricated(runtime, seed).to_bytes() for seed in range(200)]
        sent = [request_of("POST", f"/v1/families/{family}/experts", hub.token, None, data) for data in contents]
        start = time.perf_counter()
        statuses = asyncio.run(upload_all(hub.port, [*sent, *sent[:50]]))
        seconds = time.perf_counter() - start
        bundle = hub.bundle(family, 200)
        stored = {e["id"] for e in json.loads(hub.call("GET", f"/v1/families/{family}/experts?limit=1000")[1])}
        print(
            f"200 uploads at once and 50 of them twice: {statuses.count(201)} new, {statuses.count(200)} known, "
            f"{len(statuses) - statuses.count(201) - statuses.count(200)} errors, in {seconds:.1f} s; "
            f"stored {len(stored)}, none lost: {stored == {hashlib.sha256(d).hexdigest() for d in contents}}",
            flush=True,
        )
        data = bundle.to_bytes()
        etag = {"If-None-Match": f'"{hashlib.sha256(data).hexdigest()}"'}
        for name, headers in (("conditional (304)", etag), (f"full ({len(data):,} bytes)", {})):
            request = request_of("GET", path, hub.token, headers)
            asyncio.run(hammer(hub.port, [request], 1, 4))
            most = asyncio.run(hammer(hub.port, [request], 8, 16))
            half = asyncio.run(hammer(hub.port, [request], 8, 16, most["per_second"] / 2))
            print(f"{name}: at most {most}\n{' ' * len(name)}  at half: {half}", flush=True)


def polls(tokens: str = "20000", seconds: str = "20") -> None:
    """A fleet that asks for what it already has, each device with a token of its own, in turn."""
    runtime = TorchRuntime(load_family("fashion-bn"))
    family = runtime.family
    with tempfile.TemporaryDirectory() as name:
        settings = HubSettings.in_folder(Path(name), probe=False)
        store = Store(settings.database, settings.blobs)
        with store.database.write() as connection:  # one transaction for all of them
            store.database.write = lambda: contextlib.nullcontext(connection)  # type: ignore[method-assign]
            secrets = [store.create_token(f"device-{i}", "consume", 50)[0] for i in range(int(tokens))]
        store.close()
        hub = RunningHub(Path(name))
        try:
            hub.call("PUT", f"/v1/families/{family}", FamilyFile.of_runtime(runtime).to_bytes())
            hub.call("POST", f"/v1/families/{family}/experts", fabricated(runtime, 0).to_bytes())
            etag = {"If-None-Match": f'"{hashlib.sha256(hub.bundle(family, 1).to_bytes()).hexdigest()}"'}
            requests = [request_of("GET", f"/v1/families/{family}/current", secret, etag) for secret in secrets]
            for turn in ("first", "second"):
                print(turn, asyncio.run(hammer(hub.port, requests, float(seconds), 32)), flush=True)
        finally:
            hub.stop()


def flood(wanted: str = "") -> None:
    """What a stranger can send, and a consumer's token; health is asked for throughout, on connections of its own."""

    def send(hub: RunningHub, head: str, *pieces: bytes) -> str:
        with socket.create_connection(("127.0.0.1", hub.port), timeout=60) as connection:
            try:
                connection.sendall(head.encode())
                for piece in pieces:
                    connection.sendall(piece)
                return connection.recv(12).decode()[9:] or "closed"
            except OSError:
                return "closed"

    def post(token: str, body: bytes) -> tuple[str, bytes]:
        lines = ("POST /v1/reports HTTP/1.1", "Host: hub", f"Authorization: Bearer {token}")
        lines += ("Content-Type: application/json", f"Content-Length: {len(body)}")
        return "\r\n".join([*lines, "", ""]), body

    half_open: list[socket.socket] = []

    def connect(hub: RunningHub) -> str:
        for _ in range(1100):
            half_open.append(socket.create_connection(("127.0.0.1", hub.port), timeout=5))
            half_open[-1].sendall(b"GET / HTTP/1.1\r\n")
        return "held"

    def stop_short(hub: RunningHub) -> str:
        store, family = hub.store(), FamilyFile("f", {"norm": np.ones(4, np.float32)})
        store.put_family(family.to_bytes(), "f")
        for number in range(4):
            secret, _ = store.create_token(f"slow-{number}", "contribute")
            half_open.append(socket.create_connection(("127.0.0.1", hub.port), timeout=60))
            head = request_of("POST", "/v1/families/f/experts", secret, {"Content-Length": str(61 * 2**20)})
            half_open[-1].sendall(head)
            for _ in range(60):
                half_open[-1].sendall(bytes(2**20))
        store.close()
        return "held"

    zeros, lists = b"[" + b"0," * 2**21 + b"0]", b"[" + b"[]," * (20 * 2**20) + b"[]]"
    headers = [b"x-junk: " + b"a" * 60_000 + b"\r\n"] * 5000
    cases = {
        "60 MiB of [[],…] without a token": lambda hub: send(hub, *post("none", lists)),
        "300 MiB of headers": lambda hub: send(hub, "GET / HTTP/1.1\r\n", *headers),
        "1,100 half-open connections": connect,
        "4 uploads of 61 MiB that stop short": stop_short,
        "4 MiB of [0,…] with a token": lambda hub: send(hub, *post(hub.token, zeros)),
        "1 MiB of [0,…] with a token": lambda hub: send(hub, *post(hub.token, zeros[: 2**20 - 2] + b"0]")),
    }
    for name, attack in cases.items():
        if wanted not in name:
            continue
        with running_hub() as hub, concurrent.futures.ThreadPoolExecutor(1) as pool:
            before, slowest = hub.memory("VmHWM"), 0.0
            running = pool.submit(attack, hub)
            after = 0
            while after < 5:
                start = time.perf_counter()
                try:
                    healthy = hub.call("GET", "/v1/health")[0] == 200
                except OSError:
                    healthy = False
                slowest = max(slowest, time.perf_counter() - start if healthy else np.inf)
                after += running.done()
                time.sleep(0.1)
            peak = hub.memory("VmHWM")
            print(f"{name}: {running.result()}, {before:.0f} to {peak:.0f} MB, health {slowest:.2f} s", flush=True)
            while half_open:
                half_open.pop().close()


def scale(most: str = "10000", tokens: str = "100") -> None:
    """Upload one more expert and publish the new bundle: store and builder as in the hub, without HTTP. Seconds are of
    the processor, so that what else runs on the machine does not count; waiting for the disk does not either.
    """
    base = {f"norm{i}": np.ones(768, np.float32) for i in range(50)}
    rng = np.random.default_rng(0)
    directions = rng.normal(size=(15, 50, 768))

    def expert(seed: int) -> bytes:
        own = np.random.default_rng(seed + 1)
        task = 0.01 * (directions[seed % 15] + directions.mean(0) + 0.5 * own.normal(size=(50, 768)))
        groups = {name: base[name] + task[i] for i, name in enumerate(base)}
        provenance = {"method": "roid", "samples": 4000}
        return Expert(groups, "vit", f"domain-{seed % 15}", provenance=provenance).to_bytes()

    def token(number: int) -> str:
        return f"token-{number % int(tokens)}"

    with tempfile.TemporaryDirectory() as folder:
        settings = HubSettings.in_folder(Path(folder), probe=False)
        store = Store(settings.database, settings.blobs, limits=Limits(experts_per_token=10**6))
        store.put_family(FamilyFile("vit", base).to_bytes(), "vit")
        file = store.family_file("vit")
        builder = Builder(store, settings)
        count = 0
        for wanted in (10, 30, 100, 300, 1000, 3000, 10000):
            if wanted > int(most):
                break
            while count < wanted:
                store.add_expert("vit", expert(count), token(count), file)
                count += 1
            start = time.process_time()
            builder.build_all()
            caught_up = time.process_time() - start
            seconds = []
            for _ in range(3):
                data = expert(count)
                count += 1
                start = time.process_time()
                store.add_expert("vit", data, token(count), file)
                uploaded = time.process_time()
                builder.build_all()
                seconds.append((uploaded - start, time.process_time() - uploaded))
            upload, build = np.median(seconds, axis=0)
            current = store.current("vit", Variant())
            assert current is not None and current.experts == count
            status = Path("/proc/self/status").read_text()
            peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024
            print(
                f"{count:6} experts: upload {upload:.3f} s, screen + merge + publish {build:.2f} s (catching up: "
                f"{caught_up:.1f} s), pool {builder.memory / 2**20:.0f} MB, peak {peak:.0f} MB",
                flush=True,
            )


if __name__ == "__main__":
    {"load": load, "polls": polls, "flood": flood, "scale": scale}[sys.argv[1]](*sys.argv[2:])
