"""`adapt`, `build` and `run` with a hub."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from mergetta import Device, Expert, build_bundle
from mergetta.family_file import FamilyFile

from .hub_parts import new_hub
from .numpy_runtime import NumpyRuntime
from .stub_hub import KEY, PUBLIC, StubHub, id_of, make_bundle
from .test_agent import CLASSES
from .test_cli import mergetta


class TestCommands:
    def test_adapt_and_build(self, hub: StubHub, tmp_path: Path) -> None:
        np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8))
        adapt = ["adapt", "x.npz", "--out", "e.safetensors", "--hub", hub.url, "--token", "abc"]
        result = mergetta(*adapt, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        expert = Expert.load(tmp_path / "e.safetensors")
        assert list(hub.experts.values()) == [replace(expert, source=None).to_bytes()]
        assert FamilyFile.from_bytes(hub.families[expert.family]).family == expert.family
        assert hub.tokens == {"Bearer abc"}
        assert "active" in result.stdout
        hub.families.clear(), hub.experts.clear()
        result = mergetta("upload", "e.safetensors", "--hub", hub.url, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert list(hub.experts.values()) == [replace(expert, source=None).to_bytes()]
        assert hub.families.keys() == {expert.family}

        bundle = build_bundle(FamilyFile.from_bytes(hub.families[expert.family]).base, [expert], family=expert.family)
        hub.offer(bundle)
        result = mergetta("build", "--hub", hub.url, "--out", "b.safetensors", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "b.safetensors").read_bytes() == bundle.to_bytes()
        assert id_of(bundle)[:12] in result.stdout
        hub.families["other-family"] = b""
        refused = mergetta("build", "--hub", hub.url, "--out", "c.safetensors", cwd=tmp_path)
        assert (refused.returncode, (tmp_path / "c.safetensors").exists()) == (2, False)
        assert f"has the families {expert.family}, other-family: name one with --family" in " ".join(
            refused.stderr.split()
        )
        for name in ("fashion-bn", expert.family):
            result = mergetta("build", "--hub", hub.url, "--family", name, "--out", "c.safetensors", cwd=tmp_path)
            assert (tmp_path / "c.safetensors").read_bytes() == bundle.to_bytes(), result.stderr
        file = FamilyFile.from_bytes(hub.families[expert.family])
        file.base["bn.weight"][0] += 1  # type: ignore[index]
        hub.families[expert.family], hub.experts = file.to_bytes(), {}
        refused = mergetta(*adapt, cwd=tmp_path)
        assert refused.returncode == 2 and hub.experts == {}
        assert "registered with another source model" in " ".join(refused.stderr.split())
        refused = mergetta("build", "e.safetensors", "--hub", hub.url, "--out", "b.safetensors", cwd=tmp_path)
        assert refused.returncode == 2
        assert "either expert files or --hub" in " ".join(refused.stderr.split())

    def test_a_hub_that_refuses_is_asked_before_the_work(self, hub: StubHub, tmp_path: Path) -> None:
        hub.misbehave = [403]
        result = mergetta("adapt", "nowhere/", "--out", "e", "--hub", hub.url, "--token", "abc", cwd=tmp_path)
        assert result.returncode == 2
        assert "The hub refused" in result.stderr
        hub.misbehave = [401]
        result = mergetta("adapt", "nowhere/", "--out", "e", "--hub", hub.url, cwd=tmp_path)
        assert "The hub asks for a token: give it as --token" in result.stderr

    def test_who_may_not_upload_is_told_before_the_work(self, hub: StubHub, tmp_path: Path) -> None:
        """By what only contributors may ask."""
        command = ["adapt", "nowhere/", "--out", "e", "--hub", hub.url, "--token", "abc"]
        for _ in range(2):  # the first time the family is registered
            assert "Cannot read nowhere" in mergetta(*command, cwd=tmp_path).stderr
        method, path, _ = hub.requests[-1]
        assert (method, path.rpartition("/")[2]) == ("GET", "experts?limit=1")

    def test_run(self, hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Model(NumpyRuntime):
            metadata: ClassVar = {"classes": CLASSES, "channels": 1, "size": 6}

            def __init__(self, path: Path, threads: int | None) -> None:
                super().__init__()

        monkeypatch.setattr("mergetta.device.device.OnnxRuntime", Model)
        np.savez(tmp_path / "x.npz", images=np.random.default_rng(0).integers(0, 256, (20, 6, 6), dtype=np.uint8))
        hub.bundle = make_bundle().to_bytes()
        hub.signature = base64.b64encode(KEY.sign(hub.bundle)).decode()
        signed = ["--verify-key", base64.b64encode(PUBLIC).decode()]
        run = ["run", "--model", "m.onnx", "--images", "x.npz", "--batch-size", 5]
        options = ["--state", "s", "--device", "door", "--exclude", "fog", "--exclude-own", "--json"]
        result = mergetta(*run, "--hub", hub.url, *signed, *options, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["bundle"] == id_of(make_bundle())
        assert [(report["device"], report["images"]) for report in hub.reports] == [("door", 20)]
        assert "current?exclude=fog&exclude_own=true" in hub.requests[0][1]
        assert (tmp_path / "mergetta-hub" / "reports.jsonl").read_bytes() == b""
        served = (tmp_path / "predictions.jsonl").read_bytes()
        (tmp_path / "b.safetensors").write_bytes(hub.bundle)
        result = mergetta(*run, "--bundle", "b.safetensors", "--out", "own.jsonl", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "own.jsonl").read_bytes() == served

        for wrong in (run, [*run, "--hub", hub.url, "--bundle", "b.safetensors"]):
            result = mergetta(*wrong, cwd=tmp_path)
            assert result.returncode == 2
            assert "Give one of bundle and hub" in " ".join(result.stderr.split())
        with Device("m.onnx", hub=hub.url, folder=tmp_path / "python", device="window", refresh=None) as device:
            frame = device.predict(np.zeros((6, 6), np.uint8))
            second = hub.offer(make_bundle(1))
            device.agent.link.sync()
            device.predict(np.zeros((2, 6, 6, 1), np.uint8))
        assert (frame.shape, device.agent.bundle) == ((len(CLASSES),), second)
        waiting = (tmp_path / "python" / "reports.jsonl").read_text()
        assert (json.loads(waiting)["device"], json.loads(waiting)["images"]) == ("window", 3)
        hub.bundle, hub.signature = make_bundle().to_bytes(), None
        result = mergetta(*run, "--hub", hub.url, *signed, "--hub-folder", "new", cwd=tmp_path)
        assert result.returncode == 2
        assert "is not signed" in " ".join(result.stderr.split())


def test_tokens_and_the_audit_log(tmp_path: Path) -> None:
    pytest.importorskip("fastapi", reason="the hub's dependencies are not installed")
    create = [
        "hub",
        "token",
        "create",
        "[/camera]",
        "--role",
        "consume",
        "--days",
        "30",
        "--family",
        "f",
        "--device",
        "d",
    ]
    new_hub(tmp_path / "hub")
    assert mergetta(*create, cwd=tmp_path).stdout.startswith("mgt_")
    (token,) = json.loads(mergetta("hub", "token", "list", "--json", cwd=tmp_path).stdout)
    assert (token["families"], token["device"]) == (["f"], "d")
    assert token["expires"] == pytest.approx(token["created"] + 30 * 86400, abs=60)
    revoked = mergetta("hub", "token", "revoke", "[/cam", cwd=tmp_path)
    assert revoked.stdout == f"[/camera] ({token['id']}) is revoked\n", revoked.stderr
    lines = mergetta("hub", "audit", "--json", cwd=tmp_path).stdout.splitlines()
    assert [(e["action"], e["subject"]) for e in map(json.loads, lines)] == [
        ("create token", token["id"]),
        ("revoke token", token["id"]),
    ]
    for command in (("audit",), ("token", "list")):
        shown = mergetta("hub", *command, cwd=tmp_path)
        assert shown.returncode == 0 and token["id"][:4] in shown.stdout, shown.stderr  # names are text, not markup
    mergetta("hub", "token", "create", "the north wing's workstation", "--role", "contribute", cwd=tmp_path)
    shown = mergetta("hub", "token", "list", cwd=tmp_path, columns=80).stdout
    words = " ".join(line.replace("│", " ") for line in shown.splitlines()).split()
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert {token["id"], "[/camera]", "revoked", "device", "workstation", "wing's", "not"} <= set(words), shown
    refused = mergetta(*create, "--days", "inf", cwd=tmp_path)
    assert refused.returncode == 2 and "ends at some time" in " ".join(refused.stderr.split())
