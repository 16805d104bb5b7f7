"""Store and builder together: weights by contributor, approval, and what happens when something is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergetta import Bundle, Expert, build_bundle
from mergetta.groups import learnable
from mergetta.hub import newcomers
from mergetta.hub.builder import Builder
from mergetta.hub.held_pool import EXACT, HeldPool
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, RETIRED, Variant
from mergetta.hub.settings import HubSettings, Limits
from mergetta.hub.state import Hub
from mergetta.hub.store import Store
from mergetta.hub.store.storage import NotThere, Unavailable

from .hub_parts import BASE, FAMILY, SHARED, expert_of, family_file, honest, task_vector

OTHER = "later-0123456789abcdef"


class Workshop:
    """A store and a builder that builds when told."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.settings = HubSettings.in_folder(folder, **{"probe": False, **options})
        self.store = Store(self.settings.database, self.settings.blobs, merge_all=self.settings.open)
        self.builder = Builder(self.store, self.settings)
        self.store.put_family(family_file().to_bytes(), FAMILY)

    def upload(self, expert: Expert, token: str = "t") -> str:
        return self.store.add_expert(expert.family, expert.to_bytes(), token)[0].id

    def build(self) -> None:
        self.builder._rest.clear()
        self.builder.build_all()
        self.store.release(self.builder.owner)

    def bundle(self, family: str = FAMILY) -> Bundle:
        current = self.store.current(family, Variant())
        assert current is not None
        return Bundle.from_bytes(self.store.blob(current.id))

    def lose(self, digest: str, how: str) -> None:
        path = Path(self.store.blobs.path(digest))
        path.unlink() if how == "missing" else path.write_bytes(b"x" * 100)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Workshop]:
    shop = Workshop(tmp_path)
    yield shop
    shop.store.close()


def assert_merged(found: Bundle, experts: list[Expert], tokens: list[str]) -> None:
    wanted = build_bundle(BASE, experts, initial=1.4 / len(experts), family=FAMILY, contributors=tokens)
    for name, vector in wanted.merge().items():
        np.testing.assert_allclose(found.merge()[name], vector, atol=1e-5)
        np.testing.assert_allclose(found.member_tasks[name], wanted.member_tasks[name], atol=1e-4)
    assert found.members is not None and wanted.members is not None
    assert found.members.listed() == wanted.members.listed()


class TestWeights:
    def test_each_contributor_weighs_the_same(self, shop: Workshop) -> None:
        """As experts come, in any order, and go."""
        experts, tokens = [honest(seed) for seed in range(9)], ["a", "b", "a", "c", "a", "a", "b", "c", "a"]
        ids = []
        for expert, token in zip(experts, tokens, strict=True):
            ids.append(shop.upload(expert, token))
            shop.build()
        assert_merged(shop.bundle(), experts, tokens)
        assert shop.bundle().settings["contributors"] == 3
        shop.store.decide(ids[4], RETIRED, "")
        shop.build()
        left = [i for i in range(9) if i != 4]
        assert_merged(shop.bundle(), [experts[i] for i in left], [tokens[i] for i in left])

    def test_many_uploads_are_weighed_now_and_then(self, shop: Workshop) -> None:
        """Beyond 64 of one contributor, not all of them are read again for each new one."""
        shop.upload(honest(999), "few")
        for seed in range(EXACT + 20):
            shop.upload(honest(seed), "many")
            if seed >= EXACT - 2:
                shop.build()
        weights, number = shop.builder._held[FAMILY].weights, EXACT + 20
        assert weights["few"] == 1.0
        assert weights["many"] != 1 / number and abs(weights["many"] * number - 1) <= 1 / 8

    def test_nobody_gains_by_being_long(self, shop: Workshop) -> None:
        """Twice as long is not odd yet, and is merged as if it were about as long as the others."""
        for seed in range(5):
            shop.upload(honest(seed), f"t{seed}")
        shop.build()
        long = shop.upload(expert_of(2 * task_vector(9)), "long")
        shop.build()
        assert shop.store.expert(long).reason == ""
        found = shop.bundle().member_tasks
        lengths = np.sqrt(sum((found[name] ** 2).sum(axis=1) for name in learnable(BASE)))
        assert 1.0 < lengths[5] / np.median(lengths[:5]) < 1.4
        shop.store.decide(long, RETIRED, "")
        shop.build()
        assert_merged(shop.bundle(), [honest(seed) for seed in range(5)], [f"t{seed}" for seed in range(5)])

    def test_a_minority_that_agrees_counts_less(self, shop: Workshop) -> None:
        """Nothing about each of them is odd; as soon as they are gone, everybody counts the same again."""
        seeds = range(16)
        for seed in seeds:
            shop.upload(honest(seed), f"t{seed:02}")
        shop.build()
        aside = 0.1 * np.random.default_rng(77).normal(size=SHARED.size)
        evil = [shop.upload(expert_of(0.04 * SHARED + 1.2 * aside + 1e-3 * i), f"evil{i}") for i in range(5)]
        shop.build()
        held = shop.builder._held[FAMILY]
        assert shop.store.counts(FAMILY) == {ACTIVE: 21}
        assert {f"evil{i}" for i in range(5)} <= set(held.less) and max(held.less[f"evil{i}"] for i in range(5)) <= 0.5
        assert len(held.less) < 10 and held.weights["evil0"] == held.less["evil0"]
        anew = HeldPool(shop.store, held.settings, held.family, held.file, lambda: None)
        anew.catch_up(held.family)
        for name, vector in anew.bundle([])[0].merge().items():
            np.testing.assert_allclose(shop.bundle().merge()[name], vector, atol=1e-5)
        for expert in evil:
            shop.store.decide(expert, RETIRED, "")
        shop.build()
        assert held.less == {}
        experts, tokens = [honest(seed) for seed in seeds], [f"t{seed:02}" for seed in seeds]
        wanted = build_bundle(BASE, experts, initial=1.4 / len(experts), family=FAMILY, contributors=tokens).merge()
        for name, vector in shop.bundle().merge().items():
            np.testing.assert_allclose(vector, wanted[name], atol=1e-5)

    def test_fifty_evil_uploads_are_one_voice(self, shop: Workshop) -> None:
        for seed in range(6):
            shop.upload(honest(seed), f"t{seed}")
        for seed in range(50):
            shop.upload(expert_of(-task_vector(seed), f"evil-{seed}"), "evil")
        shop.build()
        assert shop.store.counts(FAMILY) == {ACTIVE: 6, QUARANTINED: 50}


class TestApproval:
    def test_experts_wait_for_probe_images(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Told once. What a person accepts does not wait."""
        shop = Workshop(tmp_path, probe=True)
        for number in range(2):
            shop.upload(honest(number))
            shop.build()
        assert [record.message for record in caplog.records].count(
            f"{FAMILY} has no probe images, so its experts wait: mergetta hub probe"
        ) == 1
        assert shop.store.counts(FAMILY) == {PENDING: 2} and shop.store.current(FAMILY, Variant()) is None
        shop.store.decide(shop.upload(honest(2)), ACTIVE, "", "admin")
        shop.build()
        assert shop.store.counts(FAMILY) == {PENDING: 2, ACTIVE: 1} and shop.bundle().settings["contributors"] == 1

    @pytest.mark.parametrize("options", [{"open": True}, {"screen": False}, {"probe": False}])
    def test_who_need_not_wait(self, tmp_path: Path, options: dict[str, bool]) -> None:
        shop = Workshop(tmp_path, **{"probe": True, **options})
        shop.upload(honest(0))
        shop.build()
        assert shop.store.counts(FAMILY) == {ACTIVE: 1}

    def test_uploads_wait_for_their_token(self, shop: Workshop) -> None:
        _, known = shop.store.create_token("known", "contribute", approved=True)
        _, new = shop.store.create_token("new", "contribute")
        _, admin = shop.store.create_token("admin", "admin")
        first = shop.upload(honest(0), known.id)
        second = shop.upload(honest(1), new.id)
        third = shop.upload(honest(2), admin.id)
        shop.build()
        assert [shop.store.expert(expert).state for expert in (first, second, third)] == [ACTIVE, PENDING, ACTIVE]
        assert shop.bundle().settings["experts"] == 2
        shop.store.approve_token(new.id)
        shop.build()
        assert shop.store.expert(second).state == ACTIVE and shop.bundle().settings["experts"] == 3
        with pytest.raises(NotThere, match="no token"):
            shop.store.approve_token("nobody")

    def test_who_waits_has_no_voice(self, shop: Workshop) -> None:
        for seed in range(20):
            _, token = shop.store.create_token(f"sybil-{seed}", "contribute")
            shop.upload(expert_of(-task_vector(seed), "evil"), token.id)
        for seed in range(4):
            shop.upload(honest(seed), f"t{seed}")
        shop.build()
        assert shop.store.counts(FAMILY) == {ACTIVE: 4, PENDING: 20}

    def test_who_waits_changes_no_bundle(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(newcomers, "RESCREEN", 2)
        shop.upload(honest(0), "t0")
        shop.build()
        before = shop.bundle().digest
        _, token = shop.store.create_token("new", "contribute")
        for seed in range(1, 5):
            shop.store.decide(shop.upload(honest(seed), token.id), RETIRED, "")
            shop.upload(honest(10 + seed), token.id)
        shop.build()
        assert shop.bundle().digest == before
        shop.store.judge(FAMILY, {shop.upload(honest(20), "t1"): (QUARANTINED, "odd")})
        shop.build()  # nor does it keep the hub from looking again
        assert shop.store.counts(FAMILY) == {ACTIVE: 2, PENDING: 4, RETIRED: 4}

    def test_an_open_hub_waits_for_nobody(self, tmp_path: Path) -> None:
        shop = Workshop(tmp_path, open=True)
        _, token = shop.store.create_token("new", "contribute")
        shop.upload(honest(0), token.id)
        shop.build()
        assert shop.store.counts(FAMILY) == {ACTIVE: 1}


class TestLosses:
    def test_a_family_that_was_deleted_and_registered_again(self, shop: Workshop) -> None:
        for seed in range(3):
            shop.upload(honest(seed))
        shop.build()
        shop.store.delete_family(FAMILY)
        shop.store.put_family(family_file().to_bytes(), FAMILY)
        shop.upload(honest(7))
        shop.build()
        assert_merged(shop.bundle(), [honest(7)], ["t"])

    @pytest.mark.parametrize("how", ["missing", "damaged"])
    def test_a_lost_expert_stops_nobody(self, shop: Workshop, how: str) -> None:
        """Neither the others of its family nor the families after it; uploaded again, it is merged again."""
        shop.store.put_family(family_file(OTHER).to_bytes(), OTHER)
        ids = [shop.upload(honest(seed)) for seed in range(3)]
        shop.upload(expert_of(task_vector(5), family=OTHER))
        shop.lose(ids[1], how)
        shop.build()
        assert_merged(shop.bundle(), [honest(0), honest(2)], ["t", "t"])
        assert shop.bundle(OTHER).settings["experts"] == 1
        shop.upload(honest(1))
        shop.build()
        assert {name: shop.store.expert(name).state for name in ids} == dict.fromkeys(ids, ACTIVE)
        assert shop.bundle().settings["experts"] == 3

    def test_an_expert_of_an_older_format_stops_nobody(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        old = shop.upload(honest(0))
        shop.upload(honest(1))
        blob = shop.store.blob
        monkeypatch.setattr(shop.store, "blob", lambda digest: b"old" if digest == old else blob(digest))
        shop.build()
        assert shop.bundle().settings["experts"] == 1

    @pytest.mark.parametrize("how", ["missing", "damaged"])
    def test_an_expert_that_is_lost_after_it_was_merged(self, shop: Workshop, how: str) -> None:
        """It cannot be taken out of the sums any more, which are then made anew."""
        ids = [shop.upload(honest(seed)) for seed in range(4)]
        shop.build()
        shop.lose(ids[1], how)
        shop.store.decide(ids[1], RETIRED, "")
        shop.build()
        shop.build()
        assert_merged(shop.bundle(), [honest(seed) for seed in (0, 2, 3)], ["t"] * 3)

    @pytest.mark.parametrize("how", ["missing", "damaged"])
    def test_a_lost_family_file_stops_only_its_family(self, shop: Workshop, how: str) -> None:
        shop.store.put_family(family_file(OTHER).to_bytes(), OTHER)
        shop.upload(honest(0))
        shop.upload(expert_of(task_vector(5), family=OTHER))
        shop.lose(shop.store.family(FAMILY).blob, how)
        shop.build()
        assert shop.bundle(OTHER).settings["experts"] == 1
        shop.store.put_family(family_file().to_bytes(), FAMILY)  # the same file mends it
        shop.build()
        assert shop.bundle().settings["experts"] == 1

    @pytest.mark.parametrize("how", ["missing", "damaged"])
    def test_a_lost_bundle_is_built_again(self, tmp_path: Path, how: str) -> None:
        shop = Workshop(tmp_path)
        shop.upload(honest(0))
        shop.build()
        before = shop.store.current(FAMILY, Variant())
        assert before is not None
        shop.lose(before.id, how)
        shop.builder = Builder(shop.store, shop.settings)  # a hub that starts
        shop.build()
        again = shop.store.current(FAMILY, Variant())
        assert again is not None and again.generation > before.generation
        assert_merged(shop.bundle(), [honest(0)], ["t"])

        shop.lose(again.id, how)
        hub = Hub(shop.settings)  # one that runs, and is asked for it
        with pytest.raises(Unavailable, match="built again"):
            hub.bundle(FAMILY, Variant())
        hub.builder.build_all()
        served = hub.bundle(FAMILY, Variant())
        assert served is not None
        assert_merged(Bundle.from_bytes(served.data), [honest(0)], ["t"])
        hub.store.close()


class TestGenerations:
    def test_a_family_that_begins_anew_is_newer(self, shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
        """Devices refuse what is older than what they had; epoch and generation are in the signed bytes."""
        for seed in range(3):
            shop.upload(honest(seed))
        shop.build()
        before = shop.bundle().settings
        shop.store.delete_family(FAMILY)
        monkeypatch.setattr("time.time", lambda: 2e9)
        shop.store.put_family(family_file().to_bytes(), FAMILY)
        shop.upload(honest(0))
        shop.build()
        after = shop.bundle().settings
        assert after["generation"] < before["generation"]
        assert (after["epoch"], after["generation"]) > (before["epoch"], before["generation"])

    def test_bundles_expire_if_asked_for_and_are_renewed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shop = Workshop(tmp_path, bundle_days=2)
        monkeypatch.setattr("time.time", lambda: 1000.0)
        shop.upload(honest(0))
        shop.build()
        assert shop.bundle().settings["expires"] == 1000.0 + 2 * 86400
        monkeypatch.setattr("time.time", lambda: 1100.0 + 86400)
        Builder(shop.store, shop.settings).build_all()
        assert shop.bundle().settings["expires"] == 1100.0 + 3 * 86400


def test_what_is_kept_no_longer_is_swept(tmp_path: Path) -> None:
    shop = Workshop(tmp_path)
    expert = shop.upload(honest(0))
    shop.store.decide(expert, RETIRED, "")
    shop.store.limits = Limits(retired_days=0)
    shop.build()
    with pytest.raises(NotThere):
        shop.store.blob(expert)
