"""The hub over HTTP: the way of an expert from its upload to a bundle."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np

from mergetta import Expert
from mergetta.hub.settings import Recipe

from .fleet import BUNDLE, EXPERTS, Fleet, assert_same_merge
from .hub_parts import FAMILY, SHARED, expert_of, honest, task_vector


class TestTheWayOfAnExpert:
    def test_from_upload_to_bundle(self, pool: Fleet) -> None:
        assert_same_merge(pool.bundle(), [honest(seed) for seed in range(6)])
        assert pool.bundle().settings["loss"] == "roid"
        assert set(pool.states().values()) == {"active"}
        family = pool.call("GET", f"/v1/families/{FAMILY}", "consume").json()
        assert family["experts"] == {"active": 6} and family["up_to_date"]
        summary = pool.call("GET", f"{BUNDLE}/summary").json()
        assert summary["id"] == family["bundle"] and summary["experts"] == 6
        assert all(0 < share <= 1 + 1e-6 for share in summary["summary"]["energy"].values())

    def test_the_same_content_is_the_same_expert(self, pool: Fleet) -> None:
        again = pool.call("POST", EXPERTS, "contribute", content=honest(0).to_bytes())
        assert again.status_code == 200
        assert again.json()["id"] == hashlib.sha256(honest(0).to_bytes()).hexdigest()
        assert len(pool.call("GET", EXPERTS).json()) == 6

    def test_retiring_is_exact(self, pool: Fleet) -> None:
        victim = pool.upload(honest(3))["id"]
        assert pool.call("POST", f"/v1/experts/{victim}/state", json={"state": "retired"}).status_code == 200
        pool.settle()
        assert_same_merge(pool.bundle(), [honest(seed) for seed in range(6) if seed != 3])

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

    def test_what_has_learnt_nothing_is_refused(self, fleet: Fleet) -> None:
        fleet.register()
        answer = fleet.call("POST", EXPERTS, "contribute", content=expert_of(0 * task_vector(0)).to_bytes())
        assert answer.status_code == 422 and "has learnt nothing" in answer.json()["detail"]

    def test_it_can_be_switched_off(self, tmp_path: Path) -> None:
        fleet = Fleet(tmp_path, screen=False)
        with fleet.client:
            fleet.register()
            for expert in (*(honest(seed) for seed in range(6)), expert_of(-task_vector(1), "odd")):
                fleet.upload(expert)
            fleet.settle()
            assert fleet.states()["odd"] == "active"
