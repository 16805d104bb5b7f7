"""Uploads: what is checked before an expert is stored, and who may store one."""

from __future__ import annotations

import time

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.hub.records import ADMIN, PENDING, RETIRED, ExpertRecord
from mergetta.hub.screening import moments_apart, rms, sketch_of
from mergetta.hub.store.blobs import digest_of
from mergetta.hub.store.experts import ExpertStore
from mergetta.hub.store.families import FamilyStore
from mergetta.hub.store.schema import experts, tokens
from mergetta.hub.store.storage import Damaged, NotThere, Refused, reachable
from mergetta.hub.validation import FURTHEST, check_expert, check_length
from mergetta.merging.build import check_experts


class UploadStore(FamilyStore, ExpertStore):
    merge_all: bool
    """Uploads of tokens that are not approved are changes of the pool too."""

    def add_expert(
        self, family: str, data: bytes, token: str, base: FamilyFile | None = None, digest: str | None = None
    ) -> tuple[ExpertRecord, bool]:
        """Store an upload; False if the very same content was there already. The family's file and the digest are
        given where they are known.
        """
        expert = Expert.from_bytes(data, "the upload")
        base = base or self.family_file(family)
        if expert.family != family:
            raise MergettaError(f"This expert belongs to the family {expert.family!r}, not {family!r}.")
        check_experts(base.base, [expert], family)
        check_expert(expert)
        layers, moments = moments_apart(expert.groups, base.base)
        if rms(layers) > FURTHEST:
            raise MergettaError("This expert's moments are not of this family, or it has diverged.")
        norm, sketch = sketch_of(expert.groups, base.base)
        check_length(norm, base.base)
        samples = expert.provenance.get("samples")
        counted = isinstance(samples, int) and not isinstance(samples, bool) and 0 <= samples < 2**62
        now = time.time()
        entry = ExpertRecord(
            digest or digest_of(data), family, expert.domain, str(expert.provenance.get("method", "")),
            samples if counted else None, len(data), norm, layers.tobytes(), sketch, PENDING, "", False,
            token, now, now, 0, moments=moments,
        )  # fmt: skip
        known = self.find_expert(entry.id)
        if known is not None:
            return self._again(known, data), False
        self._admit(family, token)  # before anything is written
        self.put_blob(data, entry.id)
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

    def _again(self, known: ExpertRecord, data: bytes) -> ExpertRecord:
        """The very same upload: what was lost or damaged of it is mended, and merged again."""
        if known.state == RETIRED:
            return known
        try:
            self.blob(known.id)
        except (NotThere, Damaged):
            self.put_blob(data, known.id)
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
