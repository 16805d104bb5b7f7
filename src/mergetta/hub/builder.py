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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.groups import learnable
from mergetta.hub.records import ACTIVE, PENDING, QUARANTINED, RETIRED, FamilyRecord, Variant
from mergetta.hub.screening import fair, layout, screen, usual_length
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store
from mergetta.hub.store.storage import Damaged, NotThere, Unavailable
from mergetta.merging.build import LOSS_OF
from mergetta.merging.scatter import Pool

log = logging.getLogger("mergetta.hub")
LEASE = 10.0
"""Seconds after which another hub takes over from one that died in the middle of a build."""
YARDSTICK = 256
"""Most experts that others are compared with: of each contributor one, before there is a second of any."""
RESCREEN = 1000
"""Pools up to this size are screened as a whole again: what was odd among six may be usual among twenty."""
EXACT = 64
"""Experts of one contributor up to which their weights are exact. Of more they are right within an eighth, so that one
more expert does not cost more and more."""
LONGEST = 1.2
"""Task vectors are shortened to so many times the usual length (norm bounding; Sun et al. 2019, Can you really backdoor
federated learning?): nobody gains by being long."""
SWEEP = 3600.0
"""Seconds between two looks for what is kept no longer."""
DRIFT = 1e-9
"""Rounding in a pool, relative to what it holds, above which it is summed anew."""
CHUNK = 256


class Entry(NamedTuple):
    """What a bundle says of an expert in it, and what a variant may leave it out for."""

    domain: str
    method: str
    token: str
    norm: float
    length: float
    """Of its task vector in the merge, as a share of its own."""

    def is_left_out(self, variant: Variant) -> bool:
        return self.domain in variant.domains or (variant.token is not None and self.token == variant.token)


@dataclass
class Held:
    """A family's pool in memory, and which experts are in it."""

    file: FamilyFile
    pool: Pool
    created: float
    """When the family was registered: one that was deleted and registered again is another."""
    entries: dict[str, Entry] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """Of each contributor's experts: one, shared."""
    synced: int = 0
    """The generation up to which changes have been applied."""


def share(norm: float, usual: float) -> float:
    """How much of a task vector is merged; all of it where there is no usual length."""
    return LONGEST * usual / norm if 0 < LONGEST * usual < norm else 1.0


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
        self._swept: dict[str, float] = {}
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
        held = self._held.pop(family.id, None)  # back again when it is in order
        if held is None or held.created != family.created:
            held = self._empty(family, self.store.family_file(family.id))
        self._screen(family, held.file)
        held = self._catch_up(family, held)
        self._held[family.id] = held
        whole: tuple[Bundle, dict[str, Any]] | None = None
        for variant in [Variant(), *stale]:
            out = [expert for expert, entry in held.entries.items() if entry.is_left_out(variant)]
            made = None
            if len(out) < len(held.entries):
                made = whole if whole and not out else self._make(held, family, out)
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

    def _screen(self, family: FamilyRecord, file: FamilyFile) -> None:
        """Look at newcomers; in pools that are not large, at everybody again. Who is not approved waits."""
        waiting = set() if self.settings.open else self.store.unapproved()
        counts = self.store.counts(family.id, approved=not self.settings.open)
        whole = sum(counts.values()) - counts.get(RETIRED, 0) <= RESCREEN
        found = self.store.experts(family.id, (PENDING, ACTIVE, QUARANTINED) if whole else (PENDING,))
        suspects = [e for e in found if not e.decided and e.token not in waiting]
        if whole:
            voices = [*(e for e in found if e.decided and e.state != QUARANTINED), *suspects]
        else:
            voices = self.store.voices(family.id, YARDSTICK)
        reasons = screen(fair(voices, YARDSTICK), suspects, layout(file.base)) if self.settings.screen else {}
        verdict = {e.id: (QUARANTINED, reasons[e.id]) if e.id in reasons else (ACTIVE, "") for e in suspects}
        changed = {e.id: verdict[e.id] for e in suspects if (e.state, e.reason) != verdict[e.id]}
        if changed:
            self.store.judge(family.id, changed)

    def _catch_up(self, family: FamilyRecord, held: Held) -> Held:
        """The pool in memory, brought to what is active now: only what changed since the last time is read, and the
        other experts of contributors whose number of experts changed.
        """
        changed = {e.id: e for e in self.store.experts(family.id, revision=held.synced)}
        usual = usual_length(self.store.voices(family.id, YARDSTICK)) if self.settings.screen else 0.0
        again = {name: e._replace(length=share(e.norm, usual)) for name, e in held.entries.items()}
        again = {name: e for name, e in again.items() if e != held.entries[name]}
        out = {name for name in held.entries if name in changed and changed[name].state != ACTIVE}
        for name in [name for name in held.entries if name in out or name in again]:
            held.pool.remove(name, self._expert(held, name))
            del held.entries[name]
        if held.pool.drift > DRIFT:  # something very large has come and gone: sum what is left anew
            changed = {e.id: e for e in self.store.experts(family.id, (ACTIVE,))}
            held, again = self._empty(family, held.file), {}
        missing = {name: entry for name, entry in again.items() if name not in out}
        for e in changed.values():
            if e.state == ACTIVE and e.id not in held.entries:
                missing[e.id] = Entry(e.domain, e.method, e.token, e.norm, share(e.norm, usual))
        self._reweigh(family, held, missing)
        for i in range(0, len(missing), CHUNK):
            self._add(held, dict(list(missing.items())[i : i + CHUNK]))
            self.store.lease(family.id, self.owner, LEASE)
        held.synced = family.generation
        return held

    def _reweigh(self, family: FamilyRecord, held: Held, missing: Mapping[str, Entry]) -> None:
        """Share out each contributor's weight among its experts, those that are to come among them."""
        numbers = Counter(entry.token for entry in (*held.entries.values(), *missing.values()))
        before, held.weights = held.weights, {}
        for token, number in numbers.items():
            exact = number <= EXACT or abs(number * before.get(token, 0.0) - 1) > 1 / 8
            held.weights[token] = 1 / number if exact else before[token]
        others: dict[str, list[str]] = {}
        for name, entry in held.entries.items():
            if held.weights[entry.token] != before[entry.token]:
                others.setdefault(entry.token, []).append(name)
        for token, names in others.items():
            for i in range(0, len(names), CHUNK):
                experts = {name: self._expert(held, name) for name in names[i : i + CHUNK]}
                held.pool.reweigh(experts, held.weights[token])
                self.store.lease(family.id, self.owner, LEASE)

    def _add(self, held: Held, newcomers: Mapping[str, Entry]) -> None:
        experts: dict[str, Expert] = {}
        for name, entry in newcomers.items():
            held.entries[name] = entry
            try:
                experts[name] = self._expert(held, name)
            except Unavailable:
                raise
            except MergettaError as error:  # lost, damaged, or of an older format
                log.error("an expert of %s is left out until it is uploaded again: %s", held.file.family, error)
                del held.entries[name]
        tokens = {name: held.entries[name].token for name in experts}
        held.pool.add_many(experts, tokens, {name: held.weights[token] for name, token in tokens.items()})

    def _empty(self, family: FamilyRecord, file: FamilyFile) -> Held:
        recipe = self.settings.recipe
        return Held(file, Pool(file.base, recipe.keep, recipe.members), family.created)

    def _expert(self, held: Held, name: str) -> Expert:
        """As it is merged."""
        expert, base, length = Expert.from_bytes(self.store.blob(name)), held.file.base, held.entries[name].length
        shorter = {group: base[group] + length * (expert.groups[group] - base[group]) for group in learnable(base)}
        return expert if length == 1 else replace(expert, groups={**expert.groups, **shorter})

    def _make(self, held: Held, family: FamilyRecord, out: list[str]) -> tuple[Bundle, dict[str, Any]]:
        """A bundle without the experts in `out`, and what people want to see of it."""
        recipe, count = self.settings.recipe, len(held.entries) - len(out)
        left = [entry for expert, entry in held.entries.items() if expert not in set(out)]
        methods = {entry.method for entry in left}
        domains = {entry.domain for entry in left}
        contributors = len({entry.token for entry in left})
        days = self.settings.bundle_days
        settings = {
            **recipe.model_dump(exclude={"weight"}),
            "experts": count,
            "loss": LOSS_OF.get(methods.pop()) if len(methods) == 1 else None,
            "domains": sorted(domains)[:100],
            "tolerance_per_entry": True,
            "reduce": True,
            "initial": recipe.weight / count,
            "contributors": contributors,
            "epoch": family.epoch,
            "generation": family.generation,
            "expires": None if days is None else time.time() + days * 86400,
        }
        bundle = held.pool.bundle(
            max_rank=recipe.max_rank,
            tolerance=recipe.tolerance,
            initial=recipe.weight / count,
            frozen=held.file.frozen,
            family=held.file.family,
            settings=settings,
            without={expert: self._expert(held, expert) for expert in out},
        )
        return bundle, {
            "experts": count,
            "contributors": contributors,
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
