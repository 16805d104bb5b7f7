"""Looking after what a hub stores: whether database and blobs fit, a copy of both, and the way back."""

from __future__ import annotations

import time
from typing import NamedTuple

import sqlalchemy as sa

from mergetta.errors import MergettaError
from mergetta.hub.records import RETIRED, BundleRecord
from mergetta.hub.store import PROBE, Store
from mergetta.hub.store.blobs import digest_of
from mergetta.hub.store.schema import bundles, experts, families, metadata, sessions, tokens, variants
from mergetta.hub.store.storage import Damaged, NotThere, reachable, record

RECENT = 3600.0
"""Seconds for which a blob that nobody names may belong to an upload that is on its way."""


class Finding(NamedTuple):
    problem: str
    remedy: str
    """What `--repair` does, or what a person must do."""


def check(store: Store, repair: bool = False) -> list[Finding]:
    """Read every blob, and say which are missing, damaged or named by nobody."""
    found = []
    named = {digest_of(PROBE)}
    for family in store.families():
        named.add(family.blob)
        if problem := problem_of(store, family.blob):
            found.append(Finding(f"the file of {family.id} is {problem}", "register it again with the same file"))
        if family.probes:
            named.add(family.probes)
            if problem := problem_of(store, family.probes):
                found.append(Finding(f"the probes of {family.id} are {problem}", "set them again: mergetta hub probe"))
        for expert in store.experts(family.id):
            named.add(expert.id)
            if expert.state != RETIRED and (problem := problem_of(store, expert.id)):
                found.append(Finding(f"the expert {expert.id} ({expert.domain}) is {problem}", "upload it again"))
        for bundle in stored_bundles(store, family.id):
            named.add(bundle.id)
            if problem := problem_of(store, bundle.id):
                found.append(Finding(f"the bundle {bundle.id} of {family.id} is {problem}", "it is built again"))
                if repair:
                    store.lose_bundle(bundle)
                    store.note("lose bundle", bundle.id, family.id, problem)
    with reachable():
        for name, path in store.blobs.paths().items():
            if name not in named and store.blobs.age(path) > RECENT:
                found.append(Finding(f"the blob {name} belongs to nothing", "it is deleted"))
                if repair:
                    store.blobs.delete_file(path)
                    store.note("delete blob", name, why="it belonged to nothing")
    return found


def problem_of(store: Store, digest: str) -> str:
    try:
        store.blob(digest)
    except NotThere:
        return "missing"
    except Damaged:
        return "damaged"
    return ""


def stored_bundles(store: Store, family: str) -> list[BundleRecord]:
    """Of all variants and ages."""
    with reachable(), store.database.read() as connection:
        rows = connection.execute(sa.select(bundles).where(bundles.c.family == family)).all()
    return [record(BundleRecord, row) for row in rows]


def backup(store: Store, folder: Store) -> int:
    """Copy everything but bundles, which are built again, as it is at this moment, into a store that is empty.

    The hub may be running. Whatever it has acknowledged before is in the copy, because blobs are there before the rows
    that name them. Returns how many experts and families could not be copied, because their contents were lost before
    or deleted meanwhile.
    """
    with reachable(), folder.database.read() as connection:
        if any(connection.execute(sa.select(table).limit(1)).first() for table in (families, tokens)):
            raise MergettaError("There is a hub's data already where the copy should go.")
    missing, digests = 0, list[str]()
    with reachable(), store.database.snapshot() as reading, folder.database.write() as writing:
        for table in metadata.sorted_tables:
            if table in (bundles, variants, sessions):
                continue
            columns = [column for column in table.c if column.autoincrement is not True]  # these are numbered anew
            rows = reading.execute(sa.select(*columns).order_by(*table.primary_key)).mappings()
            for part in rows.partitions(1000):
                writing.execute(table.insert(), [dict(row) for row in part])
        kept = sa.select(experts.c.id).where(experts.c.size > 0)
        probes = sa.select(families.c.probes).where(families.c.probes != "")
        for query in (sa.select(families.c.blob), probes, kept):
            digests += writing.execute(query).scalars()
        for digest in digests:
            try:
                folder.put_blob(store.blob(digest))
            except (NotThere, Damaged):
                missing += 1
    return missing


def restore(folder: Store, store: Store) -> int:
    """The way back, into a store that is empty. Bundles are built again and are newer than any that devices had."""
    missing = backup(folder, store)
    newer = {"epoch": int(time.time()), "generation": families.c.generation + 1, "lease_until": 0.0}
    with reachable(), store.database.write() as connection:
        connection.execute(families.update().values(**newer))
    return missing
