"""Experts → bundles, in the background: a reader never waits for a build, and never sees half of one.

Each hub process has one builder thread; a lease in the database decides whose builds a family. A builder holds the
family's pool as scatter matrices and clusters (see `merging.scatter`) and applies what has changed since its last
build, so the cost of a new expert does not depend on how many there are. After a restart it catches up from the stored
experts.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from mergetta.bundle import Bundle
from mergetta.hub.held_pool import HeldPool
from mergetta.hub.newcomers import judge_newcomers
from mergetta.hub.probes import ProbeFile, Probes
from mergetta.hub.records import PENDING, FamilyRecord, Variant
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store
from mergetta.hub.store.storage import Damaged, NotThere, Unavailable

log = logging.getLogger("mergetta.hub")
LEASE = 10.0
"""Seconds after which another hub takes over from one that died in the middle of a build."""
SWEEP = 3600.0
"""Seconds between two looks for what is kept no longer."""


class Builder:
    def __init__(
        self,
        store: Store,
        settings: HubSettings,
        sign: Callable[[bytes], str | None] = lambda data: None,
        published: Callable[[str], None] = lambda family: None,
        key_name: str = "",
    ) -> None:
        self.store, self.settings, self.sign, self.published = store, settings, sign, published
        self.owner = secrets.token_hex(8)
        self.builds = 0
        self.failures = 0
        self.seconds = 0.0
        self._held: dict[str, HeldPool] = {}
        self._probes: dict[str, Probes] = {}
        self._rest: dict[str, tuple[float, float]] = {}  # families that failed: until when to leave them, and how long
        self._swept: dict[str, float] = {}
        self._told: set[str] = set()
        self._leased = 0.0
        how = f"{settings.recipe.model_dump_json()} {settings.bundle_days} {key_name}"
        self.made_by = hashlib.sha256(how.encode()).hexdigest()[:16]
        """Changes with how bundles are made: a hub with other settings makes them again."""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="builder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._wake.set()
        if self._thread:
            self._thread.join(timeout=30)
            with contextlib.suppress(Unavailable):
                self.store.release(self.owner)

    def wake(self) -> None:
        """Something has changed: do not wait for the next look."""
        self._wake.set()

    @property
    def memory(self) -> int:
        """Bytes of all pools held."""
        return sum(held.pool.nbytes for held in self._held.values())

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self.settings.build_every)
            self._wake.clear()
            try:
                self.build_all()
            except Unavailable as error:
                if self._stop.is_set():
                    return
                self.failures += 1
                log.warning("cannot build: %s", error)
                self._stop.wait(1.0)
            except Exception:
                self.failures += 1
                log.exception("the builder has a fault; it goes on")
                self._stop.wait(1.0)

    def build_all(self) -> None:
        """Bring every family's bundles up to date; one that cannot be built does not hold up the others."""
        for family in self.store.families():
            if self._rest.get(family.id, (0.0, 0.0))[0] > time.monotonic():
                continue
            try:
                self._look_at(family)
                self._rest.pop(family.id, None)
            except Unavailable:
                self._held.pop(family.id, None)  # whatever was half done is done again
                raise
            except Exception:
                self.failures += 1
                self._held.pop(family.id, None)
                pause = min(60.0, 2 * self._rest.get(family.id, (0.0, 0.5))[1])
                self._rest[family.id] = time.monotonic() + pause, pause
                log.exception("the bundle of %s cannot be built; it will be tried again in %.0f s", family.id, pause)

    def _look_at(self, family: FamilyRecord) -> None:
        if self._swept.get(family.id, -SWEEP) <= time.monotonic() - SWEEP:
            self._sweep(family)
            family = self.store.family(family.id)
            self._swept[family.id] = time.monotonic()
        stale = [variant for variant, built in self.store.wanted(family.id) if built < family.generation]
        due = stale or family.built < family.generation
        if due and self.store.lease(family.id, self.owner, LEASE):
            self._build(self.store.family(family.id), stale)  # as it is now, whoever built before

    def _sweep(self, family: FamilyRecord) -> None:
        """At the start and once an hour: what is kept no longer, and whether the current bundle is as it should be."""
        waits = self._waits(family)
        pending = self.store.counts(family.id, approved=not self.settings.open).get(PENDING)
        if family.id not in self._swept and pending and not waits and not family.probes:
            self.store.touch(family.id)  # they have waited for what this hub does not ask for
        self.store.forget_variants(family.id)
        self.store.forget_retired(family.id)
        self.store.forget_devices(family.id)
        current = self.store.current(family.id, Variant())
        if current is None:
            return
        days = self.settings.bundle_days
        if days is not None and time.time() - current.created > days * 86400 / 2:
            self.store.touch(family.id)  # before it expires
        elif current.summary.get("made_by") != self.made_by:
            self.store.touch(family.id)  # another recipe, or another key
        else:
            try:
                self.store.blob(current.id)
            except (NotThere, Damaged):
                self.store.lose_bundle(current)

    def _build(self, family: FamilyRecord, stale: Iterable[Variant]) -> None:
        start = time.perf_counter()
        self._waits(family)
        held = self._held.pop(family.id, None)  # back again when it is in order
        if held is None or held.family.created != family.created:
            keep_on = partial(self._keep_on, family.id)
            held = HeldPool(self.store, self.settings, family, self.store.family_file(family.id), keep_on)
        self._leased = time.monotonic()
        probes = self._probes_of(family)
        going = partial(self._going, family.id)
        if not judge_newcomers(self.store, self.settings, family, held.file, probes, going):
            self.store.touch(family.id)  # the others follow, whatever becomes of this build
        held.catch_up(family)
        self._held[family.id] = held
        whole: tuple[Bundle, dict[str, Any]] | None = None
        for variant in [Variant(), *stale]:
            out = held.left_out(variant)
            made = None
            if len(out) < len(held.entries):
                made = whole if whole and not out else held.bundle(out)
            if not variant.key:
                whole = made
            bundle, summary = made or (None, {})
            told = {**summary, "made_by": self.made_by}
            self.store.publish(family.id, variant, family.generation, bundle, told, self.sign)
            if not held.keep_on():
                return
        self.builds += 1
        self.seconds = time.perf_counter() - start
        self.published(family.id)
        self._forget_oldest(family.id)

    def _going(self, family: str) -> bool:
        """The same for trials, which may take longer than a lease: they are worth finishing all the same."""
        self._keep_on(family)
        return not self._stop.is_set()

    def _keep_on(self, family: str) -> bool:
        """Tell other hubs that this one is at work; False if another one has taken over."""
        if time.monotonic() - self._leased < LEASE / 4:
            return True
        self._leased = time.monotonic()
        return self.store.lease(family, self.owner, LEASE)

    def _waits(self, family: FamilyRecord) -> bool:
        """Whether its newcomers wait for images to be tried on, which the log says once."""
        waits = self.settings.wants_probes and not family.probes
        if waits and family.id not in self._told:
            log.warning("%s has no probe images, so its experts wait: mergetta hub probe", family.id)
        (self._told.add if waits else self._told.discard)(family.id)
        return waits

    def _probes_of(self, family: FamilyRecord) -> Probes | None:
        """Those that the operator has set; while they are lost, nobody is judged and nothing is built."""
        known = self._probes.pop(family.id, None)
        if family.probes and (known is None or known.digest != family.probes):
            known = Probes(ProbeFile.from_bytes(self.store.blob(family.probes)), family.probes)
        if known is None or not family.probes:
            return None
        self._probes[family.id] = known
        return known

    def _forget_oldest(self, used: str) -> None:
        """Keep the pools within their memory; the family just built stays."""
        for family in list(self._held):
            if self.memory <= self.settings.pool_memory or family == used:
                return
            del self._held[family]
            self._probes.pop(family, None)
