"""What the hub's tests share: a small family, honest experts, poisoned ones, and real servers where installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest

from mergetta import Expert
from mergetta.family_file import FamilyFile
from mergetta.hub.settings import HubSettings

SIZES = {"stem.weight": 8, "stem.bias": 8, "block1.weight": 16, "block1.bias": 16}
FAMILY = "tiny-0123456789abcdef"
"""What experts learn; `BASE` also has the moments of one BatchNorm layer."""
BASE = {
    **{name: np.linspace(0.5, 1.5, size).astype(np.float32) for name, size in SIZES.items()},
    "stem.running_mean": np.linspace(-1, 1, 8).astype(np.float32),
    "stem.running_var": np.linspace(0.5, 2, 8).astype(np.float32),
}
SHARED = np.random.default_rng(99).normal(size=sum(SIZES.values()))


def new_hub(folder: Path) -> None:
    """As `mergetta hub serve` leaves it after its first start."""
    from mergetta.hub.store import Store

    settings = HubSettings.in_folder(folder)
    Store(settings.database, settings.blobs).close()


def family_file(family: str = FAMILY) -> FamilyFile:
    return FamilyFile(family, BASE, ("block1.weight", "block1.bias"), "two blocks", {"mean": [0.5]})


def task_vector(seed: int) -> np.ndarray:
    """Half of it is what all honest experts have in common."""
    return 0.1 * (SHARED + np.random.default_rng(seed).normal(size=SHARED.size))


def expert_of(
    vector: np.ndarray, domain: str = "fog", family: str = FAMILY, method: str = "roid", apart: float = 0.3
) -> Expert:
    """Its moments are `apart` standard deviations and powers of e from the source's; three of them, which the domain
    chooses, on the other side than most.
    """
    ends = np.cumsum(list(SIZES.values()))[:-1]
    groups = {name: BASE[name] + part for name, part in zip(SIZES, np.split(vector, ends), strict=True)}
    signs = np.ones(16)
    signs[np.random.default_rng(crc32(domain.encode())).choice(16, 3, replace=False)] = -1
    signs = signs.reshape(2, 8)
    groups["stem.running_mean"] = BASE["stem.running_mean"] + apart * signs[0] * np.sqrt(BASE["stem.running_var"] / 2)
    groups["stem.running_var"] = BASE["stem.running_var"] * np.exp(apart * signs[1] / np.sqrt(2))
    signature = np.stack([np.zeros(3), np.ones(3)])
    provenance = {"method": method, "samples": 4000, "seed": 0}
    return Expert(groups, family, domain, signature, provenance=provenance)


def honest(seed: int, domain: str | None = None) -> Expert:
    return expert_of(task_vector(seed), domain or f"domain-{seed}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Postgres:
    """A PostgreSQL server of its own, as a user that is not root (it refuses to be)."""

    def __init__(self, folder: Path) -> None:
        programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        if not programs or not shutil.which("runuser"):
            pytest.skip("PostgreSQL's server is not installed")
        pytest.importorskip("psycopg")
        self.programs, self.data, port = programs[-1], folder / "pg", free_port()
        self.prefix: list[str] = []
        self.data.mkdir()
        if os.geteuid() == 0:
            shutil.chown(self.data, "postgres", "postgres")
            for parent in self.data.parents:  # pytest's own, which only root may enter
                if "pytest-" in str(parent):
                    parent.chmod(parent.stat().st_mode | 0o055)
            self.prefix = ["runuser", "-u", "postgres", "--"]
        self.url = f"postgresql://mergetta@127.0.0.1:{port}/postgres"
        self.options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
        self.run("initdb", "-A", "trust", "-U", "mergetta", "--no-sync")

    def run(self, program: str, *arguments: str) -> None:
        command = [*self.prefix, str(self.programs / program), "-D", str(self.data), *arguments]
        subprocess.run(command, check=True, capture_output=True, cwd="/")

    def start(self) -> None:
        self.run("pg_ctl", "-o", self.options, "-l", str(self.data / "log"), "-w", "start")

    def stop(self) -> None:
        self.run("pg_ctl", "-m", "immediate", "stop")


@contextmanager
def postgres(folder: Path) -> Iterator[Postgres]:
    server = Postgres(folder)
    server.start()
    try:
        yield server
    finally:
        with suppress(subprocess.CalledProcessError):  # it may be gone already
            server.stop()


class S3:
    """An S3 server (moto's) with one bucket."""

    url = "s3://mergetta/hub"

    def __init__(self) -> None:
        self.module = pytest.importorskip("moto.server")
        pytest.importorskip("s3fs")
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self.server = self.module.ThreadedMotoServer(port=self.port, verbose=False)
        self.server.start()

    def stop(self) -> None:
        self.server.stop()


@contextmanager
def s3() -> Iterator[S3]:
    server = S3()
    given = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            import fsspec

            with suppress(FileExistsError):  # moto remembers for as long as the process lives
                fsspec.filesystem("s3", skip_instance_cache=True).mkdir("mergetta")
            yield server
    finally:
        server.stop()


@contextmanager
def serving(settings: HubSettings) -> Iterator[str]:
    """A hub on a free port, in a thread of this process."""
    import uvicorn

    from mergetta.hub.app import create_app
    from mergetta.hub.protocol import server_options

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=port, **server_options()))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.started
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
