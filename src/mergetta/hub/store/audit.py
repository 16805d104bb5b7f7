"""Who did what, and when: rows are only ever added, which the database itself sees to."""

from __future__ import annotations

import time

import sqlalchemy as sa

from mergetta.hub.records import AuditRecord
from mergetta.hub.store.schema import audit, tokens
from mergetta.hub.store.storage import Storage, reachable, record

COMMAND_LINE = "command line"
"""Who acts through `mergetta hub …`, beside the database."""


class AuditStore(Storage):
    def note(self, action: str, subject: str, family: str = "", why: str = "") -> None:
        """What the command line has done to the contents."""
        with reachable(), self.database.write() as connection:
            self._note(connection, COMMAND_LINE, action, subject, family, why)

    def _note(
        self, connection: sa.Connection, by: str, action: str, subject: str, family: str = "", why: str = ""
    ) -> None:
        """In the transaction of what is noted: neither is there without the other."""
        row = {"time": time.time(), "actor": by, "action": action, "subject": subject, "family": family, "why": why}
        connection.execute(audit.insert().values(row))

    def audit(self, limit: int | None = None, before: int | None = None) -> list[AuditRecord]:
        """The latest first; those before a number. An actor is a token's id, the command line or the screening."""
        name = sa.func.coalesce(tokens.c.name, audit.c.actor).label("name")
        query = sa.select(audit, name).outerjoin(tokens, tokens.c.id == audit.c.actor)
        if before is not None:
            query = query.where(audit.c.number < before)
        query = query.order_by(audit.c.number.desc())
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query.limit(limit) if limit else query).all()
        return [record(AuditRecord, row) for row in rows]
