"""The hub over HTTP: families, experts, bundles, reports; who may do what; what happens to bad input."""

from __future__ import annotations

import hashlib
import json
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from mergetta import Bundle, Expert, MergettaError, build_bundle
from mergetta.device.hub_client import check_signature, load_key, read_key
from mergetta.hub import limits
from mergetta.hub.access import COOKIE
from mergetta.hub.app import create_app
from mergetta.hub.builder import Builder
from mergetta.hub.frame import LARGEST_JSON
from mergetta.hub.limits import Gate
from mergetta.hub.records import Variant
from mergetta.hub.settings import HubSettings, Recipe
from mergetta.hub.signing import Signer

from .hub_parts import BASE, FAMILY, SHARED, expert_of, family_file, honest, task_vector

EXPERTS = f"/v1/families/{FAMILY}/experts"
BUNDLE = f"/v1/families/{FAMILY}/bundle"


class Fleet:
    """A hub in this process, and one token per role."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.app = create_app(HubSettings.in_folder(folder, **{"build_every": 0.05, "open": True, **options}))
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


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    with fleet.client:
        yield fleet


@pytest.fixture
def pool(fleet: Fleet) -> Fleet:
    fleet.register()
    for seed in range(6):
        fleet.upload(honest(seed))
    fleet.settle()
    return fleet


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


class TestTheWayOfAnExpert:
    def test_from_upload_to_bundle(self, pool: Fleet) -> None:
        assert_same_merge(pool.bundle(), [honest(seed) for seed in range(6)])
        assert pool.bundle().settings["loss"] == "roid"
        assert set(pool.states().values()) == {"active"}
        family = pool.call("GET", f"/v1/families/{FAMILY}", "consume").json()
        assert family["experts"] == {"active": 6} and family["up_to_date"]
        summary = pool.call("GET", f"{BUNDLE}/summary").json()
        assert summary["id"] == family["bundle"] and summary["experts"] == 6
        assert all(0 < share <= 1 + 1e-9 for share in summary["summary"]["energy"].values())

    def test_the_same_content_is_the_same_expert(self, pool: Fleet) -> None:
        again = pool.call("POST", EXPERTS, "contribute", content=honest(0).to_bytes())
        assert again.status_code == 200
        assert again.json()["id"] == hashlib.sha256(honest(0).to_bytes()).hexdigest()
        assert len(pool.call("GET", EXPERTS).json()) == 6

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

    def test_retiring_is_exact(self, pool: Fleet) -> None:
        victim = pool.upload(honest(3))["id"]
        assert pool.call("POST", f"/v1/experts/{victim}/state", json={"state": "retired"}).status_code == 200
        pool.settle()
        assert_same_merge(pool.bundle(), [honest(seed) for seed in range(6) if seed != 3])

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

    def test_members_count_experts_and_tokens(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, recipe=Recipe(members=1))
        with fleet.client:
            fleet.register()
            for seed in range(6):
                fleet.upload(honest(seed, "fog"))
            fleet.upload(honest(6, "snow"), "admin")
            fleet.settle()
            listed = fleet.call("GET", f"{BUNDLE}/summary").json()["summary"]["members"]
            assert listed == [{"member": "fog and others", "experts": 7, "contributors": 2}]
            fleet.secrets["consume"] = fleet.secrets["admin"]
            for query in ({"exclude_own": True}, {"exclude": "snow"}):
                members = fleet.bundle(**query).members
                assert members is not None
                assert members.listed() == [{"member": "fog", "experts": 6, "contributors": 1}]

    def test_what_a_giant_leaves_behind_is_swept(self, tmp_path: Path) -> None:
        """Rounding in the sums, when it has retired: scatter matrices and clusters are filled anew."""
        fleet = Fleet(tmp_path, screen=False)
        with fleet.client:
            fleet.register()
            giant = fleet.upload(expert_of(np.full(SHARED.size, 9e3)))["id"]
            for seed in range(20):
                fleet.upload(honest(seed))
            fleet.settle()
            assert fleet.call("POST", f"/v1/experts/{giant}/state", json={"state": "retired"}).status_code == 200
            fleet.settle()
            assert_same_merge(fleet.bundle(), [honest(seed) for seed in range(20)])
            assert 0 < fleet.app.state.hub.builder._held[FAMILY].pool.drift < 1e-12

    def test_members_can_be_left_to_the_paper(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, recipe=Recipe(members=0))
        with fleet.client:
            fleet.register()
            fleet.upload(honest(0))
            fleet.settle()
            assert fleet.bundle().members is None
            assert fleet.call("GET", f"{BUNDLE}/summary").json()["summary"]["members"] == []

    def test_experts_with_odd_moments_stop_no_build(self, pool: Fleet) -> None:
        for i, signature in enumerate((None, np.ones((2, 5)), np.stack([np.full(3, 1e6), np.zeros(3)]))):
            pool.upload(replace(honest(20 + i), signature=signature))
        pool.upload(replace(honest(30), features=np.ones((2, 4))))
        pool.settle()
        found = pool.bundle()
        assert found.settings["experts"] == 10
        assert found.members is not None and found.members.signatures is not None
        assert found.members.signatures.shape == (10, 2, 3) and found.members.features is None

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

    def test_nothing_there_yet(self, fleet: Fleet) -> None:
        assert fleet.call("GET", BUNDLE).status_code == 404
        fleet.register()
        answer = fleet.call("GET", BUNDLE)
        assert answer.status_code == 404 and "no experts" in answer.json()["detail"]
        assert fleet.call("POST", "/v1/families/other/experts", content=honest(0).to_bytes()).status_code == 404


class TestScreening:
    def test_poisoned_experts_are_quarantined(self, fleet: Fleet) -> None:
        fleet.register()
        poison = {
            "flipped": expert_of(-task_vector(1), "flipped"),
            "blown-up": expert_of(20 * task_vector(2), "blown-up"),
            "random": expert_of(0.14 * np.random.default_rng(3).normal(size=SHARED.size) * 1.0, "random"),
        }
        order: list[Expert] = [*poison.values(), *(honest(seed) for seed in range(12))]
        for expert in order:  # the poison comes first, when there is no crowd yet to compare it with
            fleet.upload(expert)
        fleet.settle()
        states = fleet.states()
        assert {domain for domain, state in states.items() if state == "quarantined"} == set(poison)
        assert_same_merge(fleet.bundle(), [honest(seed) for seed in range(12)])

    def test_poisoned_moments_are_quarantined(self, fleet: Fleet) -> None:
        """Weights like all others', and moments that would break every layer they are merged into."""
        fleet.register()
        poison = {"shifted": expert_of(task_vector(1), "shifted", apart=4.0)}
        near = {
            "calm": expert_of(task_vector(2), "calm", apart=0.0),
            "far": expert_of(task_vector(3), "far", apart=1.0),
        }
        for expert in (*poison.values(), *near.values(), *(honest(seed) for seed in range(12))):
            fleet.upload(expert)
        fleet.settle()
        states = fleet.states()
        assert {domain for domain, state in states.items() if state == "quarantined"} == set(poison)
        found = fleet.call("GET", f"{EXPERTS}?state=quarantined").json()
        assert [e["reason"] for e in found] == ["its moments are 13 times as far off as the median ones"]
        assert_same_merge(fleet.bundle(), [*near.values(), *(honest(seed) for seed in range(12))])

    def test_an_administrator_accepts(self, pool: Fleet) -> None:
        odd = pool.upload(expert_of(-task_vector(1), "odd"))["id"]
        pool.settle()
        assert [e["id"] for e in pool.call("GET", f"{EXPERTS}?state=quarantined").json()] == [odd]
        found = pool.call("GET", f"/v1/experts/{odd}").json()
        assert found["state"] == "quarantined" and "cosine" in found["reason"]
        assert pool.call("POST", f"/v1/experts/{odd}/state", json={"state": "active"}).json()["decided"]
        pool.settle()
        assert_same_merge(pool.bundle(), [*(honest(seed) for seed in range(6)), expert_of(-task_vector(1), "odd")])

    def test_an_administrator_quarantines(self, pool: Fleet) -> None:
        fine = pool.upload(honest(2))["id"]
        pool.call("POST", f"/v1/experts/{fine}/state", json={"state": "quarantined", "reason": "camera was covered"})
        pool.upload(honest(9))
        pool.settle()
        assert pool.states()["domain-2"] == "quarantined"

    def test_one_contributor_cannot_outvote_the_others(self, fleet: Fleet) -> None:
        fleet.register()
        for seed in range(6):
            fleet.secrets[f"c{seed}"], _ = fleet.store.create_token(f"c{seed}", "contribute")
            fleet.upload(honest(seed), f"c{seed}")
        for seed in range(7):
            fleet.upload(expert_of(-task_vector(seed), f"hostile-{seed}"))
        fleet.settle()
        states = fleet.states()
        assert {state for domain, state in states.items() if domain.startswith("domain-")} == {"active"}
        assert {state for domain, state in states.items() if domain.startswith("hostile-")} == {"quarantined"}

    def test_something_huge_that_came_and_went_leaves_no_trace(self, fleet: Fleet) -> None:
        fleet.register()
        fleet.upload(honest(0))
        fleet.upload(honest(1))
        fleet.upload(expert_of(3e4 * task_vector(2) / np.abs(task_vector(2)).max() / 4, "huge"))
        fleet.settle()
        for seed in range(2, 9):
            fleet.upload(honest(seed))
        fleet.settle()
        assert fleet.states()["huge"] == "quarantined"
        assert_same_merge(fleet.bundle(), [honest(seed) for seed in range(9)])

    def test_a_yardstick_of_zeros(self, fleet: Fleet) -> None:
        fleet.register()
        for seed in range(6):
            fleet.upload(expert_of(0 * task_vector(seed), f"zero-{seed}"))
        fleet.upload(honest(1))
        fleet.settle()
        assert fleet.call("GET", BUNDLE).status_code == 200

    def test_it_can_be_switched_off(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, screen=False)
        with fleet.client:
            fleet.register()
            for expert in (*(honest(seed) for seed in range(6)), expert_of(-task_vector(1), "odd")):
                fleet.upload(expert)
            fleet.settle()
            assert fleet.states()["odd"] == "active"


class TestTrust:
    @pytest.mark.parametrize(
        ("method", "path", "allowed"),
        [
            ("GET", "/v1/families", {"contribute", "consume", "admin"}),
            ("PUT", f"/v1/families/{FAMILY}", {"contribute", "admin"}),
            ("POST", EXPERTS, {"contribute", "admin"}),
            ("GET", EXPERTS, {"contribute", "admin"}),
            ("GET", f"/v1/experts/{'0' * 64}", {"contribute", "admin"}),
            ("GET", BUNDLE, {"contribute", "consume", "admin"}),
            ("POST", f"/v1/experts/{'0' * 64}/state", {"contribute", "admin"}),
            ("GET", f"/v1/experts/{'0' * 64}/content", {"admin"}),
            ("POST", "/v1/reports", {"contribute", "consume", "admin"}),
        ],
    )
    def test_roles(self, fleet: Fleet, method: str, path: str, allowed: set[str]) -> None:
        assert fleet.client.request(method, path).status_code == 401
        headers = {"Authorization": "Bearer mgt_wrong"}
        assert fleet.client.request(method, path, headers=headers).status_code == 401
        for role in ("contribute", "consume", "admin"):
            refused = fleet.call(method, path, role).status_code == 403
            assert refused == (role not in allowed), role

    def test_who_registers_a_family(self, tmp_path: Path) -> None:
        """Whoever does writes the source model that all experts are merged into."""
        fleet = Fleet(tmp_path, open=False)
        fleet.secrets["named"], _ = fleet.store.create_token("named", "contribute", registers=FAMILY)
        fleet.secrets["other"], _ = fleet.store.create_token("other", "contribute", registers="another")
        data = family_file().to_bytes()
        with fleet.client:
            for role in ("contribute", "other"):
                answer = fleet.call("PUT", f"/v1/families/{FAMILY}", role, content=data)
                assert answer.status_code == 403 and "administrator" in answer.json()["detail"]
            assert fleet.call("GET", "/v1/families").json() == []
            assert fleet.call("GET", f"/v1/families/{FAMILY}/file").status_code == 404
            assert fleet.call("PUT", f"/v1/families/{FAMILY}", "named", content=data).status_code == 201
            assert fleet.call("PUT", f"/v1/families/{FAMILY}", "admin", content=data).status_code == 200
            assert fleet.call("GET", f"/v1/families/{FAMILY}/file", "contribute").content == data

    def test_a_token_is_approved(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, open=False)
        with fleet.client:
            fleet.call("PUT", f"/v1/families/{FAMILY}", content=family_file().to_bytes())
            assert fleet.upload(honest(0))["state"] == "pending"
            fleet.settle()
            assert fleet.states() == {"domain-0": "pending"}
            token = next(t.id for t in fleet.store.tokens() if t.role == "contribute")
            assert fleet.call("POST", f"/v1/tokens/{token}/approval", "contribute").status_code == 403
            assert fleet.call("POST", f"/v1/tokens/{'0' * 12}/approval").status_code == 404
            assert fleet.call("POST", f"/v1/tokens/{token}/approval").status_code == 204
            fleet.settle()
            assert fleet.states() == {"domain-0": "active"}

    def test_how_an_expert_measures_up_is_for_administrators(self, pool: Fleet) -> None:
        odd = pool.upload(expert_of(-task_vector(1), "odd"))
        assert odd["norm"] is None
        pool.settle()
        for path in (f"/v1/experts/{odd['id']}", f"{EXPERTS}?state=quarantined"):
            found = pool.call("GET", path, "contribute").json()
            found = found if isinstance(found, dict) else found[0]
            assert (found["norm"], found["reason"], found["token"]) == (None, "it is unlike the others", odd["token"])
        others = pool.upload(honest(30), "admin")["id"]
        assert odd["token"] and pool.call("GET", f"/v1/experts/{others}", "contribute").json()["token"] == ""
        assert pool.call("GET", f"/v1/families/{FAMILY}/similarity", "contribute").json()["cosines"] == []
        assert pool.call("GET", f"/v1/experts/{odd['id']}").json()["norm"] > 0

    def test_leaving_out_gives_no_single_expert_away(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, open=False)
        with fleet.client:
            fleet.call("PUT", f"/v1/families/{FAMILY}", content=family_file().to_bytes())
            for seed in range(4):
                fleet.secrets[f"c{seed}"], _ = fleet.store.create_token(f"c{seed}", "contribute", approved=True)
                fleet.upload(honest(seed, "fog"), f"c{seed}")
            fleet.upload(honest(9, "snow"), "c0")
            fleet.settle()
            assert fleet.bundle(exclude="fog").settings["experts"] == 1
            for query in ({"exclude": "snow"}, {"exclude": ["fog", "snow"]}):
                answer = fleet.call("GET", BUNDLE, "consume", params=query)
                assert answer.status_code == 403 and "'snow'" in answer.json()["detail"]
            fleet.secrets["consume"] = fleet.secrets["c0"]
            assert fleet.bundle(exclude_own=True).settings["experts"] == 3
            told = fleet.call("GET", f"/v1/families/{FAMILY}/current?exclude_own=true", "c0").json()
            statuses = [
                fleet.call("GET", f"/v1/blobs/{told['bundle']}", who).status_code for who in ("c0", "admin", "c1")
            ]
            assert told["variant"] and statuses == [200, 200, 404]
            assert fleet.bundle(exclude="nothing").settings["experts"] == 5

    def test_contributors_retire_only_their_own(self, pool: Fleet) -> None:
        mine = pool.upload(honest(0))["id"]
        others = pool.upload(honest(30), "admin")["id"]

        def decide(expert: str, state: str) -> int:
            path = f"/v1/experts/{expert}/state"
            return int(pool.call("POST", path, "contribute", json={"state": state}).status_code)

        assert decide(others, "retired") == 403
        assert decide(mine, "active") == 403
        assert decide(mine, "retired") == 200
        assert decide(mine, "retired") == 200

    def test_revoked(self, fleet: Fleet) -> None:
        assert fleet.call("GET", "/v1/families", "consume").status_code == 200
        fleet.store.revoke_token(next(t.id for t in fleet.store.tokens() if t.role == "consume"))
        fleet.app.state.hub.gate = Gate()
        assert fleet.call("GET", "/v1/families", "consume").status_code == 401

    def test_a_known_token_needs_no_database_until_it_is_revoked(
        self, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[str] = []
        find = fleet.store.find_token
        monkeypatch.setattr(fleet.store, "find_token", lambda secret: asked.append(secret) or find(secret))
        monkeypatch.setattr(limits, "FOLLOWED_EVERY", 0.05)
        for _ in range(3):
            assert fleet.call("GET", "/v1/families", "consume").status_code == 200
            time.sleep(0.06)
        assert asked == [fleet.secrets["consume"]]
        mine = next(t for t in fleet.store.tokens() if t.role == "consume")
        assert mine.last_used is not None and mine.last_used > mine.created
        fleet.store.revoke_token(mine.id)
        time.sleep(0.06)
        assert fleet.call("GET", "/v1/families", "consume").status_code == 401
        assert asked == [fleet.secrets["consume"]]

    def test_a_token_revoked_while_it_was_looked_up(self, fleet: Fleet) -> None:
        gate, (mine, *_) = Gate(), fleet.store.tokens()
        fleet.store.revoke_token(mine.id)
        gate.follow(fleet.store)
        gate.remember("secret", mine, session=False)  # found before, remembered after
        assert gate.refuses(mine)

    def test_expired(self, fleet: Fleet) -> None:
        for role, seconds in (("old", -1.0), ("new", 60.0)):
            fleet.secrets[role], _ = fleet.store.create_token(role, "consume", expires=time.time() + seconds)
        assert fleet.call("GET", "/v1/families", "old").status_code == 401
        assert fleet.call("GET", "/v1/families", "new").status_code == 200

    def test_scope(self, pool: Fleet) -> None:
        expert = pool.upload(honest(0))["id"]
        digest = hashlib.sha256(pool.call("GET", BUNDLE).content).hexdigest()
        report = {"family": FAMILY, "device": "d", "time": 0, "state": "settled", "batches": 1, "images": 1}
        pool.secrets["here"], _ = pool.store.create_token("h", "contribute", families=[FAMILY], device="d")
        pool.secrets["elsewhere"], _ = pool.store.create_token("e", "contribute", families=["other"])
        for role, status in (("here", 200), ("elsewhere", 403)):
            for path in (BUNDLE, EXPERTS, f"/v1/experts/{expert}", f"/v1/blobs/{digest}", f"/v1/families/{FAMILY}"):
                assert pool.call("GET", path, role).status_code == status, path
            assert len(pool.call("GET", "/v1/families", role).json()) == (status == 200)
            assert (pool.call("POST", "/v1/reports", role, json=[report]).status_code == 403) == (status == 403)
            assert pool.call("POST", f"/v1/experts/{expert}/state", role, json={"state": "retired"}).status_code == 403
        impostor = pool.call("POST", "/v1/reports", "here", json=[{**report, "device": "e"}])
        assert impostor.status_code == 403 and "'d'" in impostor.json()["detail"]
        with pytest.raises(MergettaError, match="all families"):
            pool.store.create_token("a", "admin", families=[FAMILY])

    def test_who_did_what(self, pool: Fleet) -> None:
        ids = {t.role: t.id for t in pool.store.tokens()}
        odd = pool.upload(expert_of(-task_vector(1), "odd"))["id"]
        pool.settle()
        pool.call("POST", f"/v1/experts/{odd}/state", json={"state": "retired", "reason": "poison"})
        pool.store.revoke_token(ids["consume"])
        pool.client.post("/login", json={"token": pool.secrets["admin"]})
        pool.call("DELETE", f"/v1/families/{FAMILY}")
        assert pool.call("GET", "/v1/audit", "contribute").status_code == 403
        told = pool.call("GET", "/v1/audit").json()
        assert [(e["actor"], e["action"], e["subject"]) for e in told[:6]] == [
            (ids["admin"], "delete family", FAMILY),
            (ids["admin"], "log in", ids["admin"]),
            ("command line", "revoke token", ids["consume"]),
            (ids["admin"], "retire expert", odd),
            ("screening", "quarantine expert", odd),
            (ids["contribute"], "upload expert", odd),
        ]
        assert (told[3]["why"], told[3]["family"], told[3]["name"]) == ("poison", FAMILY, "admin")
        assert [e["action"] for e in told[-4:]] == ["register family"] + 3 * ["create token"]
        assert pool.call("GET", f"/v1/audit?before={told[1]['number']}&limit=1").json() == told[2:3]

    def test_rate(self, fleet: Fleet) -> None:
        fleet.secrets["slow"], _ = fleet.store.create_token("slow", "consume", rate=2)
        answers = [fleet.call("GET", "/v1/families", "slow") for _ in range(8)]
        assert [a.status_code for a in answers][:4] == [200] * 4
        assert answers[-1].status_code == 429 and int(answers[-1].headers["retry-after"]) >= 1

    def test_a_slow_rate_is_a_rate(self, fleet: Fleet) -> None:
        fleet.secrets["slow"], _ = fleet.store.create_token("slow", "consume", rate=0.2)
        assert [fleet.call("GET", "/v1/families", "slow").status_code for _ in range(2)] == [200, 429]

    def test_size(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, max_upload=20_000)
        fleet.secrets["small"], _ = fleet.store.create_token("small", "contribute", max_upload=100)
        with fleet.client:
            fleet.register()
            for role, size in (("small", 101), ("admin", 20_001)):
                assert fleet.call("POST", EXPERTS, role, content=b"x" * size).status_code == 413
                chunked = (b"x" * 50 for _ in range(size // 50 + 1))  # no Content-Length to go by
                assert fleet.call("POST", EXPERTS, role, content=chunked).status_code == 413
            assert fleet.call("POST", "/v1/reports", content=b" " * (LARGEST_JSON + 1)).status_code == 413
        assert fleet.store.experts(FAMILY) == []

    def test_uploads_at_once(self, fleet: Fleet) -> None:
        """What is in memory of one token's uploads is no more than one of them may be; of all, four times as much."""
        fleet.register()
        gate, most = fleet.app.state.hub.gate, fleet.app.state.hub.settings.max_upload
        ids = {t.role: t for t in fleet.store.tokens()}
        gate.hold(ids["contribute"], most)
        answer = fleet.call("POST", EXPERTS, "contribute", content=honest(0).to_bytes())
        assert answer.status_code == 429 and answer.headers["retry-after"]
        assert fleet.call("POST", EXPERTS, content=honest(0).to_bytes()).status_code == 201
        gate.hold(ids["contribute"], 3 * most)
        assert fleet.call("POST", EXPERTS, content=honest(1).to_bytes()).status_code == 429
        gate.hold(ids["contribute"], -4 * most)
        assert fleet.call("POST", EXPERTS, "contribute", content=honest(1).to_bytes()).status_code == 201
        assert not gate._held

    def test_signatures(self, tmp_path: Path) -> None:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        signer = Signer.create(tmp_path / "key.pem")
        assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
        fleet = Fleet(tmp_path / "hub", signing_key=str(tmp_path / "key.pem"))
        with fleet.client:
            fleet.register()
            fleet.upload(honest(1))
            fleet.settle()
            answer = fleet.call("GET", BUNDLE)
            import base64

            key = fleet.client.get("/v1/key").json()["key"]
            assert key == signer.public_key
            public = Ed25519PublicKey.from_public_bytes(base64.b64decode(key))
            signature = base64.b64decode(answer.headers["x-mergetta-signature"])
            public.verify(signature, answer.content)
            with pytest.raises(InvalidSignature):
                public.verify(signature, answer.content + b"x")

    def test_a_cookie_alone_changes_nothing(self, pool: Fleet) -> None:
        victim = pool.upload(honest(0))["id"]
        pool.client.cookies.set(COOKIE, pool.secrets["admin"])
        assert pool.client.get("/v1/families").status_code == 401  # a cookie holds a session, not a token
        assert pool.client.post("/login", json={"token": pool.secrets["admin"]}).status_code == 200
        assert pool.client.get("/v1/families").status_code == 200
        session = {"Authorization": f"Bearer {pool.client.cookies.get(COOKIE, domain='testserver.local')}"}
        assert pool.client.get("/v1/families", headers=session).status_code == 401  # nor is a session a token
        path = f"/v1/experts/{victim}/state"
        assert pool.client.post(path, json={"state": "retired"}).status_code == 401  # as another site could make it
        ours = {"x-mergetta-dashboard": "1"}
        assert pool.client.post(path, json={"state": "retired"}, headers=ours).status_code == 200


def broken_uploads() -> Iterator[bytes]:
    good = honest(0).to_bytes()
    size = struct.unpack("<Q", good[:8])[0]
    yield b"\0"
    yield good[:-1]
    yield good[:20]
    yield struct.pack("<Q", 2**62) + good[8:]  # a header that claims to be enormous
    yield struct.pack("<Q", 10**8) + b"{" * 1000
    yield good[:8] + b"[" * size + good[8 + size :]  # deeply nested
    yield b"PK\x03\x04" + b"\0" * 500
    header = {"__metadata__": {"mergetta": "{}"}, "a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    text = json.dumps(header).encode()
    yield struct.pack("<Q", len(text)) + text  # tensors that would fill all memory
    nan = honest(0)
    nan.groups["stem.weight"][0] = np.nan  # type: ignore[index]
    yield nan.to_bytes()


class TestBadInput:
    @pytest.mark.parametrize("data", list(broken_uploads()))
    def test_uploads(self, pool: Fleet, data: bytes) -> None:
        answer = pool.call("POST", EXPERTS, "contribute", content=data)
        assert answer.status_code == 422
        assert answer.json()["detail"].endswith(".")
        assert len(pool.call("GET", EXPERTS).json()) == 6

    @pytest.mark.parametrize("name", ["..", "../x", "..%2f..%2fetc", "%2e%2e", "a/b", "a%00b", "-x", "x" * 201, "a b"])
    def test_names_with_tricks(self, pool: Fleet, name: str, tmp_path: Path) -> None:
        for path in (f"/v1/families/{name}", f"/v1/experts/{name}", f"/v1/blobs/{name}"):
            assert pool.call("GET", path).status_code in (404, 422)
        answer = pool.call("PUT", f"/v1/families/{name}", content=family_file().to_bytes())
        assert answer.status_code in (404, 405, 422)

    def test_a_strange_domain_is_only_text(self, pool: Fleet) -> None:
        strange = "../../<img src=x onerror=alert(1)>\u202e"
        pool.upload(honest(8, strange))
        pool.settle()
        assert strange in pool.states()

    def test_reports(self, pool: Fleet) -> None:
        good = {
            "family": FAMILY, "device": "camera-1", "time": time.time(), "state": "adapting", "batches": 3,
            "images": 192, "entropy": 0.4, "loss": None, "moved": 0.1, "weights": {"fog": 0.7},
        }  # fmt: skip
        later = {**good, "time": good["time"] + 1, "batches": 4, "entropy": None}
        for _ in range(2):  # a device that got no answer sends again
            assert pool.call("POST", "/v1/reports", "consume", json=[good, later]).json() == {"taken": 2}
        found = pool.call("GET", f"/v1/families/{FAMILY}/devices").json()
        assert [(d["device"], d["last"]["batches"]) for d in found] == [("camera-1", 4)]
        history = pool.call("GET", f"/v1/families/{FAMILY}/devices/camera-1/reports").json()
        assert [r["batches"] for r in history] == [3, 4]
        many = {str(i): 0.1 for i in range(300)}
        for change in (
            {"weights": many},
            {"weights": {"fog": "x"}},
            {"images": [[1]]},
            {"image": "x"},
            {"device": "../x"},
            {"entropy": "NaN"},
            {"state": "lost"},
        ):
            answer = pool.call("POST", "/v1/reports", json=[{**good, **change}])
            assert answer.status_code == 422
            assert isinstance(answer.json()["detail"], str)
        assert pool.call("POST", "/v1/reports", json=[{**good, "family": "other"}]).status_code == 404
        assert pool.call("POST", "/v1/reports", content=b"\xff").status_code == 422


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
        builder = Builder(pool.store, HubSettings.in_folder(tmp_path))
        family = pool.store.family(FAMILY)
        held = builder._catch_up(family, builder._empty(family, family_file()))
        again, _ = builder._make(held, family, [])
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
        original, calls = builder._catch_up, []

        def fails_once(family: Any, held: Any) -> Any:
            calls.append(family)
            if len(calls) == 1:
                raise RuntimeError("a fault")
            return original(family, held)

        other = "other-0123456789abcdef"
        pool.call("PUT", f"/v1/families/{other}", content=family_file(other).to_bytes())

        monkeypatch.setattr(builder, "_catch_up", fails_once)
        pool.upload(honest(21))
        pool.settle()
        assert len(calls) == 2 and builder.failures == 1
        assert_same_merge(pool.bundle(), [*(honest(seed) for seed in range(6)), honest(21)])
