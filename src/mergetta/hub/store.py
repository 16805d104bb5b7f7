"""Everything the hub remembers: metadata in a database, contents in blobs.

A blob is written before the row that names it, so whatever a row names is there; a crash in between leaves a blob that
nobody names, which does no harm. What has been acknowledged is durable.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.hub.audit_store import COMMAND_LINE
from mergetta.hub.blobs import Blobs, digest_of
from mergetta.hub.bundle_store import BundleStore
from mergetta.hub.database import Database
from mergetta.hub.records import (
    ACTIVE,
    ADMIN,
    PENDING,
    QUARANTINED,
    RETIRED,
    ExpertRecord,
    FamilyRecord,
)
from mergetta.hub.report_store import ReportStore
from mergetta.hub.schema import bundles, devices, experts, families, reports, tokens, variants
from mergetta.hub.screening import moments_apart, rms, sketch_of
from mergetta.hub.settings import Limits
from mergetta.hub.storage import Conflict, Damaged, NotThere, Refused, reachable, record
from mergetta.hub.token_store import TokenStore
from mergetta.hub.validation import FURTHEST, check_expert, check_family
from mergetta.merging.build import check_experts

PROBE = b"mergetta"
"""Written to see whether blobs can be."""
DECISIONS = {ACTIVE: "accept expert", QUARANTINED: "quarantine expert", RETIRED: "retire expert"}


class Store(BundleStore, TokenStore, ReportStore):
    def __init__(
        self,
        database: str,
        blobs_at: str,
        reports_kept: int = 500,
        pool_memory: int = 2**31,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        merge_all: bool = False,
    ) -> None:
        """`reports_kept` per device; families whose scatter matrices exceed `pool_memory` bytes are refused. With
        `merge_all`, uploads of tokens that are not approved are changes of the pool too.
        """
        self.blobs, self.database = Blobs(blobs_at), Database(database)
        self.reports_kept, self.pool_memory, self.limits = reports_kept, pool_memory, limits
        self.merge_all = merge_all
        with reachable():
            self.database.migrate()

    def close(self) -> None:
        self.database.close()

    def check(self) -> None:
        """Raise `Unavailable` unless both halves answer."""
        with reachable():
            with self.database.read() as connection:
                connection.execute(sa.select(sa.func.count()).select_from(families))
            self.put_blob(PROBE)

    def put_family(self, data: bytes, family: str, by: str = COMMAND_LINE) -> bool:
        """Register a family; True if it is new. The same file again changes nothing."""
        file = FamilyFile.from_bytes(data)
        if file.family != family:
            raise MergettaError(f"This file describes the family {file.family!r}, not {family!r}.")
        check_family(file, self.pool_memory)
        known = self._family(family)
        if known is not None:
            if known.blob != digest_of(data):
                raise Conflict(f"The family {family!r} is registered with other contents.")
            self.put_blob(data)  # it may have been lost or damaged
            return False
        row = {
            "id": family, "blob": self.put_blob(data), "note": file.note, "preprocessing": dict(file.preprocessing),
            "groups": len(file.base), "parameters": sum(v.size for v in file.base.values()),
            "created": time.time(), "epoch": int(time.time()), "generation": 0, "built": 0, "lease_until": 0.0,
        }  # fmt: skip
        with reachable():
            try:
                with self.database.write() as connection:
                    connection.execute(families.insert().values(row))
                    self._note(connection, by, "register family", family, family)
                return True
            except IntegrityError:  # somebody else was quicker
                return self.put_family(data, family, by)

    def _family(self, family: str) -> FamilyRecord | None:
        with reachable(), self.database.read() as connection:
            row = connection.execute(sa.select(families).where(families.c.id == family)).first()
        return None if row is None else record(FamilyRecord, row)

    def family(self, family: str) -> FamilyRecord:
        found = self._family(family)
        if found is None:
            raise NotThere(f"The hub does not know the family {family!r}: register it first.")
        return found

    def delete_family(self, family: str, by: str = COMMAND_LINE) -> None:
        """With everything that belongs to it."""
        gone = {self.family(family).blob}
        with reachable(), self.database.write() as connection:
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

    def add_expert(
        self, family: str, data: bytes, token: str, base: FamilyFile | None = None
    ) -> tuple[ExpertRecord, bool]:
        """Store an upload; False if the very same content was there already."""
        expert = Expert.from_bytes(data, "the upload")
        base = base or self.family_file(family)
        if expert.family != family:
            raise MergettaError(f"This expert belongs to the family {expert.family!r}, not {family!r}.")
        check_experts(base.base, [expert], family)
        check_expert(expert)
        layers = moments_apart(expert.groups, base.base)
        if rms(layers) > FURTHEST:
            raise MergettaError("This expert's moments are not of this family, or it has diverged.")
        norm, sketch = sketch_of(expert.groups, base.base)
        samples = expert.provenance.get("samples")
        counted = isinstance(samples, int) and not isinstance(samples, bool) and 0 <= samples < 2**62
        now = time.time()
        entry = ExpertRecord(
            digest_of(data), family, expert.domain, str(expert.provenance.get("method", "")),
            samples if counted else None, len(data), norm, layers.tobytes(), sketch, PENDING, "", False,
            token, now, now, 0,
        )  # fmt: skip
        known = self.find_expert(entry.id)
        if known is not None:
            return self._again(known, data), False
        self._admit(family, token)  # before anything is written
        self.put_blob(data)
        with reachable():
            try:
                with self.database.write() as connection:
                    merged = self._admit(family, token, connection)  # it may have been revoked during the upload
                    revision = (self._change if merged else self._generation)(connection, family)
                    connection.execute(experts.insert().values(**{**vars(entry), "revision": revision}))
                    self._note(connection, token, "upload expert", entry.id, family, entry.domain)
                return self.expert(entry.id), True
            except IntegrityError:
                return self.expert(entry.id), False
            except Refused:
                if self.find_expert(entry.id) is None:
                    self.blobs.delete(entry.id)
                raise

    def _again(self, known: ExpertRecord, data: bytes) -> ExpertRecord:
        """The very same upload: what was lost or damaged of it is mended, and merged again."""
        if known.state == RETIRED:
            return known
        try:
            self.blob(known.id)
        except (NotThere, Damaged):
            self.put_blob(data)
            with reachable(), self.database.write() as connection:
                mine = experts.update().where(experts.c.id == known.id)
                connection.execute(mine.values(revision=self._change(connection, known.family)))
        return self.expert(known.id)

    def _admit(self, family: str, token: str, connection: sa.Connection | None = None) -> bool:
        """Whether what a token uploads is merged, not to wait; `Refused` if it may not upload (any more)."""
        if connection is None:
            with reachable(), self.database.read() as connection:
                return self._admit(family, token, connection)
        query = sa.select(tokens.c.revoked, tokens.c.role, tokens.c.approved).where(tokens.c.id == token)
        row = connection.execute(query.with_for_update(read=True)).first()  # revoking waits
        if row is not None and row.revoked is not None:
            raise Refused("This token has been revoked.")
        if row is not None and row.role == ADMIN:
            return True
        held = sa.select(sa.func.count()).select_from(experts)
        mine = (experts.c.family == family, experts.c.token == token, experts.c.size > 0)
        if connection.execute(held.where(*mine)).scalar_one() >= self.limits.experts_per_token:
            most, days = self.limits.experts_per_token, self.limits.retired_days
            raise Refused(
                f"This token has {most} experts of this family, the most that it may have: retire some, which count "
                f"until their contents are deleted after {days:g} days."
            )
        return row is None or row.approved is not None or self.merge_all

    def find_expert(self, expert: str) -> ExpertRecord | None:
        with reachable(), self.database.read() as connection:
            row = connection.execute(sa.select(experts).where(experts.c.id == expert)).first()
        return None if row is None else record(ExpertRecord, row)

    def expert(self, expert: str) -> ExpertRecord:
        found = self.find_expert(expert)
        if found is None:
            raise NotThere(f"There is no expert {expert}.")
        return found

    def experts(
        self,
        family: str,
        states: Iterable[str] | None = None,
        limit: int | None = None,
        revision: int = 0,
        token: str | None = None,
        before: float | None = None,
    ) -> list[ExpertRecord]:
        """In the order of arrival; with `limit`, the last ones; with `revision`, those that changed in or after it."""
        query = sa.select(experts).where(experts.c.family == family, experts.c.revision >= revision)
        if token is not None:
            query = query.where(experts.c.token == token)
        if before is not None:
            query = query.where(experts.c.created < before)
        query = query.order_by(experts.c.created.desc(), experts.c.id)
        if states is not None:
            query = query.where(experts.c.state.in_(list(states)))
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query.limit(limit) if limit else query).all()
        return [record(ExpertRecord, row) for row in reversed(rows)]

    def voices(self, family: str, most: int) -> list[ExpertRecord]:
        """Active experts: the latest of each token, before there is a second of any."""
        mine = sa.select(experts.c.id, experts.c.created).where(experts.c.family == family, experts.c.state == ACTIVE)
        rank = sa.func.row_number().over(partition_by=experts.c.token, order_by=experts.c.created.desc())
        ranked = mine.add_columns(rank.label("rank")).subquery()
        chosen = sa.select(ranked.c.id).order_by(ranked.c.rank, ranked.c.created.desc()).limit(most)
        with reachable(), self.database.read() as connection:
            rows = connection.execute(sa.select(experts).where(experts.c.id.in_(chosen))).all()
        return [record(ExpertRecord, row) for row in rows]

    def contributors(self, family: str, domains: Iterable[str]) -> dict[str, int]:
        """How many tokens have contributed the active experts of each of these domains, if any."""
        number = sa.func.count(sa.distinct(experts.c.token))
        mine = (experts.c.family == family, experts.c.state == ACTIVE, experts.c.domain.in_(list(domains)))
        query = sa.select(experts.c.domain, number).where(*mine).group_by(experts.c.domain)
        with reachable(), self.database.read() as connection:
            return {row[0]: row[1] for row in connection.execute(query).all()}

    def counts(self, family: str, approved: bool = False) -> dict[str, int]:
        """Experts per state; of tokens that need no approval any more, if asked so."""
        query = sa.select(experts.c.state, sa.func.count()).where(experts.c.family == family)
        if approved:
            query = query.where(experts.c.token.not_in(sa.select(tokens.c.id).where(tokens.c.approved.is_(None))))
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query.group_by(experts.c.state)).all()
        return {row[0]: row[1] for row in rows}

    def waiting_since(self, family: FamilyRecord) -> float | None:
        """When the first of the experts was changed that no bundle has taken in yet."""
        waiting = sa.and_(experts.c.family == family.id, experts.c.revision > family.built)
        with reachable(), self.database.read() as connection:
            return connection.execute(sa.select(sa.func.min(experts.c.changed)).where(waiting)).scalar()

    def decide(self, expert: str, state: str, reason: str, by: str = COMMAND_LINE) -> ExpertRecord:
        """A person's word on an expert; the screening does not change it any more."""
        if state not in DECISIONS:
            raise MergettaError(f"An expert can be made active, quarantined or retired, not {state!r}.")
        before = self.expert(expert)
        if before.state == state and before.decided:
            return before
        with reachable(), self.database.write() as connection:
            values = {"state": state, "reason": reason, "decided": True, "changed": time.time()}
            now = sa.select(experts.c.state).where(experts.c.id == expert, experts.c.state != RETIRED)
            merged = connection.execute(now.with_for_update()).scalar()  # the screening may have looked meanwhile
            if merged is None:
                raise Conflict("A retired expert stays retired.")
            if ACTIVE in (merged, state):  # else no bundle is another
                values["revision"] = self._change(connection, before.family)
            connection.execute(experts.update().where(experts.c.id == expert).values(**values))
            self._note(connection, by, DECISIONS[state], expert, before.family, reason)
        return self.expert(expert)

    def retire_all(self, token: str, reason: str, by: str = COMMAND_LINE) -> int:
        """Everything that one token has uploaded, of any family."""
        query = sa.select(experts.c.id).where(experts.c.token == token, experts.c.state != RETIRED)
        with reachable(), self.database.read() as connection:
            found = list(connection.execute(query).scalars())
        for expert in found:
            self.decide(expert, RETIRED, reason, by)
        return len(found)

    def forget_retired(self, family: str) -> None:
        """Delete the contents of experts that retired long ago: the row stays, so that they stay retired."""
        edge = time.time() - self.limits.retired_days * 86400
        old = (experts.c.family == family, experts.c.state == RETIRED, experts.c.changed < edge, experts.c.size > 0)
        with reachable(), self.database.write() as connection:
            gone = list(connection.execute(sa.select(experts.c.id).where(*old)).scalars())
            if gone:
                connection.execute(experts.update().where(*old).values(size=0, sketch=b"", layers=b""))
        with reachable():
            for digest in gone:
                self.blobs.delete(digest)

    def judge(self, family: str, found: Mapping[str, tuple[str, str]]) -> None:
        """(state, reason) per expert, by the screening: not a change of the pool, but part of its next bundle."""
        with reachable(), self.database.write() as connection:
            revision = self._generation(connection, family)
            for expert, (state, reason) in found.items():
                values = {"state": state, "reason": reason, "changed": time.time(), "revision": revision}
                mine = experts.update().where(experts.c.id == expert, sa.not_(experts.c.decided))
                if connection.execute(mine.values(**values)).rowcount and state == QUARANTINED:
                    self._note(connection, "screening", "quarantine expert", expert, family, reason)
