"""Experts: which there are, and what the screening and people decide on them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import sqlalchemy as sa

from mergetta.errors import MergettaError
from mergetta.hub.records import ACTIVE, QUARANTINED, RETIRED, ExpertRecord, FamilyRecord
from mergetta.hub.settings import Limits
from mergetta.hub.store.audit import COMMAND_LINE, AuditStore
from mergetta.hub.store.schema import experts, tokens
from mergetta.hub.store.storage import Conflict, NotThere, reachable, record

DECISIONS = {ACTIVE: "accept expert", QUARANTINED: "quarantine expert", RETIRED: "retire expert"}


class ExpertStore(AuditStore):
    limits: Limits

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
        """Active experts: the latest of each token, before there is a second of any. Of too many tokens those whose
        ids come first, which are random: nobody can crowd out the others by being new.
        """
        mine = sa.select(experts.c.id, experts.c.token).where(experts.c.family == family, experts.c.state == ACTIVE)
        rank = sa.func.row_number().over(partition_by=experts.c.token, order_by=experts.c.created.desc())
        ranked = mine.add_columns(rank.label("rank")).subquery()
        chosen = sa.select(ranked.c.id).order_by(ranked.c.rank, ranked.c.token).limit(most)
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
            self._generation(connection, before.family)
            values = {"state": state, "reason": reason, "decided": True, "changed": time.time()}
            now = sa.select(experts.c.state).where(experts.c.id == expert, experts.c.state != RETIRED)
            merged = connection.execute(now).scalar()  # the screening may have looked meanwhile
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
                connection.execute(experts.update().where(*old).values(size=0, sketch=b"", layers=b"", moments=b""))
        with reachable():
            for digest in gone:
                self.blobs.delete(digest)

    def note_harm(self, expert: str, probes: str, usual: float, harm: float) -> None:
        """What the probe images have shown: not a change of the pool."""
        with reachable(), self.database.write() as connection:
            mine = experts.update().where(experts.c.id == expert)
            connection.execute(mine.values(probes=probes, usual=usual, harm=harm))

    def judge(self, family: str, found: Mapping[str, tuple[str, str]]) -> None:
        """(state, reason) per expert, by the screening: not a change of the pool, but part of its next bundle."""
        with reachable(), self.database.write() as connection:
            revision = self._generation(connection, family)
            for expert, (state, reason) in found.items():
                values = {"state": state, "reason": reason, "changed": time.time(), "revision": revision}
                mine = experts.update().where(experts.c.id == expert, sa.not_(experts.c.decided))
                if connection.execute(mine.values(**values)).rowcount and state == QUARANTINED:
                    self._note(connection, "screening", "quarantine expert", expert, family, reason)
