"""`mergetta hub check`, `backup` and `restore`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mergetta import MergettaError
from mergetta.hub.records import ACTIVE, QUARANTINED, Variant
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store, upkeep

from .hub_parts import FAMILY, honest, postgres, s3
from .test_cli import mergetta
from .test_hub_builder import Workshop


def opened(folder: Path) -> Store:
    settings = HubSettings.in_folder(folder)
    return Store(settings.database, settings.blobs)


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    shop = Workshop(tmp_path / "hub")
    for seed in range(4):
        shop.upload(honest(seed), f"t{seed}")
    shop.build()
    return shop


def test_a_sound_hub(shop: Workshop) -> None:
    shop.store.check()
    assert upkeep.check(shop.store) == []


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_what_is_lost_is_found_and_mended(shop: Workshop, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "RECENT", -1.0)
    first = shop.store.experts(FAMILY)[0]
    bundle = shop.store.current(FAMILY, Variant())
    assert bundle is not None
    shop.store.decide(first.id, QUARANTINED, "poison")
    for digest in (first.id, bundle.id, shop.store.family(FAMILY).blob):
        shop.lose(digest, how)
    unnamed = shop.store.put_blob(b"of nobody")
    problems = [finding.problem for finding in upkeep.check(shop.store)]
    assert [problem.split()[-1] for problem in problems] == [how, how, how, "nothing"]
    assert upkeep.check(shop.store, repair=True)
    assert [entry.action for entry in shop.store.audit(2)] == ["delete blob", "lose bundle"]
    assert [f.problem.split()[1] for f in upkeep.check(shop.store)] == ["file", "expert"]  # a person must
    shop.store.put_family(shop.builder._held[FAMILY].file.to_bytes(), FAMILY)
    shop.upload(honest(0), "t0")
    shop.build()
    shop.build()
    assert shop.store.expert(first.id).state == QUARANTINED  # what a person has decided stays
    assert shop.bundle().settings["experts"] == 3
    assert upkeep.check(shop.store) == []
    assert unnamed not in shop.store.blobs.paths()


def test_what_a_crash_leaves_half_written_is_found(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = shop.store.experts(FAMILY)[0].id
    half = Path(shop.store.blobs.path(digest)).with_name(f".{digest}.17.00c0ffee")
    half.write_bytes(b"half")
    assert upkeep.check(shop.store) == []  # it may be on its way
    monkeypatch.setattr(upkeep, "RECENT", -1.0)
    assert [finding.problem for finding in upkeep.check(shop.store, repair=True)] == [
        f"the blob {half.name} belongs to nothing"
    ]
    assert upkeep.check(shop.store) == [] and not half.exists()


def test_backup_and_restore_under_load(shop: Workshop, tmp_path: Path) -> None:
    """What was acknowledged before the copy began is in it; the bundle, which is not, is built again and is newer."""
    secret, token = shop.store.create_token("camera", "consume")
    shop.store.add_reports([{"family": FAMILY, "device": "a", "time": float(i)} for i in range(3)], token.id)
    before = {e.id for e in shop.store.experts(FAMILY)}
    stop = threading.Event()

    def load() -> None:
        for seed in range(100, 400):
            if stop.is_set():
                return
            shop.upload(honest(seed), "load")
            shop.build()

    thread = threading.Thread(target=load)
    thread.start()
    try:
        assert upkeep.backup(shop.store, opened(tmp_path / "copy")) == 0
    finally:
        stop.set()
        thread.join()
    restored = Workshop.__new__(Workshop)
    restored.store = opened(tmp_path / "new")
    assert upkeep.restore(opened(tmp_path / "copy"), restored.store) == 0
    assert before <= {e.id for e in restored.store.experts(FAMILY)}
    assert restored.store.find_token(secret) == token
    assert [r["time"] for r in restored.store.reports(FAMILY, "a")] == [0.0, 1.0, 2.0]
    assert upkeep.check(restored.store) == []
    restored.builder = type(shop.builder)(restored.store, shop.settings)
    restored.build()
    old, new = shop.bundle().settings, restored.bundle().settings
    assert new["experts"] == restored.store.counts(FAMILY)[ACTIVE] >= 4
    assert new["epoch"] >= old["epoch"]
    with pytest.raises(MergettaError, match="already"):
        upkeep.restore(opened(tmp_path / "copy"), restored.store)


def test_from_postgres_and_back(shop: Workshop, tmp_path: Path) -> None:
    with postgres(tmp_path) as database, s3() as blobs:
        store = Store(database.url, blobs.url)
        shop.store.add_reports([{"family": FAMILY, "device": "a", "time": 1.0}], "t")
        upkeep.restore(shop.store, store)
        store.add_reports([{"family": FAMILY, "device": "a", "time": 2.0}], "t")  # numbered after those restored
        upkeep.backup(store, opened(tmp_path / "copy"))
        store.close()
    copy = opened(tmp_path / "copy")
    assert {e.id for e in copy.experts(FAMILY)} == {e.id for e in shop.store.experts(FAMILY)}
    assert [r["time"] for r in copy.reports(FAMILY, "a")] == [1.0, 2.0]
    assert upkeep.check(copy) == []


def test_commands(shop: Workshop, tmp_path: Path) -> None:
    assert "all is as it should be" in mergetta("hub", "check", cwd=tmp_path).stdout
    expert = shop.store.experts(FAMILY)[0].id
    assert "a copy" in mergetta("hub", "backup", "copy", cwd=tmp_path).stdout
    shop.lose(expert, "damaged")
    result = mergetta("hub", "check", cwd=tmp_path)
    assert result.returncode == 1 and f"the expert {expert}" in result.stdout
    assert mergetta("hub", "check", "--repair", cwd=tmp_path).returncode == 0
    assert mergetta("hub", "check", cwd=tmp_path).returncode == 1  # until it is uploaded again
    result = mergetta("hub", "restore", "copy", "--folder", "new", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert opened(tmp_path / "new").blob(expert) == honest(0).to_bytes()
    result = mergetta("hub", "restore", "nowhere", "--folder", "new", cwd=tmp_path)
    assert result.returncode == 2 and "There is no hub in the folder nowhere" in result.stderr
    token = shop.store.create_token("new", "contribute")[1].id
    assert mergetta("hub", "token", "approve", token, cwd=tmp_path).returncode == 0
    assert token not in shop.store.unapproved()
