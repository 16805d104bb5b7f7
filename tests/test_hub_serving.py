"""Bundles over HTTP: what is current, by name, and without some experts."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from mergetta.device.hub_client import check_signature, load_key, read_key
from mergetta.hub.access import COOKIE
from mergetta.hub.records import Variant
from mergetta.hub.signing import Signer

from .fleet import BUNDLE, Fleet, assert_same_merge
from .hub_parts import FAMILY, honest


class TestServing:
    def test_conditional_requests(self, pool: Fleet) -> None:
        first = pool.call("GET", BUNDLE, "consume")
        etag = first.headers["etag"]
        assert etag.strip('"') == hashlib.sha256(first.content).hexdigest()
        assert pool.call("GET", BUNDLE, "consume", headers={"If-None-Match": etag}).status_code == 304
        pool.upload(honest(50))
        pool.settle()
        time.sleep(0.01)
        newer = pool.call("GET", BUNDLE, "consume", headers={"If-None-Match": etag})
        assert newer.status_code == 200 and newer.headers["etag"] != etag
        old = pool.call("GET", f"/v1/blobs/{etag.strip(chr(34))}", "consume")
        assert old.content == first.content and "immutable" in old.headers["cache-control"]

    @pytest.mark.parametrize("public", [False, True])
    def test_what_is_current(self, tmp_path: Path, public: bool) -> None:
        """A small signed file and an immutable one: where bundles are public, all that a cache needs."""
        signer = Signer.create(tmp_path / "key.pem")
        fleet = Fleet(tmp_path / "hub", public=public, signing_key=str(tmp_path / "key.pem"))
        path = f"/v1/families/{FAMILY}/current"
        with fleet.client:
            fleet.register()
            fleet.upload(honest(1))
            fleet.settle()
            answer = fleet.call("GET", path, "consume")
            told = answer.json()
            key = read_key(signer.public_key)
            check_signature([load_key(key)], answer.content, answer.headers["x-mergetta-signature"])
            assert (told["family"], told["variant"]) == (FAMILY, "") and len(answer.content) < 300
            same = {"If-None-Match": answer.headers["etag"]}
            assert fleet.call("GET", path, "consume", headers=same).status_code == 304
            blob = fleet.call("GET", f"/v1/blobs/{told['bundle']}", "consume")
            assert hashlib.sha256(blob.content).hexdigest() == told["bundle"] and len(blob.content) == told["size"]
            expected = ("public, max-age=10", "public") if public else ("private, no-cache", "private")
            assert answer.headers["cache-control"] == expected[0]
            assert blob.headers["cache-control"] == f"{expected[1]}, max-age=31536000, immutable"
            assert fleet.bundle(exclude=["nothing"]).family == FAMILY
            left_out = fleet.call("GET", path, "consume", params={"exclude": "nothing"}).json()
            assert left_out["variant"] and left_out["bundle"] == told["bundle"]  # nothing was left out
            for stranger, status in ((path, 200), (f"/v1/blobs/{told['bundle']}", 200), (BUNDLE, 401)):
                assert fleet.client.get(stranger).status_code == (status if public else 401)
            for query in ({"exclude": "fog"}, {"exclude_own": True}):
                assert fleet.client.get(path, params=query).status_code == 401
            fleet.client.cookies.set(COOKIE, "of a session that is over")
            assert fleet.client.get(path).status_code == (200 if public else 401)

    def test_a_lost_bundle_is_built_again(self, pool: Fleet) -> None:
        def current() -> str:
            return str(pool.call("GET", f"/v1/families/{FAMILY}/current", "consume").json()["bundle"])

        lost = current()
        Path(pool.store.blobs.path(lost)).unlink()
        assert pool.call("GET", f"/v1/blobs/{lost}", "consume").status_code == 503
        pool.settle()
        assert current() != lost
        assert pool.call("GET", f"/v1/blobs/{current()}", "consume").status_code == 200

    def test_nothing_there_yet(self, fleet: Fleet) -> None:
        assert fleet.call("GET", BUNDLE).status_code == 404
        fleet.register()
        answer = fleet.call("GET", BUNDLE)
        assert answer.status_code == 404 and "no experts" in answer.json()["detail"]
        assert fleet.call("POST", "/v1/families/other/experts", content=honest(0).to_bytes()).status_code == 404


class TestLeavingOut:
    def test_leaving_out_is_exact(self, pool: Fleet) -> None:
        rest = [honest(seed) for seed in range(6) if seed not in (1, 4)]
        assert_same_merge(pool.bundle(exclude=["domain-4", "domain-1"]), rest)
        own = pool.upload(honest(77), "admin")
        assert own["state"] == "pending"
        pool.settle()
        secret = pool.secrets["consume"]
        pool.secrets["consume"] = pool.secrets["admin"]
        assert_same_merge(pool.bundle(exclude_own=True), [honest(seed) for seed in range(6)])
        pool.secrets["consume"] = secret

    def test_leaving_everything_out(self, pool: Fleet) -> None:
        query = {"exclude": [f"domain-{seed}" for seed in range(6)]}
        deadline = time.monotonic() + 10
        while (answer := pool.call("GET", BUNDLE, params=query)).status_code == 202 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert answer.status_code == 404 and "no experts" in answer.json()["detail"]

    def test_a_stale_variant_is_served_until_the_new_one_is_there(self, pool: Fleet) -> None:
        pool.bundle(exclude=["domain-1"])
        pool.upload(honest(60))
        answer = pool.call("GET", BUNDLE, params={"exclude": "domain-1"})
        assert answer.status_code == 200
        deadline = time.monotonic() + 10
        while pool.bundle(exclude=["domain-1"]).settings["experts"] != 6:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def test_a_variant_that_is_built_this_very_moment_is_not_missing(
        self, pool: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        builder, store, current = pool.app.state.hub.builder, pool.store, pool.store.current
        build, waiting, go = builder.build_all, threading.Event(), threading.Event()

        def build_on_command() -> None:
            waiting.set()
            assert go.wait(20)
            build()

        def just_before(family: str, variant: Variant) -> Any:
            found = current(family, variant)
            go.set()
            deadline = time.monotonic() + 20
            while found is None and store.variant_built(family, variant) < 0 and time.monotonic() < deadline:
                time.sleep(0.01)
            return found

        monkeypatch.setattr(builder, "build_all", build_on_command)
        assert waiting.wait(20)
        assert pool.call("GET", BUNDLE, params={"exclude": "domain-1"}).status_code == 202
        monkeypatch.setattr(store, "current", just_before)
        assert pool.call("GET", BUNDLE, params={"exclude": "domain-1"}).status_code == 202
        assert pool.bundle(exclude=["domain-1"]).settings["experts"] == 5
