"""What the hub's tests share: a small family, honest experts, poisoned ones, and real servers where installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from mergetta import Expert
from mergetta.family_file import FamilyFile
from mergetta.hub.settings import HubSettings

SIZES = {"stem.weight": 8, "stem.bias": 8, "block1.weight": 16, "block1.bias": 16}
FAMILY = "tiny-0123456789abcdef"
BASE = {name: np.linspace(0.5, 1.5, size).astype(np.float32) for name, size in SIZES.items()}
SHARED = np.random.default_rng(99).normal(size=sum(SIZES.values()))


def family_file(family: str = FAMILY) -> FamilyFile:
    return FamilyFile(family, BASE, ("block1.weight", "block1.bias"), "two blocks", {"mean": [0.5]})


def task_vector(seed: int) -> np.ndarray:
    """Half of it is what all honest experts have in common."""
    return 0.1 * (SHARED + np.random.default_rng(seed).normal(size=SHARED.size))


def expert_of(vector: np.ndarray, domain: str = "fog", family: str = FAMILY, method: str = "roid") -> Expert:
    ends = np.cumsum(list(SIZES.values()))[:-1]
    groups = {name: BASE[name] + part for name, part in zip(SIZES, np.split(vector, ends), strict=True)}
    statistics = np.stack([np.zeros(3), np.ones(3)])
    return Expert(groups, family, domain, statistics, {"method": method, "samples": 4000, "seed": 0})


def honest(seed: int, domain: str | None = None) -> Expert:
    return expert_of(task_vector(seed), domain or f"domain-{seed}")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A PostgreSQL server of its own, as a user that is not root (it refuses to be)."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if Path("/usr/lib/postgresql").is_dir() else []
    if not programs or not shutil.which("runuser"):
        pytest.skip("PostgreSQL's server is not installed")
    pytest.importorskip("psycopg")
    data, port = folder / "pg", free_port()
    data.mkdir()
    prefix: list[str] = []
    if os.geteuid() == 0:
        shutil.chown(data, "postgres", "postgres")
        for parent in data.parents:
            if parent.stat().st_uid == 0 and parent != Path("/") and str(parent).startswith(str(folder.parents[1])):
                parent.chmod(parent.stat().st_mode | 0o055)
        prefix = ["runuser", "-u", "postgres", "--"]
    run = lambda *command: subprocess.run([*prefix, *command], check=True, capture_output=True, cwd="/")  # noqa: E731
    run(str(programs[-1] / "initdb"), "-D", str(data), "-A", "trust", "-U", "mergetta", "--no-sync")
    options = f"-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c fsync=off"
    run(str(programs[-1] / "pg_ctl"), "-D", str(data), "-o", options, "-l", str(data / "log"), "-w", "start")
    try:
        yield f"postgresql://mergetta@127.0.0.1:{port}/postgres"
    finally:
        run(str(programs[-1] / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")


@contextmanager
def s3() -> Iterator[str]:
    """An S3 server (moto's) with one bucket."""
    server_module = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    server = server_module.ThreadedMotoServer(port=free_port(), verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    given = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        import fsspec

        fsspec.filesystem("s3", skip_instance_cache=True).mkdir("mergetta")
        yield "s3://mergetta/hub"
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextmanager
def serving(settings: HubSettings) -> Iterator[str]:
    """A hub on a free port, in a thread of this process."""
    import uvicorn

    from mergetta.hub.app import create_app

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(create_app(settings), port=port, log_level="warning"))
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
