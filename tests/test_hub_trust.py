"""Who may do what: roles, approval, scope, rates, sizes, signatures, sessions."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from mergetta import MergettaError
from mergetta.hub import limits
from mergetta.hub.access import COOKIE
from mergetta.hub.frame import LARGEST_JSON
from mergetta.hub.limits import Gate
from mergetta.hub.settings import Limits
from mergetta.hub.signing import Signer

from .fleet import BUNDLE, EXPERTS, Fleet
from .hub_parts import FAMILY, expert_of, family_file, honest, task_vector


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

    def test_a_contributor_registers_so_many_families(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, open=True, limits=Limits(families_per_token=2))
        with fleet.client:

            def register(name: str, role: str = "contribute") -> int:
                data = family_file(name).to_bytes()
                return int(fleet.call("PUT", f"/v1/families/{name}", role, content=data).status_code)

            assert [register(name) for name in ("one", "two", "one", "three")] == [201, 201, 200, 403]
            assert [register(name, "admin") for name in ("three", "four", "five")] == [201, 201, 201]
            assert fleet.call("DELETE", "/v1/families/one", "admin").status_code == 204
            assert [register(name) for name in ("six", "seven")] == [201, 403]

    def test_a_token_is_approved(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, open=False)
        with fleet.client:
            fleet.call("PUT", f"/v1/families/{FAMILY}", content=family_file().to_bytes())
            token = fleet.store.token_called("contribute").id
            told = fleet.upload(honest(0))
            waiting = f"waits for an administrator: mergetta hub token approve {token}"
            assert (told["state"], told["waits"], told["reason"]) == ("pending", True, waiting)
            fleet.secrets["other"], _ = fleet.store.create_token("other", "contribute")
            seen = fleet.call("GET", EXPERTS, "other").json()[0]
            assert (seen["waits"], seen["token"]) == (True, "") and token not in seen["reason"]
            fleet.settle()
            assert fleet.states() == {"domain-0": "pending"}
            assert fleet.call("POST", f"/v1/tokens/{token}/approval", "contribute").status_code == 403
            assert fleet.call("POST", f"/v1/tokens/{'0' * 12}/approval").status_code == 404
            assert fleet.call("POST", f"/v1/tokens/{token}/approval").status_code == 204
            fleet.settle()
            assert fleet.states() == {"domain-0": "active"}
            again = fleet.upload(honest(0))
            assert (again["waits"], again["reason"]) == (False, "")

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
        told = {role: pool.call("GET", f"{BUNDLE}/summary", role).json()["summary"] for role in ("contribute", "admin")}
        assert "counts_less" not in told["contribute"] and told["admin"]["counts_less"] == {}

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
                assert answer.status_code == 403 and "'snow' would" in answer.json()["detail"]
                assert answer.json()["detail"].endswith("of one contributor.")
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
