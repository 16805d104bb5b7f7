"""What is shipped to run a hub with: it parses, names options that exist, and has the hub's own limits.

No test needs a container engine; where systemd is at hand, it checks its unit.
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

from mergetta.hub import frame, protocol
from mergetta.hub.settings import HubSettings

from .test_cli import mergetta

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
