"""The store's contract, against SQLite + a folder and against PostgreSQL + S3."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy.exc import DBAPIError

from mergetta import Bundle, Expert, MergettaError, build_bundle
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, RETIRED, Variant
from mergetta.hub.settings import Limits
from mergetta.hub.store import Store
from mergetta.hub.store.blobs import Blobs, digest_of
from mergetta.hub.store.database import Database
from mergetta.hub.store.schema import audit
from mergetta.hub.store.storage import Conflict, Damaged, NotThere, Refused, Unavailable

from .hub_parts import BASE, FAMILY, expert_of, family_file, honest, postgres, s3, task_vector

SUMMARY = {"experts": 1}


def bundle_of(seed: int) -> Bundle:
    return build_bundle(BASE, [honest(seed)], family=FAMILY)


def unsigned(data: bytes) -> None:
    return None


class StoreContract:
    """Subclasses give the fixture `store`, fresh for each test."""

    def test_a_family_is_registered_once(self, store: Store) -> None:
        data = family_file().to_bytes()
        assert store.put_family(data, FAMILY) is True
        assert store.put_family(data, FAMILY) is False
        assert store.family_file(FAMILY).frozen == ("block1.weight", "block1.bias")
        assert [family.id for family in store.families()] == [FAMILY]
        other = type(family_file())(FAMILY, {"a": np.ones(2)}).to_bytes()
        with pytest.raises(Conflict, match="other contents"):
            store.put_family(other, FAMILY)
        with pytest.raises(MergettaError, match="describes the family"):
            store.put_family(data, "another")
        with pytest.raises(NotThere, match="does not know"):
            store.family("nobody")

    def test_uploads_are_idempotent(self, registered: Store) -> None:
        data = honest(1).to_bytes()
        first, created = registered.add_expert(FAMILY, data, "t1")
        again, created_again = registered.add_expert(FAMILY, data, "t2")
        assert (created, created_again) == (True, False)
        assert first == again
        assert first.id == digest_of(data)
        assert (first.state, first.domain, first.samples, first.method) == (PENDING, "domain-1", 4000, "roid")
        assert registered.blob(first.id) == data
        assert registered.family(FAMILY).generation == 1

    def test_concurrent_uploads_are_all_there_once(self, registered: Store) -> None:
        contents = [honest(seed).to_bytes() for seed in range(25)] * 3
        with ThreadPoolExecutor(12) as pool:
            results = list(pool.map(lambda data: registered.add_expert(FAMILY, data, "t"), contents))
        assert sum(created for _, created in results) == 25
        assert {e.id for e in registered.experts(FAMILY)} == {digest_of(data) for data in contents}
        assert registered.family(FAMILY).generation == 25

    def test_unusable_uploads_leave_nothing(self, registered: Store) -> None:
        wrong_shape = type(honest(0))({"stem.weight": np.ones(3)}, FAMILY, "fog")
        for data in (b"", b"rubbish" * 50, wrong_shape.to_bytes(), expert_of(task_vector(0), family="x").to_bytes()):
            with pytest.raises(MergettaError):
                registered.add_expert(FAMILY, data, "t")
        assert registered.experts(FAMILY) == []
        assert registered.family(FAMILY).generation == 0

    def test_moments_that_no_domain_has(self, registered: Store) -> None:
        far = {"stem.running_mean": 1e3, "stem.running_var": 1e38}
        for changes in (["stem.running_mean"], ["stem.running_var"], ["stem.running_mean", "stem.running_var"]):
            groups = {**honest(0).groups, **{name: np.full(8, far[name], np.float32) for name in changes}}
            with pytest.raises(MergettaError, match=r"moments (are not of this family|that are too large)"):
                registered.add_expert(FAMILY, Expert(groups, FAMILY, "fog").to_bytes(), "t")
        assert registered.experts(FAMILY) == []

    @pytest.mark.parametrize("kind", ["signature", "features"])
    @pytest.mark.parametrize(
        ("moments", "sentence"),
        [
            (np.stack([np.full(3, -1e30), np.ones(3)]), "diverged"),
            (np.stack([np.zeros(3), np.full(3, 1e30)]), "diverged"),
            (np.ones((2, 2**16 + 1)), "more than 65536 channels"),
        ],
    )
    def test_signatures_that_no_network_has(
        self, registered: Store, kind: str, moments: np.ndarray, sentence: str
    ) -> None:
        with pytest.raises(MergettaError, match=f"This expert's {kind} has .*{sentence}"):
            registered.add_expert(FAMILY, replace(honest(0), **{kind: moments}).to_bytes(), "t")
        assert registered.experts(FAMILY) == []

    def test_how_far_moments_are_apart_is_recorded(self, registered: Store) -> None:
        entry, _ = registered.add_expert(FAMILY, expert_of(task_vector(0), apart=0.5).to_bytes(), "t")
        layers = np.frombuffer(registered.expert(entry.id).layers, np.float32)
        assert layers == pytest.approx([0.5], rel=1e-3)

    def test_people_overrule_the_screening(self, registered: Store) -> None:
        expert, _ = registered.add_expert(FAMILY, honest(1).to_bytes(), "t")
        registered.judge(FAMILY, {expert.id: (QUARANTINED, "odd")})
        assert registered.expert(expert.id).reason == "odd"
        registered.decide(expert.id, ACTIVE, "known device")
        registered.judge(FAMILY, {expert.id: (QUARANTINED, "odd")})
        generation = registered.family(FAMILY).generation
        assert registered.decide(expert.id, ACTIVE, "again").reason == "known device"
        assert registered.family(FAMILY).generation == generation  # the same decision changes nothing
        assert registered.expert(expert.id).state == ACTIVE
        assert registered.counts(FAMILY) == {ACTIVE: 1}
        registered.decide(expert.id, RETIRED, "")
        with pytest.raises(Conflict):
            registered.decide(expert.id, ACTIVE, "")
        with pytest.raises(MergettaError, match="can be made"):
            registered.decide(expert.id, PENDING, "")

    def test_changes_can_be_followed(self, registered: Store) -> None:
        ids = [registered.add_expert(FAMILY, honest(seed).to_bytes(), "t")[0].id for seed in range(3)]
        assert [e.id for e in registered.experts(FAMILY)] == ids
        assert [e.id for e in registered.experts(FAMILY, limit=2)] == ids[1:]
        assert [e.id for e in registered.experts(FAMILY, revision=3)] == ids[2:]
        registered.decide(ids[0], ACTIVE, "")
        assert {e.id for e in registered.experts(FAMILY, revision=4)} == {ids[0]}
        registered.judge(FAMILY, {ids[0]: (QUARANTINED, ""), ids[1]: (ACTIVE, "")})  # the first was decided
        assert {e.id: e.revision for e in registered.experts(FAMILY)} == {ids[0]: 4, ids[1]: 4, ids[2]: 3}
        assert registered.expert(ids[0]).state == ACTIVE
        assert [e.id for e in registered.experts(FAMILY, token="t", before=registered.expert(ids[2]).created)] == ids[
            :2
        ]
        assert registered.retire_all("t", "revoked") == 3
        assert registered.counts(FAMILY) == {RETIRED: 3}

    def test_the_newest_bundle_is_current(self, registered: Store) -> None:
        whole = Variant()
        assert registered.current(FAMILY, whole) is None
        for generation, seed in ((2, 1), (5, 2), (4, 3)):  # a slow builder comes late
            registered.publish(FAMILY, whole, generation, bundle_of(seed), SUMMARY, lambda data: "signed")
        current = registered.current(FAMILY, whole)
        assert current is not None
        assert (current.generation, current.signature) == (5, "signed")
        assert registered.blob(current.id) == bundle_of(2).to_bytes()
        assert registered.bundle(current.id) == current
        with pytest.raises(NotThere):
            registered.bundle("0" * 64)
        assert registered.family(FAMILY).built == 5
        registered.publish(FAMILY, whole, 5, bundle_of(3), SUMMARY, unsigned)  # two builders at once: the first counts
        assert registered.current(FAMILY, whole) == current
        registered.publish(FAMILY, whole, 4, None, {}, unsigned)
        assert registered.current(FAMILY, whole) == current  # a late "nothing is left" takes nothing newer away
        registered.publish(FAMILY, whole, 6, None, {}, unsigned)
        assert registered.current(FAMILY, whole) is None

    def test_old_bundles_are_forgotten(self, registered: Store) -> None:
        for generation in range(1, 26):
            registered.publish(FAMILY, Variant(), generation, bundle_of(generation), SUMMARY, unsigned)
        assert [b.generation for b in registered.history(FAMILY)] == list(range(6, 26))
        registered.blob(digest_of(bundle_of(6).to_bytes()))
        with pytest.raises(NotThere):
            registered.blob(digest_of(bundle_of(5).to_bytes()))

    def test_variants(self, registered: Store) -> None:
        without_fog, without_mine = Variant.of(["fog", "fog"]), Variant.of(token="me")
        assert Variant.of(["b", "a"]).key == Variant.of(["a", "b"]).key != Variant.of(["a"]).key
        assert registered.want(FAMILY, without_fog) is False
        assert registered.want(FAMILY, without_fog) is True
        assert registered.wanted(FAMILY) == [(without_fog, -1)]
        registered.publish(FAMILY, without_fog, 2, bundle_of(2), SUMMARY, unsigned)
        assert registered.wanted(FAMILY) == [(without_fog, 2)]
        assert registered.variant_built(FAMILY, without_fog) == 2
        assert registered.variant_built(FAMILY, without_mine) == -1
        assert registered.current(FAMILY, Variant()) is None

    def test_a_consumer_does_not_use_up_the_variants(self, registered: Store) -> None:
        most = registered.limits.variants_per_token
        for i in range(most):
            registered.want(FAMILY, Variant.of([f"{i}"]), "greedy")
        assert registered.want(FAMILY, Variant.of(["0"]), "greedy")
        with pytest.raises(Conflict, match=f"asked for {most} variants"):
            registered.want(FAMILY, Variant.of(["another"]), "greedy")
        assert registered.want(FAMILY, Variant.of(["another"]), "modest") is False
        assert registered.want(FAMILY, Variant.of(["another"]), "greedy")

    def test_one_builder_at_a_time(self, registered: Store) -> None:
        assert registered.lease(FAMILY, "a", 60)
        assert registered.lease(FAMILY, "a", 60)
        assert not registered.lease(FAMILY, "b", 60)
        registered.release("a")
        assert registered.lease(FAMILY, "b", 60)
        assert registered.lease(FAMILY, "c", 1)  # 60 seconds would be a clock that was wrong

    def test_the_audit_log_only_grows(self, store: Store) -> None:
        _, token = store.create_token("camera", "consume")
        store.revoke_token(token.id, by=token.id)
        for change in (audit.delete(), audit.update().values(actor="nobody")):
            with pytest.raises(DBAPIError, match="only grows"), store.database.write() as connection:
                connection.execute(change)
        latest, first = store.audit()
        assert (latest.action, latest.name, latest.subject) == ("revoke token", "camera", token.id)
        assert (first.action, first.actor, first.why) == ("create token", "command line", "camera (consume)")
        assert store.audit(limit=1, before=latest.number) == [first]

    def test_sessions_end(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        secret, token = store.create_token("person", "admin", expires=4e9, families=None, device="d")
        session, other = store.open_session(token.id), store.open_session(token.id)
        assert store.find_session(session) == token and store.find_session(secret) is None
        assert store.find_token(session) is None
        store.close_session(session)
        assert store.find_session(session) is None and store.find_session(other) == token
        store.revoke_token(token.id)
        assert store.find_session(other) is None
        assert (store.count_revoked(), store.revoked()) == (1, {token.id})
        monkeypatch.setattr("mergetta.hub.store.tokens.SESSION_SECONDS", -1.0)
        _, another = store.create_token("person", "admin")
        assert store.find_session(store.open_session(another.id)) is None
        store.note_use({another.id: 5.0})
        assert store.tokens()[-1].last_used == 5.0

    def test_tokens_are_stored_hashed(self, store: Store) -> None:
        secret, token = store.create_token("camera", "consume", rate=3)
        assert store.find_token(secret) == token
        assert store.find_token(secret + "x") is None
        with store.database.read() as connection:
            rows = connection.exec_driver_sql("SELECT * FROM tokens").all()
        assert secret not in repr(rows)
        store.revoke_token(token.id)
        assert store.find_token(secret) is None
        assert store.tokens()[0].revoked is not None
        with pytest.raises(MergettaError, match="role"):
            store.create_token("x", "king")
        with pytest.raises(NotThere):
            store.revoke_token("nobody")

    def test_a_token_is_found_by_what_people_call_it(self, store: Store) -> None:
        made = {name: store.create_token(name, "contribute")[1].id for name in ("dock", "dock-3", "gate", "gatehouse")}
        assert {name: store.token_called(name).id for name in made} == made
        assert store.token_called(made["gate"]).name == "gate"
        assert store.token_called("gateh").id == store.token_called(made["gatehouse"][:11]).id == made["gatehouse"]
        for word, problem in (("doc", "2 tokens are called 'doc' or begin so"), ("door", "no token"), ("", "no token")):
            with pytest.raises(MergettaError, match=problem):
                store.token_called(word)
        store.revoke_token(made["dock"])
        assert store.token_called("doc").id == made["dock-3"]
        again = store.create_token("dock", "contribute")[1].id
        assert store.token_called("dock").id == again

    def test_reports_are_bounded_per_device(self, registered: Store) -> None:
        registered.reports_kept = 5
        for number in range(4):
            entries = [
                {"family": FAMILY, "device": name, "time": float(10 * number + i), "entropy": 0.1}
                for name in ("a", "b")
                for i in range(2)
            ]
            registered.add_reports(entries, "t")
        assert [d.device for d in registered.devices(FAMILY)] == ["a", "b"]
        assert [r["time"] for r in registered.reports(FAMILY, "a")] == [11.0, 20.0, 21.0, 30.0, 31.0]
        assert registered.devices(FAMILY)[0].last["time"] == 31.0
        with pytest.raises(NotThere):
            registered.add_reports([{"family": "x", "device": "a", "time": 0.0}], "t")

    def test_a_second_process_sees_the_same(self, registered: Store, reopen) -> None:  # type: ignore[no-untyped-def]
        expert, _ = registered.add_expert(FAMILY, honest(1).to_bytes(), "t")
        other = reopen()
        assert other.expert(expert.id) == expert
        assert other.blob(expert.id) == honest(1).to_bytes()
        other.close()

    def test_a_missing_or_damaged_blob_is_not_served(self, registered: Store) -> None:
        with pytest.raises(NotThere):
            registered.blob("0" * 64)
        digest = registered.put_blob(b"right")
        registered.blobs._system.pipe_file(registered.blobs.path(digest), b"wrong")
        with pytest.raises(Damaged, match="damaged"):
            registered.blob(digest)

    def test_concurrent_first_requests(self, registered: Store) -> None:
        """Of the same variant, and first reports of the same devices: one inserts, the others see it."""
        reports = [{"family": FAMILY, "device": "a", "time": 1.0, "entropy": 0.1}]
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda _: registered.want(FAMILY, Variant.of(["fog"])), range(24)))
            list(pool.map(lambda _: registered.add_reports(reports, "t"), range(24)))
        assert len(registered.wanted(FAMILY)) == 1
        assert len(registered.reports(FAMILY, "a")) == 1

    @pytest.mark.parametrize("text", ["a\x00b", "line\nbreak", "x" * 201])
    def test_text_that_a_database_or_a_page_would_choke_on(self, registered: Store, text: str) -> None:
        with pytest.raises(MergettaError, match="domain"):
            registered.add_expert(FAMILY, honest(1, text).to_bytes(), "t")
        assert registered.experts(FAMILY) == []

    def test_a_lost_or_damaged_blob_is_written_again(self, registered: Store) -> None:
        data = honest(1).to_bytes()
        expert, _ = registered.add_expert(FAMILY, data, "t")
        for break_it in (
            lambda path: registered.blobs._system.rm_file(path),
            lambda path: registered.blobs._system.pipe_file(path, b"x" * len(data)),
        ):
            break_it(registered.blobs.path(expert.id))
            registered.add_expert(FAMILY, data, "t")
            assert registered.blob(expert.id) == data

    def test_a_decision_and_the_same_upload_again_wait_for_each_other(
        self, registered: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each has taken its first row when the other wants it: rows that are taken in two orders are a deadlock."""
        data = honest(1).to_bytes()
        expert, _ = registered.add_expert(FAMILY, data, "t")
        registered.judge(FAMILY, {expert.id: (ACTIVE, "")})
        registered.blobs.delete(expert.id)
        both, change = threading.Barrier(2), registered._change

        def change_meanwhile(connection: Any, family: str) -> int:
            first = threading.current_thread().name == "decides"
            with suppress(threading.BrokenBarrierError):
                if first:
                    both.wait(1)
            generation = change(connection, family)
            with suppress(threading.BrokenBarrierError):
                if not first:
                    both.wait(1)
            return generation

        def decide() -> None:
            threading.current_thread().name = "decides"
            registered.decide(expert.id, RETIRED, "")

        monkeypatch.setattr(registered, "_change", change_meanwhile)
        with ThreadPoolExecutor(2) as threads:
            for done in (threads.submit(decide), threads.submit(registered.add_expert, FAMILY, data, "t")):
                done.result()
        assert registered.expert(expert.id).state == RETIRED

    def test_a_family_that_is_deleted_during_an_upload(
        self, registered: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, put = registered.family_file(FAMILY), registered.put_blob

        def delete_meanwhile(data: bytes, digest: str) -> str:
            registered.delete_family(FAMILY)
            return put(data, digest)

        monkeypatch.setattr(registered, "put_blob", delete_meanwhile)
        with pytest.raises(NotThere, match="register it first"):
            registered.add_expert(FAMILY, honest(1).to_bytes(), "t", file)

    def test_a_family_can_be_deleted(self, registered: Store) -> None:
        registered.add_expert(FAMILY, honest(1).to_bytes(), "t")
        registered.add_reports([{"family": FAMILY, "device": "a", "time": 1.0}], "t")
        registered.delete_family(FAMILY)
        assert registered.families() == []
        assert registered.put_family(family_file().to_bytes(), FAMILY)
        assert registered.experts(FAMILY) == []

    def test_what_belongs_to_the_gone_is_deleted(self, registered: Store) -> None:
        expert, _ = registered.add_expert(FAMILY, honest(1).to_bytes(), "t")
        retired, _ = registered.add_expert(FAMILY, honest(2).to_bytes(), "t")
        registered.decide(retired.id, RETIRED, "")
        registered.forget_retired(FAMILY)
        assert registered.blob(retired.id)  # not yet: builders take it out of their pools first
        registered.limits = Limits(retired_days=0)
        registered.forget_retired(FAMILY)
        with pytest.raises(NotThere):
            registered.blob(retired.id)
        assert registered.add_expert(FAMILY, honest(2).to_bytes(), "t")[0].state == RETIRED
        registered.publish(FAMILY, Variant(), 1, bundle_of(301), SUMMARY, unsigned)
        family = registered.family(FAMILY)
        registered.delete_family(FAMILY)
        for digest in (expert.id, family.blob, digest_of(bundle_of(301).to_bytes())):
            with pytest.raises(NotThere):
                registered.blob(digest)

    def test_a_token_has_a_quota(self, registered: Store) -> None:
        registered.limits = Limits(experts_per_token=2, devices_per_token=1)
        first, _ = registered.add_expert(FAMILY, honest(1).to_bytes(), "t")
        registered.add_expert(FAMILY, honest(2).to_bytes(), "t")
        with pytest.raises(Refused, match="2 experts of this family"):
            registered.add_expert(FAMILY, honest(303).to_bytes(), "t")
        with pytest.raises(NotThere):
            registered.blob(digest_of(honest(303).to_bytes()))  # nothing is left of it
        assert not registered.add_expert(FAMILY, honest(1).to_bytes(), "t")[1]
        registered.add_expert(FAMILY, honest(4).to_bytes(), "another")
        registered.decide(first.id, RETIRED, "")
        with pytest.raises(Refused, match="after 7 days"):
            registered.add_expert(FAMILY, honest(303).to_bytes(), "t")
        registered.limits = Limits(experts_per_token=2, devices_per_token=1, retired_days=0)
        registered.forget_retired(FAMILY)
        assert registered.add_expert(FAMILY, honest(303).to_bytes(), "t")[1]
        report = {"family": FAMILY, "device": "a", "time": 1.0}
        registered.add_reports([report, {**report, "time": 2.0}], "t")
        with pytest.raises(Refused, match="1 devices"):
            registered.add_reports([{**report, "device": "b"}], "t")
        assert [device.device for device in registered.devices(FAMILY)] == ["a"]

    def test_devices_that_are_gone_are_forgotten(self, registered: Store) -> None:
        registered.add_reports([{"family": FAMILY, "device": "a", "time": 1.0}], "t")
        registered.forget_devices(FAMILY)
        assert len(registered.devices(FAMILY)) == 1
        registered.limits = Limits(device_days=1e-9)
        registered.forget_devices(FAMILY)
        assert registered.devices(FAMILY) == [] and registered.reports(FAMILY, "a") == []

    def test_a_token_that_is_revoked_during_its_upload(
        self, registered: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A slow upload was let in, and ends when its token is revoked: what it brings is not taken."""
        _, token = registered.create_token("slow", "contribute")
        put = registered.put_blob

        def slowly(data: bytes, digest: str) -> str:
            registered.revoke_token(token.id)
            registered.retire_all(token.id, "revoked")
            return put(data, digest)

        monkeypatch.setattr(registered, "put_blob", slowly)
        with pytest.raises(Refused, match="revoked"):
            registered.add_expert(FAMILY, honest(304).to_bytes(), token.id)
        assert registered.experts(FAMILY) == []

    def test_voices_are_shared_out(self, registered: Store) -> None:
        for seed in range(6):
            expert, _ = registered.add_expert(FAMILY, honest(seed).to_bytes(), "loud" if seed > 1 else f"t{seed}")
            registered.judge(FAMILY, {expert.id: (ACTIVE, "")})
        assert sorted(e.token for e in registered.voices(FAMILY, 4)) == ["loud", "loud", "t0", "t1"]

    def test_families_that_are_too_much(self, store: Store) -> None:
        from mergetta.family_file import FamilyFile

        base = {"a": np.ones(2)}
        deep: list = []
        for _ in range(20):
            deep = [deep]
        for file in (
            FamilyFile("f", {"a": np.ones(20_000)}),
            FamilyFile("f", {f"g{i}": np.ones(1) for i in range(5000)}),
            FamilyFile("f", base, note="x" * 3000),
            FamilyFile("f", base, preprocessing={"x": deep}),
            FamilyFile("f", base, preprocessing={"x": "y" * 20_000}),
        ):
            with pytest.raises(MergettaError):
                store.put_family(file.to_bytes(), "f")
        assert store.families() == []

    def test_ready(self, store: Store) -> None:
        store.check()

    @pytest.fixture
    def registered(self, store: Store) -> Store:
        store.put_family(family_file().to_bytes(), FAMILY)
        return store


class TestSqliteAndFolder(StoreContract):
    @pytest.fixture
    def reopen(self, tmp_path: Path):  # type: ignore[no-untyped-def]
        return lambda: Store(f"sqlite:///{tmp_path / 'hub.db'}", str(tmp_path / "blobs"))

    @pytest.fixture
    def store(self, reopen) -> Iterator[Store]:  # type: ignore[no-untyped-def]
        store = reopen()
        yield store
        store.close()

    def test_wal_and_full_sync(self, store: Store) -> None:
        with store.database.read() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2

    def test_the_tables_are_what_the_code_thinks(self, store: Store) -> None:
        from alembic.autogenerate import compare_metadata
        from alembic.migration import MigrationContext

        from mergetta.hub.store.schema import metadata

        with store.database.engine.connect() as connection:
            assert compare_metadata(MigrationContext.configure(connection), metadata) == []

    def test_experts_of_the_first_tables_are_to_be_uploaded_again(self, tmp_path: Path, reopen) -> None:  # type: ignore[no-untyped-def]
        from alembic import command
        from alembic.config import Config

        from mergetta.hub.store import migrations

        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        database = Database(f"sqlite:///{tmp_path / 'hub.db'}")
        with database.write() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "0001")
            connection.exec_driver_sql("INSERT INTO families VALUES ('f', 'b', '', '{}', 1, 1, 1.0, 1, 1, NULL, 0)")
            connection.exec_driver_sql(
                "INSERT INTO experts VALUES ('e', 'f', 'd', 'm', 1, 1, 1.0, 1.0, x'00', 'active', '', 0, 't', 1, 1, 1)"
            )
        database.close()
        store = reopen()
        (expert,) = store.experts("f")
        assert (expert.state, expert.layers) == (RETIRED, b"") and "upload again" in expert.reason
        assert store.family("f").generation == 2
        store.close()

    def test_full_disk(self, registered: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        import os

        def full(number: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(Unavailable, match="No space left"):
                registered.add_expert(FAMILY, honest(1).to_bytes(), "t")
        assert registered.experts(FAMILY) == []
        assert registered.add_expert(FAMILY, honest(1).to_bytes(), "t")[1]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with postgres(tmp_path_factory.mktemp("postgres")) as database, s3() as blobs:
        yield database.url, blobs.url


class TestPostgresAndS3(StoreContract):
    @pytest.fixture
    def reopen(self, servers: tuple[str, str]):  # type: ignore[no-untyped-def]
        return lambda: Store(*servers)

    @pytest.fixture
    def store(self, reopen) -> Iterator[Store]:  # type: ignore[no-untyped-def]
        store = reopen()
        with store.database.write() as connection:
            connection.exec_driver_sql("DROP SCHEMA public CASCADE")
            connection.exec_driver_sql("CREATE SCHEMA public")
        store.database.migrate()
        yield store
        store.close()


def test_unreachable_servers_are_said_to_be(tmp_path: Path) -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(Unavailable, match="database is not available"):
        Store("postgresql://nobody@127.0.0.1:1/none", str(tmp_path))
    with pytest.raises(MergettaError, match="SQLite or PostgreSQL"):
        Store("mysql://a@b/c", str(tmp_path))
    with pytest.raises(MergettaError, match="not the address"):
        Store("rubbish", str(tmp_path))


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "0" * 63, "0" * 64 + "\n", "G" * 64])
def test_only_digests_are_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        Blobs(str(tmp_path)).path(name)
