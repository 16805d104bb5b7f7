"""A hub in this process, and what its answers are compared with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from fastapi.testclient import TestClient

from mergetta import Bundle, Expert, build_bundle
from mergetta.hub.app import create_app
from mergetta.hub.settings import HubSettings

from .hub_parts import BASE, FAMILY, family_file

EXPERTS = f"/v1/families/{FAMILY}/experts"
BUNDLE = f"/v1/families/{FAMILY}/bundle"


class Fleet:
    """A hub in this process, and one token per role."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.app = create_app(
            HubSettings.in_folder(folder, **{"build_every": 0.05, "open": True, "probe": False, **options})
        )
        self.client = TestClient(self.app, raise_server_exceptions=False)
        self.store = self.app.state.hub.store
        self.secrets = {role: self.store.create_token(role, role)[0] for role in ("contribute", "consume", "admin")}

    def call(self, method: str, path: str, role: str = "admin", **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.secrets[role]}", **options.pop("headers", {})}
        return self.client.request(method, path, headers=headers, **options)

    def register(self) -> None:
        answer = self.call("PUT", f"/v1/families/{FAMILY}", "contribute", content=family_file().to_bytes())
        assert answer.status_code in (200, 201)

    def upload(self, expert: Expert, role: str = "contribute") -> Any:
        answer = self.call("POST", EXPERTS, role, content=expert.to_bytes())
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    def settle(self) -> None:
        """Until the current bundle is made from everything that was uploaded."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            family = self.store.family(FAMILY)
            if family.built == family.generation:
                self.app.state.hub._published(FAMILY)  # as the builder is about to
                return
            time.sleep(0.01)
        raise AssertionError("the hub did not finish building")

    def bundle(self, **query: Any) -> Bundle:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            answer = self.call("GET", BUNDLE, "consume", params=query)
            if answer.status_code != 202:
                assert answer.status_code == 200, answer.text
                return Bundle.from_bytes(answer.content)
            time.sleep(0.02)
        raise AssertionError("the variant was never built")

    def states(self) -> dict[str, str]:
        return {e["domain"]: e["state"] for e in self.call("GET", EXPERTS).json()}


def assert_same_merge(found: Bundle, experts: list[Expert]) -> None:
    wanted = build_bundle(BASE, experts, initial=1.4 / len(experts), frozen=family_file().frozen, family=FAMILY)
    assert {n: len(v) for n, v in found.basis.items()} == {n: len(v) for n, v in wanted.basis.items()}
    for name, vector in wanted.merge().items():
        np.testing.assert_allclose(found.merge()[name], vector, atol=1e-5)
    assert found.members is not None and wanted.members is not None
    assert found.members.names == wanted.members.names
    for name, tasks in wanted.member_tasks.items():
        np.testing.assert_allclose(found.member_tasks[name], tasks, atol=1e-4)
    assert found.frozen == wanted.frozen
    assert found.family == FAMILY
