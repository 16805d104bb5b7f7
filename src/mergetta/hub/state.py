"""What one hub process holds in memory: store, builder, gate, and the bundles it is serving."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from mergetta.family_file import FamilyFile
from mergetta.hub.builder import Builder
from mergetta.hub.limits import Gate
from mergetta.hub.records import BundleRecord, FamilyRecord, Variant
from mergetta.hub.settings import HubSettings
from mergetta.hub.signing import Signer
from mergetta.hub.store import Store
from mergetta.hub.store.storage import Damaged, NotThere, Unavailable

FRESH = 0.5
"""Seconds for which a process serves a bundle without asking whether another one has published a newer."""
SERVED = 64
"""Bundles held in memory at most."""


class Pointer(NamedTuple):
    """A small file that says which bundle is current."""

    data: bytes
    signature: str | None


@dataclass
class Served:
    record: BundleRecord
    data: bytes
    checked: float
    pointer: Pointer | None = None


class Hub:
    def __init__(self, settings: HubSettings) -> None:
        self.settings = settings
        store = settings.database, settings.blobs, settings.reports_kept, settings.pool_memory, settings.limits
        self.store = Store(*store, merge_all=settings.open)
        self.signer = Signer.load(settings.signing_key) if settings.signing_key else None
        self.gate = Gate()
        sign = self.signer.sign if self.signer else (lambda data: None)
        key = self.signer.public_key if self.signer else ""
        self.builder = Builder(self.store, settings, sign, self._published, key)
        self.was_ready = -60.0
        """When database and blobs last answered, by the monotonic clock."""
        self._served: OrderedDict[tuple[str, str], Served] = OrderedDict()
        self._files: dict[str, FamilyFile] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        self.builder.stop()
        self.store.close()

    def fresh(self, family: str, variant: Variant) -> Served | None:
        """From memory alone: what most requests are answered from."""
        served = self._served.get((family, variant.key))
        return served if served and time.monotonic() - served.checked < FRESH else None

    def bundle(self, family: str, variant: Variant) -> Served | None:
        """Ask the database which bundle is current, and read it if it is another one than before."""
        place = family, variant.key
        now = time.monotonic()
        before = self._served.get(place)
        try:
            record = self.store.current(family, variant)
        except Unavailable:
            if before is None:
                raise
            return before  # the database is away, the bundle is not
        if record is None:
            self._served.pop(place, None)
            return None
        if before and before.record.id == record.id and before.record.generation == record.generation:
            before.checked = now
            return before
        served = Served(record, self.content(record), now)
        with self._lock:
            self._served[place] = served
            self._served.move_to_end(place)
            while len(self._served) > SERVED:
                self._served.popitem(last=False)
        return served

    def content(self, record: BundleRecord) -> bytes:
        """Of a bundle of any age; one that is lost is not named any more, and built again."""
        try:
            return self.store.blob(record.id)
        except (NotThere, Damaged) as error:
            self.store.lose_bundle(record)
            for place, served in list(self._served.items()):
                if served.record.id == record.id:
                    self._served.pop(place, None)
            self.builder.wake()
            raise Unavailable("The content of this bundle is lost: it is being built again.") from error

    def lacks_probes(self, family: FamilyRecord) -> bool:
        """Whether its newcomers wait for images to be tried on."""
        return self.settings.wants_probes and not family.probes

    def pointer(self, served: Served) -> Pointer:
        """Made, and signed, once for each bundle that is served."""
        if served.pointer is None:
            names = ("family", "variant", "generation", "size")
            told = {"bundle": served.record.id, **{name: getattr(served.record, name) for name in names}}
            data = json.dumps(told).encode()
            served.pointer = Pointer(data, self.signer.sign(data) if self.signer else None)
        return served.pointer

    def file_of(self, family: str) -> FamilyFile:
        """A family's file never changes; which one it is may, if an administrator deletes the family."""
        blob = self.store.family(family).blob
        if blob not in self._files:
            if len(self._files) >= SERVED:
                self._files.clear()
            self._files[blob] = FamilyFile.from_bytes(self.store.blob(blob))
        return self._files[blob]

    def _published(self, family: str) -> None:
        for place, served in list(self._served.items()):
            if place[0] == family:
                served.checked = 0.0
