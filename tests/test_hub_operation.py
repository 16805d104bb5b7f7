"""A hub in operation: restarts, storage that fails, builds that fail, settings that change."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from mergetta import Bundle
from mergetta.hub.app import create_app
from mergetta.hub.held_pool import HeldPool
from mergetta.hub.settings import HubSettings
from mergetta.hub.signing import Signer

from .fleet import BUNDLE, EXPERTS, Fleet, assert_same_merge
from .hub_parts import FAMILY, family_file, honest, task_vector


class TestOperation:
    def test_open_routes(self, pool: Fleet) -> None:
        assert pool.client.get("/v1/health").json() == {"status": "ok"}
        assert pool.client.get("/v1/ready").json() == {"status": "ok"}
        assert pool.client.get("/v1/key").status_code == 404
        text = pool.client.get("/metrics").text
        assert "mergetta_builds" in text and 'route="/v1/families/{family}/experts"' in text

    def test_similarity(self, pool: Fleet) -> None:
        found = pool.call("GET", f"/v1/families/{FAMILY}/similarity").json()
        vectors = np.array([task_vector(seed) for seed in range(6)])
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(found["cosines"], unit @ unit.T, atol=0.01)
        assert found["domains"] == [f"domain-{seed}" for seed in range(6)]

    def test_a_restart_forgets_nothing(self, pool: Fleet, tmp_path: Path) -> None:
        before = pool.bundle()
        other = create_app(HubSettings.in_folder(tmp_path, build_every=0.05, open=True))
        with TestClient(other) as client:
            headers = {"Authorization": f"Bearer {pool.secrets['contribute']}"}
            assert client.get(BUNDLE, headers=headers).content == before.to_bytes()
            assert client.post(EXPERTS, headers=headers, content=honest(40).to_bytes()).status_code == 201
            deadline = time.monotonic() + 40
            while client.get(BUNDLE, headers=headers).content == before.to_bytes() and time.monotonic() < deadline:
                time.sleep(0.05)
            found = Bundle.from_bytes(client.get(BUNDLE, headers=headers).content)
        assert_same_merge(found, [*(honest(seed) for seed in range(6)), honest(40)])

    def test_a_restart_finds_the_same_clusters(self, pool: Fleet, tmp_path: Path) -> None:
        for seed in range(6, 40):
            pool.upload(honest(seed))
        pool.settle()
        before = pool.bundle()
        family, settings = pool.store.family(FAMILY), HubSettings.in_folder(tmp_path)
        held = HeldPool(pool.store, settings, family, family_file(), keep_on=lambda: None)
        held.catch_up(family)
        again, _ = held.bundle(())
        assert again.members is not None and before.members is not None
        assert again.members.listed() == before.members.listed()
        for name, tasks in before.member_tasks.items():
            np.testing.assert_allclose(again.member_tasks[name], tasks, atol=1e-5)

    def test_readers_go_on_without_the_database(self, pool: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        from sqlalchemy.exc import OperationalError

        def away() -> Any:
            raise OperationalError("", {}, Exception("gone"))

        assert pool.call("GET", BUNDLE, "consume").status_code == 200
        with monkeypatch.context() as patch:
            patch.setattr(pool.store.database, "read", away)
            time.sleep(1.1)
            assert pool.call("GET", BUNDLE, "consume").status_code == 200
            assert pool.call("GET", f"{BUNDLE}/summary", "consume").status_code == 503
        assert pool.call("GET", f"{BUNDLE}/summary", "consume").status_code == 200

    def test_another_recipe_or_key_makes_new_bundles(self, pool: Fleet, tmp_path: Path) -> None:
        pool.client.__exit__(None, None, None)
        Signer.create(tmp_path / "key.pem")
        fleet = Fleet(tmp_path, signing_key=str(tmp_path / "key.pem"), recipe={"weight": 0.7})
        with fleet.client:
            deadline = time.monotonic() + 20
            while "x-mergetta-signature" not in (answer := fleet.call("GET", BUNDLE)).headers:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert Bundle.from_bytes(answer.content).settings["initial"] == pytest.approx(0.7 / 6)
        pool.client.__enter__()

    def test_an_administrator_deletes_a_family(self, pool: Fleet) -> None:
        assert pool.call("DELETE", f"/v1/families/{FAMILY}", "contribute").status_code == 403
        assert pool.call("DELETE", f"/v1/families/{FAMILY}").status_code == 204
        assert pool.call("GET", "/v1/families").json() == []
        pool.register()
        assert pool.call("GET", BUNDLE).status_code == 404

    def test_no_page_loads_scripts_from_elsewhere(self, fleet: Fleet) -> None:
        assert fleet.client.get("/docs").status_code == fleet.client.get("/redoc").status_code == 404
        assert fleet.client.post("/login", headers={"Origin": "http://["}).status_code == 403

    def test_storage_that_fails_is_503_and_recovers(self, pool: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        import os

        def full(number: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            answer = pool.call("POST", EXPERTS, content=honest(20).to_bytes())
            assert answer.status_code == 503 and "No space left" in answer.json()["detail"]
            assert answer.headers["retry-after"]
            assert pool.call("GET", BUNDLE).status_code == 200  # readers go on
        assert pool.call("POST", EXPERTS, content=honest(20).to_bytes()).status_code == 201
        pool.settle()
        assert pool.bundle().settings["experts"] == 7

    def test_a_build_that_fails_is_tried_again(self, pool: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
        builder = pool.app.state.hub.builder
        original, calls = HeldPool.catch_up, []

        def fails_once(held: HeldPool, family: Any) -> None:
            calls.append(family)
            if len(calls) == 1:
                raise RuntimeError("a fault")
            original(held, family)

        other = "other-0123456789abcdef"
        pool.call("PUT", f"/v1/families/{other}", content=family_file(other).to_bytes())

        monkeypatch.setattr(HeldPool, "catch_up", fails_once)
        pool.upload(honest(21))
        pool.settle()
        assert len(calls) == 2 and builder.failures == 1
        assert_same_merge(pool.bundle(), [*(honest(seed) for seed in range(6)), honest(21)])
