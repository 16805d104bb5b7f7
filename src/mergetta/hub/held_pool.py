"""A family's pool in memory, brought to what is active now, and the bundles that are made of it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.groups import learnable
from mergetta.hub.influence import share, usual_length
from mergetta.hub.newcomers import RESCREEN, weights_of
from mergetta.hub.records import ACTIVE, FamilyRecord, Variant
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store
from mergetta.hub.store.storage import Unavailable
from mergetta.merging.build import LOSS_OF
from mergetta.merging.scatter import Pool

log = logging.getLogger("mergetta.hub")
EXACT = 64
"""Experts of one contributor up to which their weights are exact. Of more they are right within an eighth, so that one
more expert does not cost more and more."""
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
class HeldPool:
    """Which experts are in a family's pool, with what weight; `keep_on` tells other hubs that this one is at work."""

    store: Store
    settings: HubSettings
    family: FamilyRecord
    """As it was when it was read last; one that was deleted and registered again is another."""
    file: FamilyFile
    keep_on: Callable[[], bool]
    entries: dict[str, Entry] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    """Of each contributor's experts: what it counts, shared among them."""
    less: dict[str, float] = field(default_factory=dict)
    """What contributors count, where it is less than the 1 of all others."""
    synced: int = 0
    """The generation up to which changes have been applied."""

    def __post_init__(self) -> None:
        self.pool = self._empty()

    def _empty(self) -> Pool:
        return Pool(self.file.base, self.settings.recipe.keep, self.settings.recipe.members)

    def catch_up(self, family: FamilyRecord) -> None:
        """Take in what is active now: only what changed since the last time is read, and the other experts of
        contributors whose number of experts changed.
        """
        self.family = family
        changed = {e.id: e for e in self.store.experts(family.id, revision=self.synced)}
        voices = self.store.voices(family.id, RESCREEN) if self.settings.screen else []
        usual = usual_length(voices)
        again = {name: e._replace(length=share(e.norm, usual)) for name, e in self.entries.items()}
        again = {name: e for name, e in again.items() if e != self.entries[name]}
        out = {name for name in self.entries if name in changed and changed[name].state != ACTIVE}
        for name in [name for name in self.entries if name in out or name in again]:
            self.pool.remove(name, self._expert(name))
            del self.entries[name]
        if self.pool.drift > DRIFT:  # something very large has come and gone: sum what is left anew
            changed = {e.id: e for e in self.store.experts(family.id, (ACTIVE,))}
            self.pool, self.entries, self.weights, again = self._empty(), {}, {}, {}
        missing = {name: entry for name, entry in again.items() if name not in out}
        for e in changed.values():
            if e.state == ACTIVE and e.id not in self.entries:
                missing[e.id] = Entry(e.domain, e.method, e.token, e.norm, share(e.norm, usual))
        weights = weights_of(voices, usual, family.probes)
        self.less = {token: weight for token, weight in weights.items() if weight < 1}
        self._reweigh(missing)
        for i in range(0, len(missing), CHUNK):
            self._add(dict(list(missing.items())[i : i + CHUNK]))
            self.keep_on()
        self.synced = family.generation

    def _reweigh(self, missing: Mapping[str, Entry]) -> None:
        """Share out each contributor's weight among its experts, those that are to come among them."""
        numbers = Counter(entry.token for entry in (*self.entries.values(), *missing.values()))
        before, self.weights = self.weights, {}
        for token, number in numbers.items():
            weight = self.less.get(token, 1.0) / number
            exact = number <= EXACT or abs(before.get(token, 0.0) / weight - 1) > 1 / 8
            self.weights[token] = weight if exact else before[token]
        others: dict[str, list[str]] = {}
        for name, entry in self.entries.items():
            if self.weights[entry.token] != before[entry.token]:
                others.setdefault(entry.token, []).append(name)
        for token, names in others.items():
            for i in range(0, len(names), CHUNK):
                experts = {name: self._expert(name) for name in names[i : i + CHUNK]}
                self.pool.reweigh(experts, self.weights[token])
                self.keep_on()

    def _add(self, newcomers: Mapping[str, Entry]) -> None:
        experts: dict[str, Expert] = {}
        for name, entry in newcomers.items():
            self.entries[name] = entry
            try:
                experts[name] = self._expert(name)
            except Unavailable:
                raise
            except MergettaError as error:  # lost, damaged, or of an older format
                log.error("an expert of %s is left out until it is uploaded again: %s", self.family.id, error)
                del self.entries[name]
        tokens = {name: self.entries[name].token for name in experts}
        self.pool.add_many(experts, tokens, {name: self.weights[token] for name, token in tokens.items()})

    def _expert(self, name: str) -> Expert:
        """As it is merged."""
        expert, base, length = Expert.from_bytes(self.store.blob(name)), self.file.base, self.entries[name].length
        shorter = {group: base[group] + length * (expert.groups[group] - base[group]) for group in learnable(base)}
        return expert if length == 1 else replace(expert, groups={**expert.groups, **shorter})

    def left_out(self, variant: Variant) -> list[str]:
        return [expert for expert, entry in self.entries.items() if entry.is_left_out(variant)]

    def bundle(self, out: Collection[str]) -> tuple[Bundle, dict[str, Any]]:
        """A bundle without the experts in `out`, and what people want to see of it."""
        recipe, count = self.settings.recipe, len(self.entries) - len(out)
        left = [entry for expert, entry in self.entries.items() if expert not in set(out)]
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
            "epoch": self.family.epoch,
            "generation": self.family.generation,
            "expires": None if days is None else time.time() + days * 86400,
        }
        bundle = self.pool.bundle(
            max_rank=recipe.max_rank,
            tolerance=recipe.tolerance,
            initial=recipe.weight / count,
            frozen=self.file.frozen,
            family=self.file.family,
            settings=settings,
            without={expert: self._expert(expert) for expert in out},
        )
        return bundle, {
            "experts": count,
            "contributors": contributors,
            "counts_less": self.less,
            "domains": len(domains),
            "ranks": {name: len(basis) for name, basis in bundle.basis.items()},
            "energy": self.pool.energy_kept(bundle),
            "frozen": list(bundle.frozen),
            "members": [] if bundle.members is None else bundle.members.listed(),
        }
