"""What is shipped to run a hub with: it parses, names options that exist, and has the hub's own limits.

No test needs a container engine; where systemd is at hand, it checks its unit, and where nginx is, it serves a hub.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from mergetta.device.hub_client import HubClient, HubError
from mergetta.hub import frame, protocol
from mergetta.hub.settings import HubSettings

from .hub_parts import FAMILY, family_file, free_port, honest
from .test_cli import mergetta
from .test_hub_process import Serving, self_signed, wait_for_bundle

ROOT = Path(__file__).parents[1]
NGINX = (ROOT / "deploy" / "nginx.conf").read_text()
UNIT = ROOT / "deploy" / "mergetta-hub.service"
INSTRUCTIONS = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def compose() -> dict:
    return dict(yaml.safe_load((ROOT / "compose.yaml").read_text()))


def directive(name: str, text: str = NGINX) -> list[str]:
    return re.findall(rf"^\s*{name} ([^;]+);", text, re.MULTILINE)


def test_dockerfile() -> None:
    found = instructions()
    assert {word for word, _ in found} <= INSTRUCTIONS and found[0][0] == "FROM"
    assert [rest for word, rest in found if word == "USER"] == ["mergetta"]
    for word, rest in found:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)
            ignored = (ROOT / ".dockerignore").read_text().splitlines()
            assert all(f"!{source}" in ignored for source in sources)
        if word in ("ENTRYPOINT", "CMD"):
            assert isinstance(yaml.safe_load(rest), list)


def test_compose() -> None:
    parts = compose()
    services = parts["services"]
    assert set(services) == {"proxy", "hub", "database", "blobs", "bucket"}
    for name, service in services.items():
        assert set(service["networks"]) <= set(parts["networks"]), name
        assert ("image" in service) != ("build" in service)
        assert ":" in service.get("image", ":"), "a version, not whatever is the latest"
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.split("}")[-1] if volume.startswith("$") else volume.split(":")[0]
            assert volume.startswith("$") or source in parts["volumes"] or (ROOT / source).exists(), volume
    assert [name for name, service in services.items() if "ports" in service] == ["proxy"]
    assert parts["networks"]["back"]["internal"]
    text = (ROOT / "compose.yaml").read_text()
    assert not re.search(r"(PASSWORD|SECRET\w*): \"?[^$\s\"]", text), "no secret has a default"


def served() -> list[list[str]]:
    """Every command line of `hub serve` in the shipped files."""
    docker = next(yaml.safe_load(rest) for word, rest in instructions() if word == "CMD")
    (unit,) = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)
    return [docker, compose()["services"]["hub"]["command"], shlex.split(unit)[1:]]


@pytest.mark.parametrize("command", served(), ids=["Dockerfile", "compose", "systemd"])
def test_options_exist(command: list[str]) -> None:
    assert command[:2] == ["hub", "serve"]
    known = mergetta("hub", "serve", "--help").stdout
    assert all(option in known for option in command if option.startswith("--"))


def test_the_proxy_has_the_limits_of_the_hub() -> None:
    assert NGINX.count("{") == NGINX.count("}")
    sizes = {"k": 2**10, "m": 2**20}
    small, large = (int(size[:-1]) * sizes[size[-1]] for size in directive("client_max_body_size"))
    assert (small, large) == (frame.LARGEST_JSON, HubSettings().max_upload)
    number, size = directive("large_client_header_buffers")[0].split()
    assert int(number) * int(size[:-1]) * sizes[size[-1]] == protocol.LONGEST_HEAD
    assert directive("client_header_timeout") == [f"{protocol.HEAD_SECONDS:.0f}s"]
    assert directive("client_body_timeout") == [f"{frame.BODY_SECONDS:.0f}s"]
    (connections,) = re.findall(r"max_conns=(\d+)", NGINX)
    assert int(connections) < protocol.MOST_CONNECTIONS
    assert "max-age" in directive("add_header")[0] and directive("gzip") == ["off"]


@pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
def test_a_hub_behind_the_proxy(tmp_path: Path) -> None:
    """The shipped file as it is, but for addresses and paths."""
    hub, port = Serving(tmp_path / "hub"), free_port()
    certificate, key = self_signed(tmp_path)
    changes = {
        "hub:8321": f"127.0.0.1:{hub.port}",
        "listen 443": f"listen 127.0.0.1:{port}",
        "/etc/ssl/hub/hub.pem": str(certificate),
        "/etc/ssl/hub/hub.key": str(key),
        "/run/nginx.pid": str(tmp_path / "pid"),
        "/dev/stdout": str(tmp_path / "access.log"),
        "/dev/stderr": str(tmp_path / "error.log"),
    }
    text = NGINX
    for shipped, here in changes.items():
        assert shipped in text
        text = text.replace(shipped, here)
    (tmp_path / "nginx.conf").write_text(text)
    command = ["nginx", "-c", str(tmp_path / "nginx.conf"), "-g", "daemon off;"]
    proxy = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        client = HubClient(f"https://127.0.0.1:{port}", hub.token, ca=certificate)
        client.register_family(family_file().to_bytes())
        for i in range(3):
            client.upload_expert(honest(i))
        wait_for_bundle(client, 3)
        assert client.bundle(FAMILY, wait_for_bundle(client, 3).digest) is None

        def status(method: str, path: str, size: int) -> tuple[int, str]:
            answer = client._pool.request(method, f"{client.url}{path}", body=bytes(size), retries=False)
            return answer.status, answer.headers.get("Strict-Transport-Security", "")

        safe = "max-age=31536000"
        assert status("GET", "/metrics", 0) == (403, safe)
        assert status("GET", "/v1/health", 0) == (200, safe)
        assert status("POST", "/v1/reports", frame.LARGEST_JSON + 1) == (413, safe)
        assert status("POST", f"/v1/families/{FAMILY}/experts", frame.LARGEST_JSON + 1) == (422, safe)
        stranger = HubClient(client.url, "mgt_nobody", ca=certificate)
        with pytest.raises(HubError, match="token"):
            stranger.upload_expert(honest(0))
    finally:
        proxy.terminate()
        output = proxy.communicate(timeout=20)[0]
        hub.stop()
    assert b"emerg" not in output and b"[warn]" not in output, output


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_unit(tmp_path: Path) -> None:
    program = tmp_path / "mergetta"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/mergetta/bin/mergetta", str(program)))
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert UNIT.name not in result.stderr, result.stderr


def test_the_wheel_has_every_file() -> None:
    """`make package` looks into it; here its settings are looked at."""
    package = ROOT / "src" / "mergetta"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["mergetta"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    files = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert {path for path in files if path.suffix != ".py"} <= packed
