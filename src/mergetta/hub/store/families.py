"""Families: registered once, with the source model that all their experts start from."""

from __future__ import annotations

import time

import numpy as np
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from mergetta.errors import MergettaError
from mergetta.family_file import FamilyFile
from mergetta.hub.records import CONTRIBUTE, FamilyRecord
from mergetta.hub.settings import Limits
from mergetta.hub.store.audit import COMMAND_LINE, AuditStore
from mergetta.hub.store.blobs import digest_of
from mergetta.hub.store.schema import audit, bundles, devices, experts, families, reports, tokens, variants
from mergetta.hub.store.storage import Conflict, Damaged, NotThere, Refused, reachable, record, unknown
from mergetta.hub.validation import check_family

REGISTER = "register family"


def same_merge(one: FamilyFile, other: FamilyFile) -> bool:
    """Whether they are the same but for the note and the preprocessing."""
    alike = (one.frozen, one.blocks, [*one.base]) == (other.frozen, other.blocks, [*other.base])
    return alike and all(np.array_equal(one.base[name], other.base[name]) for name in one.base)


class FamilyStore(AuditStore):
    limits: Limits
    pool_memory: int
    """Families whose scatter matrices exceed so many bytes are refused."""

    def put_family(self, data: bytes, family: str, by: str = COMMAND_LINE) -> bool:
        """Register a family; True if it is new. The same again, described in other words or not, changes nothing."""
        file = FamilyFile.from_bytes(data)
        if file.family != family:
            raise MergettaError(f"This file describes the family {file.family!r}, not {family!r}.")
        check_family(file, self.pool_memory)
        known = self._family(family)
        if known is not None:
            if known.blob == digest_of(data):
                self.put_blob(data)  # it may have been lost or damaged
            elif not self._is_same(family, file):
                raise Conflict(f"The family {family!r} is registered with other contents.")
            return False
        with reachable(), self.database.read() as connection:
            self._admit_family(connection, by)  # before anything is written
        row = {
            "id": family, "blob": self.put_blob(data), "note": file.note, "preprocessing": dict(file.preprocessing),
            "groups": len(file.base), "parameters": sum(v.size for v in file.base.values()),
            "created": time.time(), "epoch": int(time.time()), "generation": 0, "built": 0, "lease_until": 0.0,
        }  # fmt: skip
        with reachable():
            try:
                with self.database.write() as connection:
                    self._admit_family(connection, by)
                    connection.execute(families.insert().values(row))
                    self._note(connection, by, REGISTER, family, family)
                return True
            except IntegrityError:  # somebody else was quicker
                return self.put_family(data, family, by)

    def _is_same(self, family: str, file: FamilyFile) -> bool:
        try:
            return same_merge(self.family_file(family), file)
        except (NotThere, Damaged):  # only the very same file mends it
            return False

    def _admit_family(self, connection: sa.Connection, by: str) -> None:
        """`Refused` to a contributor that has registered as many as it may; those that were deleted do not count."""
        role = sa.select(tokens.c.role).where(tokens.c.id == by).with_for_update(read=True)
        if connection.execute(role).scalar() != CONTRIBUTE:
            return
        mine = (audit.c.actor == by, audit.c.action == REGISTER)
        held = sa.select(sa.func.count()).where(families.c.id.in_(sa.select(audit.c.subject).where(*mine)))
        if connection.execute(held).scalar_one() >= self.limits.families_per_token:
            most = self.limits.families_per_token
            raise Refused(f"This token has registered {most} families, as many as it may; an administrator may more.")

    def put_probes(self, family: str, data: bytes | None, by: str = COMMAND_LINE) -> None:
        """What experts are tried on from now on, those that are there included; None to try none any more."""
        before, digest = self.family(family).probes, "" if data is None else self.put_blob(data)
        with reachable(), self.database.write() as connection:
            self._change(connection, family)
            connection.execute(families.update().where(families.c.id == family).values(probes=digest))
            self._note(connection, by, "set probes" if digest else "remove probes", digest, family)
        if before and before != digest:
            with reachable():
                self.blobs.delete(before)

    def _family(self, family: str) -> FamilyRecord | None:
        with reachable(), self.database.read() as connection:
            row = connection.execute(sa.select(families).where(families.c.id == family)).first()
        return None if row is None else record(FamilyRecord, row)

    def family(self, family: str) -> FamilyRecord:
        found = self._family(family)
        if found is None:
            raise unknown(family)
        return found

    def delete_family(self, family: str, by: str = COMMAND_LINE) -> None:
        """With everything that belongs to it."""
        known = self.family(family)
        gone = {known.blob, known.probes} - {""}
        with reachable(), self.database.write() as connection:
            self._generation(connection, family)
            for table in (experts, bundles):
                gone |= set(connection.execute(sa.select(table.c.id).where(table.c.family == family)).scalars())
            for table in (reports, devices, variants, bundles, experts):
                connection.execute(table.delete().where(table.c.family == family))
            connection.execute(families.delete().where(families.c.id == family))
            self._note(connection, by, "delete family", family, family)
        with reachable():
            for digest in gone:
                self.blobs.delete(digest)

    def families(self) -> list[FamilyRecord]:
        with reachable(), self.database.read() as connection:
            rows = connection.execute(sa.select(families).order_by(families.c.created)).all()
        return [record(FamilyRecord, row) for row in rows]

    def family_file(self, family: str) -> FamilyFile:
        return FamilyFile.from_bytes(self.blob(self.family(family).blob))
