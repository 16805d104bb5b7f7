"""The link to the hub: newer bundles, reports, and a loop that never waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergetta import Bundle, MergettaError, build_bundle
from mergetta.device import hub_link
from mergetta.device.hub_client import HubClient
from mergetta.device.hub_link import HubLink

from .stub_hub import FAMILY, StubHub, cached, id_of, make_bundle, until


class TestLink:
    def test_newer_bundles_are_told_once_and_old_ones_kept_until_told(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path
    ) -> None:
        it = link()
        assert id_of(it.start()) == it.id
        first = it.id
        it.sync()
        assert it.newer() is None
        second = hub.offer(make_bundle(1))
        it.sync()
        newer = it.newer()
        assert newer is not None
        assert (newer[1], id_of(newer[0])) == (second, second)
        assert it.newer() is None
        assert cached(tmp_path) == {first, second}
        third = hub.offer(make_bundle(2))
        it.sync()
        it.keep(second)
        assert cached(tmp_path) == {second, third}
        hub.offer(make_bundle(1))  # the hub goes back to what we have
        it.sync()
        assert it.newer() is None
        it.keep(second)
        assert cached(tmp_path) == {second}

    def test_a_bundle_of_another_source_model_is_refused(self, hub: StubHub, link: Callable[..., HubLink]) -> None:
        first = make_bundle(0)
        it = link()
        it.start()
        foreign = {name: vector + 1 for name, vector in first.base.items()}
        hub.offer(replace(make_bundle(1), base=foreign))
        it.sync()
        assert it.newer() is None and it.refused == 1

    def test_bundles_without_some_domains_are_kept_apart(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path
    ) -> None:
        link().start()
        hub.down()
        with pytest.raises(MergettaError, match="does not hold a bundle of this family"):
            link(exclude=("fog",)).start()

    def test_an_older_bundle_is_refused(self, hub: StubHub, link: Callable[..., HubLink]) -> None:
        """Signed then, it still verifies; but a device does not go back, not even after a restart."""

        def aged(seed: int, epoch: int, generation: int, expires: float | None = None) -> Bundle:
            bundle = make_bundle(seed)
            age = {"epoch": epoch, "generation": generation, "expires": expires}
            return replace(bundle, settings={**bundle.settings, **age})

        held = hub.offer(aged(0, 10, 5))
        it = link()
        it.start()
        for older in (aged(1, 10, 4), aged(2, 9, 99), make_bundle(3), aged(4, 10, 6, expires=1.0)):
            hub.offer(older)
            it.sync()
            assert it.newer() is None
        assert it.refused == 2  # older ones are told of once
        assert id_of(link().start()) == held
        newer = hub.offer(aged(5, 11, 1, expires=time.time() + 100))
        it.sync()
        found = it.newer()
        assert found is not None and found[1] == newer

    def test_a_token_that_is_refused_is_told_once(
        self, hub: StubHub, link: Callable[..., HubLink], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Bundles and reports have the same trouble."""
        it = link()
        it.start()
        it.report({"images": 1})
        for _ in range(2):
            hub.misbehave = [401, 401]
            it.sync()
        assert ["asks for a token" in record.getMessage() for record in caplog.records] == [True]
        it.sync()
        assert len(hub.reports) == 1

    def test_starts_offline_from_the_cache(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = link()
        first.start()
        os.utime(first.cache.path(first.id), (1, 1))
        second = hub.offer(make_bundle(1))
        first.sync()
        (tmp_path / "hub" / f"bundle-{'0' * 64}.safetensors").write_bytes(b"damaged")
        hub.down()
        again = link()
        assert id_of(again.start()) == second
        assert "Cannot reach the hub" in caplog.text
        assert id_of(link().start(first.id)) == first.id  # what the state refers to
        with pytest.raises(MergettaError, match="does not hold the bundle 111111111111 that the state refers to"):
            link().start("1" * 64)
        again.cache.prune(set())
        with pytest.raises(MergettaError, match=r"Cannot reach the hub.*does not hold a bundle of this family\."):
            link().start()

    def test_whoever_has_a_bundle_does_not_wait_for_the_hub(
        self, hub: StubHub, link: Callable[..., HubLink], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = link()
        first.start()
        second = hub.offer(make_bundle(1))
        released = threading.Event()

        class Hanging(HubClient):
            def bundle(self, *arguments: Any, **options: Any) -> Any:
                released.wait(60)
                return super().bundle(*arguments, **options)

        monkeypatch.setattr(hub_link, "HURRY", 0.01)
        it = link(refresh=60, client=Hanging(hub.url))
        assert id_of(it.start()) == first.id and not released.is_set()
        released.set()
        until(lambda: it._newer)
        assert it.newer()[1] == second  # type: ignore[index]
        monkeypatch.setattr(hub_link, "HURRY", 60.0)
        first.cache.path(second).unlink()
        assert id_of(link(refresh=60).start()) == second  # a hub that answers is heard

    def test_the_bundle_of_the_state_comes_first(self, hub: StubHub, link: Callable[..., HubLink]) -> None:
        old = link()
        old.start()
        second = hub.offer(make_bundle(1))
        it = link()
        assert id_of(it.start(old.id)) == old.id
        it.sync()
        newer = it.newer()
        assert newer is not None
        assert newer[1] == second
        it.cache.prune(set())
        assert id_of(link().start(second)) == second  # lost here, but the hub still has it
        it.cache.prune(set())
        with pytest.raises(MergettaError, match=r"does not hold the bundle .* Delete the state"):
            link().start(old.id)

    def test_refused_counted_and_logged_once(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        it = link()
        it.start()
        small = {"a.weight": np.ones(3, np.float32)}
        huge = make_bundle(1)
        for number, bad in enumerate(
            [
                b"rubbish",
                make_bundle(1, family="other").to_bytes(),
                build_bundle(small, [small], family=FAMILY).to_bytes(),
                Bundle(
                    huge.base,
                    {n: 3e38 * np.ones_like(v) for n, v in huge.basis.items()},
                    {n: 9 + w for n, w in huge.coefficients.items()},
                    family=FAMILY,
                ).to_bytes(),
            ],
            1,
        ):
            hub.bundle = bad
            with np.errstate(over="ignore"):
                it.sync()
                it.sync()
            assert it.refused == number == len(caplog.records)
            assert it.newer() is None
        assert cached(tmp_path) == {it.id}
        hub.offer(make_bundle(1))
        it.sync()
        assert it.newer() is not None

    def test_reports_survive_and_are_bounded(
        self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(hub_link, "MAX_REPORTS", 7)
        monkeypatch.setattr(hub_link, "REPORTS_PER_REQUEST", 3)
        it = link()
        it.start()
        hub.down()
        for number in range(10):
            it.report({"batches": number})
        it.sync()
        assert len(it.queue) == 7
        with (tmp_path / "hub" / "reports.jsonl").open("ab") as file:
            file.write(b'{"half a rep')
        hub.up()
        again = link()
        again.report({"batches": 10})
        again.sync()
        assert [report["batches"] for report in hub.reports] == [4, 5, 6, 7, 8, 9, 10]
        assert {(report["family"], report["device"]) for report in hub.reports} == {(FAMILY, "camera-7")}
        assert abs(hub.reports[0]["time"] - time.time()) < 60
        assert (tmp_path / "hub" / "reports.jsonl").read_bytes() == b""

    def test_reports_that_no_hub_takes_do_not_hold_up_others(
        self, hub: StubHub, link: Callable[..., HubLink], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        it = link()
        it.start()
        for report in ({"batches": 1}, {"poison": 1}, {"batches": 2}, {"batches": 3}):
            it.report(report)
        hub.misbehave = [304, 401]  # no newer bundle; then a token that may yet become valid
        it.sync()
        assert len(it.queue) == 4
        it.sync()
        assert len(it.queue) == 0
        assert [report["batches"] for report in hub.reports] == [1, 2, 3]

    def test_a_full_disk_does_not_stop_the_device(
        self, link: Callable[..., HubLink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(path: Path, data: bytes) -> None:
            raise MergettaError("Cannot write: no space.")

        it = link()
        it.start()
        monkeypatch.setattr(hub_link, "write_atomically", full)
        it.report({})
        it.sync()
        assert "no space" in caplog.text

    def test_in_the_background(self, hub: StubHub, link: Callable[..., HubLink], tmp_path: Path) -> None:
        it = link(refresh=0.02)
        it.start()
        second = hub.offer(make_bundle(1))
        until(lambda: second in cached(tmp_path))
        until(lambda: it.newer())
        hub.down()
        it.report({"batches": 1})
        until(lambda: "Cannot reach" in it._told.get("reports", ""))
        hub.up()
        until(lambda: hub.reports)
        it.report({"batches": 2})
        it.stop()
        assert [report["batches"] for report in hub.reports] == [1, 2]
        assert not it._thread.is_alive()

    def test_the_loop_never_waits_and_stopping_is_bounded(
        self, hub: StubHub, link: Callable[..., HubLink], caplog: pytest.LogCaptureFixture
    ) -> None:
        """Even if the network hangs, or something we did not think of happens."""

        released = threading.Event()

        class Hanging(HubClient):
            def bundle(self, *arguments: Any, **options: Any) -> Any:
                released.wait(20)
                raise RuntimeError("unthought of")

        link().start()
        state = id_of(make_bundle())
        it = link(client=Hanging(hub.url), refresh=0.05)
        it.start(state)
        assert it.newer() is None
        it.report({"batches": 1})
        it.keep(state)
        it.stop(0.05)
        assert it._thread.is_alive()  # we are here, although it hangs
        released.set()
        it._thread.join(20)
        assert not it._thread.is_alive()
        assert "unthought of" in caplog.text
        assert len(hub.reports) == 1

    def test_bad_options(self, link: Callable[..., HubLink]) -> None:
        with pytest.raises(MergettaError, match="refresh"):
            link(refresh=0)
        with pytest.raises(MergettaError, match="device name"):
            HubLink(HubClient("http://hub"), FAMILY, Path("hub"), "front door")
