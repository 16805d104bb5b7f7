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
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mergetta.bundle import Bundle
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, FamilyRecord, Variant
from mergetta.hub.screening import fair, screen
from mergetta.hub.settings import HubSettings
from mergetta.hub.storage import NotThere, Unavailable
from mergetta.hub.store import Store
from mergetta.merging.build import LOSS_OF
from mergetta.merging.scatter import Pool

log = logging.getLogger("mergetta.hub")
LEASE = 10.0
"""Seconds after which another hub takes over from one that died in the middle of a build."""
YARDSTICK = 256
"""Most experts that a newcomer is compared with."""
RESCREEN = 30
"""Pools up to this size are screened as a whole again: what was odd among six may be usual among twenty."""
DRIFT = 1e-9
"""Rounding in a pool, relative to what it holds, above which it is summed anew."""
CHUNK = 256


class Entry(NamedTuple):
    """What a bundle says of an expert in it, and what a variant may leave it out for."""

    domain: str
    method: str
    token: str

    def is_left_out(self, variant: Variant) -> bool:
        return self.domain in variant.domains or (variant.token is not None and self.token == variant.token)


@dataclass
class Held:
    """A family's pool in memory, and which experts are in it."""

    file: FamilyFile
    pool: Pool
    entries: dict[str, Entry] = field(default_factory=dict)
    synced: int = 0
    """The generation up to which changes have been applied."""


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
        self._held: dict[str, Held] = {}
        self._rest: dict[str, tuple[float, float]] = {}  # families that failed: until when to leave them, and how long
        self._known: set[str] = set()
        self.made_by = hashlib.sha256(f"{settings.recipe.model_dump_json()} {key_name}".encode()).hexdigest()[:16]
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
        if family.id not in self._known:
            current = self.store.current(family.id, Variant())
            if current is not None and current.summary.get("made_by") != self.made_by:
                self.store.touch(family.id)  # another recipe, or another key
                family = self.store.family(family.id)
            self._known.add(family.id)
        stale = [variant for variant, built in self.store.wanted(family.id) if built < family.generation]
        due = stale or family.built < family.generation
        if due and self.store.lease(family.id, self.owner, LEASE):
            self._build(self.store.family(family.id), stale)  # as it is now, whoever built before

    def _build(self, family: FamilyRecord, stale: Iterable[Variant]) -> None:
        start = time.perf_counter()
        self._screen(family)
        held = self._catch_up(family)
        self.store.forget_variants(family.id)
        whole: tuple[Bundle, dict[str, Any]] | None = None
        for variant in [Variant(), *stale]:
            out = [expert for expert, entry in held.entries.items() if entry.is_left_out(variant)]
            made = None
            if len(out) < len(held.entries):
                made = whole if whole and not out else self._make(held, family.generation, out)
            if not variant.key:
                whole = made
            bundle, summary = made or (None, None)
            self.store.publish(family.id, variant, family.generation, bundle, summary, self.sign)
            if not self.store.lease(family.id, self.owner, LEASE):
                return
        self.builds += 1
        self.seconds = time.perf_counter() - start
        self.published(family.id)
        self._forget_oldest(family.id)

    def _screen(self, family: FamilyRecord) -> None:
        """Look at newcomers; in small pools, at everybody again."""
        if sum(self.store.counts(family.id).values()) <= RESCREEN:
            everybody = self.store.experts(family.id, (PENDING, ACTIVE, QUARANTINED))
            suspects = [e for e in everybody if not e.decided]
            yardstick = [e for e in everybody if not (e.decided and e.state == QUARANTINED)]
        else:
            suspects = self.store.experts(family.id, (PENDING,))
            yardstick = self.store.experts(family.id, (ACTIVE,), limit=YARDSTICK)
            if len(yardstick) < RESCREEN:
                yardstick = [*yardstick, *suspects[:YARDSTICK]]
        voices = fair({e.id: e.token for e in yardstick})
        known = {e.id: e for e in [*yardstick, *suspects]}
        reasons: dict[str, str] = {}
        if self.settings.screen and suspects:
            norms, sketches = {n: e.norm for n, e in known.items()}, {n: e.sketch for n, e in known.items()}
            moments = {n: e.moments_apart for n, e in known.items()}
            reasons = screen(norms, sketches, voices, [e.id for e in suspects], moments)
        verdict = {e.id: (QUARANTINED, reasons[e.id]) if e.id in reasons else (ACTIVE, "") for e in suspects}
        changed = {e.id: verdict[e.id] for e in suspects if (e.state, e.reason) != verdict[e.id]}
        if changed:
            self.store.judge(family.id, changed)

    def _catch_up(self, family: FamilyRecord) -> Held:
        """The pool in memory, brought to what is active now: only what changed since the last time is read."""
        held = self._held.pop(family.id, None)
        if held is None:
            held = self._empty(self.store.family_file(family.id))
        changed = {e.id: e for e in self.store.experts(family.id, revision=held.synced)}
        for expert in [name for name in held.entries if name in changed and changed[name].state != ACTIVE]:
            held.pool.remove(expert, self._expert(expert))
            del held.entries[expert]
        if held.pool.drift > DRIFT:  # something very large has come and gone: sum what is left anew
            changed = {e.id: e for e in self.store.experts(family.id, (ACTIVE,))}
            held = self._empty(held.file)
        missing = [e for e in changed.values() if e.state == ACTIVE and e.id not in held.entries]
        for i in range(0, len(missing), CHUNK):
            chunk = missing[i : i + CHUNK]
            held.pool.add_many({e.id: self._expert(e.id) for e in chunk}, {e.id: e.token for e in chunk})
            held.entries.update({e.id: Entry(e.domain, e.method, e.token) for e in chunk})
            self.store.lease(family.id, self.owner, LEASE)
        held.synced = family.generation
        self._held[family.id] = held
        return held

    def _empty(self, file: FamilyFile) -> Held:
        recipe = self.settings.recipe
        return Held(file, Pool(file.base, recipe.keep, recipe.members))

    def _expert(self, expert: str) -> Expert:
        try:
            return Expert.from_bytes(self.store.blob(expert))
        except NotThere as error:
            raise Unavailable(f"The content of an expert is missing: {error}") from error

    def _make(self, held: Held, generation: int, out: list[str]) -> tuple[Bundle, dict[str, Any]]:
        """A bundle without the experts in `out`, and what people want to see of it."""
        recipe, count = self.settings.recipe, len(held.entries) - len(out)
        left = [entry for expert, entry in held.entries.items() if expert not in set(out)]
        methods = {entry.method for entry in left}
        domains = {entry.domain for entry in left}
        settings = {
            **recipe.model_dump(exclude={"weight"}),
            "experts": count,
            "loss": LOSS_OF.get(methods.pop()) if len(methods) == 1 else None,
            "domains": sorted(domains)[:100],
            "tolerance_per_entry": True,
            "reduce": True,
            "initial": recipe.weight / count,
            "generation": generation,
        }
        bundle = held.pool.bundle(
            max_rank=recipe.max_rank,
            tolerance=recipe.tolerance,
            initial=recipe.weight / count,
            frozen=held.file.frozen,
            family=held.file.family,
            settings=settings,
            without={expert: self._expert(expert) for expert in out},
        )
        return bundle, {
            "experts": count,
            "domains": len(domains),
            "ranks": {name: len(basis) for name, basis in bundle.basis.items()},
            "energy": held.pool.energy_kept(bundle),
            "frozen": list(bundle.frozen),
            "members": [] if bundle.members is None else bundle.members.listed(),
            "made_by": self.made_by,
        }

    def _forget_oldest(self, used: str) -> None:
        """Keep the pools within their memory; the family just built stays."""
        for family in list(self._held):
            if self.memory <= self.settings.pool_memory or family == used:
                return
            del self._held[family]
