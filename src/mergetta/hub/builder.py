"""Experts → bundles, in the background: a reader never waits for a build, and never sees half of one.

Each hub process has one builder thread; a lease in the database decides whose builds a family. A builder holds the
family's pool as scatter matrices (see `merging.scatter`) and applies what has changed since its last build, so the cost
of a new expert does not depend on how many there are. After a restart it catches up from the stored experts.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from mergetta.bundle import Bundle
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.groups import GroupValues
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, FamilyRecord, Variant
from mergetta.hub.screening import screen
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import NotThere, Store, Unavailable
from mergetta.merging.build import LOSS_OF
from mergetta.merging.scatter import Pool

log = logging.getLogger("mergetta.hub")
LEASE = 10.0
"""Seconds after which another hub takes over from one that died in the middle of a build."""
YARDSTICK = 256
"""Most experts that a newcomer is compared with."""
RESCREEN = 30
"""Pools up to this size are screened as a whole again: what was odd among six may be usual among twenty."""
DEMAND = 3600.0
"""Seconds for which a variant is kept up to date after somebody has asked for it."""
CHUNK = 256


@dataclass
class Held:
    """A family's pool in memory, and which experts are in it."""

    file: FamilyFile
    pool: Pool
    members: set[str] = field(default_factory=set)
    synced: int = 0
    """The generation up to which changes have been applied."""


class Builder:
    def __init__(
        self,
        store: Store,
        settings: HubSettings,
        sign: Callable[[bytes], str | None] = lambda data: None,
        published: Callable[[str], None] = lambda family: None,
    ) -> None:
        self.store, self.settings, self.sign, self.published = store, settings, sign, published
        self.owner = secrets.token_hex(8)
        self.builds = 0
        self.failures = 0
        self.seconds = 0.0
        self._held: dict[str, Held] = {}
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
                log.exception("a build failed; it will be tried again")
                self._held.clear()  # whatever was half done is done again
                self._stop.wait(1.0)

    def build_all(self) -> None:
        """Bring every family's bundles up to date."""
        for family in self.store.families():
            stale = [v for v, built in self.store.wanted(family.id, time.time() - DEMAND) if built < family.generation]
            due = stale or family.built < family.generation
            if due and self.store.lease(family.id, self.owner, LEASE):
                self._build(family, stale)

    def _build(self, family: FamilyRecord, stale: Iterable[Variant]) -> None:
        start = time.perf_counter()
        self._screen(family)
        held = self._catch_up(family)
        kinds = self.store.kinds(family.id)
        for variant in [*([Variant()] if family.built < family.generation else []), *stale]:
            out = self.store.left_out(family.id, variant) if variant.key else []
            bundle = summary = None
            if len(out) < len(held.members):
                bundle = self._bundle(held, [k for k in kinds if k[0] not in variant.domains], out)
                summary = summarise(bundle, held.pool)
            self.store.publish(family.id, variant, family.generation, bundle, self.sign, summary)
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
        known = {e.id: e for e in [*yardstick, *suspects]}
        reasons: dict[str, str] = {}
        if self.settings.screen and suspects:
            norms, sketches = {n: e.norm for n, e in known.items()}, {n: e.sketch for n, e in known.items()}
            reasons = screen(norms, sketches, [e.id for e in yardstick], [e.id for e in suspects])
        verdict = {e.id: (QUARANTINED, reasons[e.id]) if e.id in reasons else (ACTIVE, "") for e in suspects}
        changed = {e.id: verdict[e.id] for e in suspects if (e.state, e.reason) != verdict[e.id]}
        if changed:
            self.store.judge(changed, family.generation)

    def _catch_up(self, family: FamilyRecord) -> Held:
        """The pool in memory, brought to what is active now: only what changed since the last time is read."""
        held = self._held.pop(family.id, None)
        if held is None:
            file = self.store.family_file(family.id)
            held = Held(file, Pool(file.base, self.settings.recipe.keep))
        changed = {e.id: e.state for e in self.store.experts(family.id, revision=held.synced)}
        for expert, state in changed.items():
            if state != ACTIVE and expert in held.members:
                held.pool.remove(self._groups(expert))
                held.members.discard(expert)
        missing = [expert for expert, state in changed.items() if state == ACTIVE and expert not in held.members]
        for i in range(0, len(missing), CHUNK):
            chunk = missing[i : i + CHUNK]
            held.pool.add_many([self._groups(expert) for expert in chunk])
            held.members.update(chunk)
            self.store.lease(family.id, self.owner, LEASE)
        held.synced = family.generation
        self._held[family.id] = held
        return held

    def _groups(self, expert: str) -> GroupValues:
        try:
            return Expert.from_bytes(self.store.blob(expert)).groups
        except NotThere as error:
            raise Unavailable(f"The content of an expert is missing: {error}") from error

    def _bundle(self, held: Held, kinds: list[tuple[str, str]], out: list[str]) -> Bundle:
        recipe, count = self.settings.recipe, len(held.members) - len(out)
        methods = {method for _, method in kinds}
        settings = {
            **recipe.model_dump(exclude={"weight"}),
            "experts": count,
            "loss": LOSS_OF.get(methods.pop()) if len(methods) == 1 else None,
            "domains": sorted({domain for domain, _ in kinds})[:100],
            "tolerance_per_entry": True,
            "reduce": True,
            "initial": recipe.weight / count,
        }
        return held.pool.bundle(
            max_rank=recipe.max_rank,
            tolerance=recipe.tolerance,
            initial=recipe.weight / count,
            frozen=held.file.frozen,
            family=held.file.family,
            settings=settings,
            without=[self._groups(expert) for expert in out],
        )

    def _forget_oldest(self, used: str) -> None:
        """Keep the pools within their memory; the family just built stays."""
        for family in list(self._held):
            if self.memory <= self.settings.pool_memory or family == used:
                return
            del self._held[family]


def summarise(bundle: Bundle, pool: Pool) -> dict[str, Any]:
    """What people want to see of a bundle."""
    return {
        "experts": bundle.settings["experts"],
        "domains": len(bundle.settings["domains"]),
        "ranks": {name: len(basis) for name, basis in bundle.basis.items()},
        "energy": pool.energy_kept(bundle),
        "frozen": list(bundle.frozen),
    }
