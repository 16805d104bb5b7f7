"""Everything the hub remembers: metadata in a database, contents in blobs.

A blob is written before the row that names it, so whatever a row names is there; a crash in between leaves a blob that
nobody names, which does no harm. What has been acknowledged is durable.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError

from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.groups import check_groups
from mergetta.hub.blobs import Blobs, digest_of
from mergetta.hub.database import Database
from mergetta.hub.records import (
    ACTIVE,
    PENDING,
    QUARANTINED,
    RETIRED,
    ROLES,
    BundleRecord,
    DeviceRecord,
    ExpertRecord,
    FamilyRecord,
    TokenRecord,
    Variant,
)
from mergetta.hub.schema import bundles, devices, experts, families, reports, tokens, variants
from mergetta.hub.screening import sketch_of

R = TypeVar("R")


class NotThere(MergettaError):
    """There is no such family, expert, bundle or token."""


class Conflict(MergettaError):
    """It contradicts what is stored."""


class Unavailable(MergettaError):
    """Database or blobs cannot be reached, or are full: nothing was changed, try again later."""


@contextmanager
def reachable() -> Iterator[None]:
    """Turn the many ways in which storage fails into one."""
    try:
        yield
    except IntegrityError:
        raise
    except (OperationalError, InterfaceError, DBAPIError) as error:
        raise Unavailable(f"The hub's database is not available: {first_line(error.orig or error)}.") from error
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith(("botocore", "aiobotocore", "aiohttp")):
            raise Unavailable(f"The hub's blob store is not available: {first_line(error)}.") from error
        raise


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def record(kind: type[R], row: sa.Row[Any]) -> R:
    return kind(**{f.name: row._mapping[f.name] for f in fields(kind)})  # type: ignore[arg-type]


class Store:
    def __init__(self, database: str, blobs_at: str, reports_kept: int = 500) -> None:
        self.database, self.blobs = Database(database), Blobs(blobs_at)
        self.reports_kept = reports_kept
        with reachable():
            self.database.migrate()

    def close(self) -> None:
        self.database.close()

    def check(self) -> None:
        """Raise `Unavailable` unless both halves answer."""
        with reachable():
            with self.database.read() as connection:
                connection.execute(sa.select(sa.func.count()).select_from(families))
            self.put_blob(b"mergetta")

    # blobs

    def put_blob(self, data: bytes) -> str:
        with reachable():
            try:
                return self.blobs.put(data)
            except MergettaError as error:  # a file that cannot be written
                raise Unavailable(f"The hub's blob store is not available: {error}") from error

    def blob(self, digest: str) -> bytes:
        with reachable():
            try:
                return self.blobs.get(digest)
            except FileNotFoundError:
                raise NotThere(f"There is no blob {digest}.") from None
            except ValueError as error:
                raise Unavailable(f"The hub's blob store cannot be trusted: {error}.") from error

    # families

    def put_family(self, data: bytes, family: str) -> bool:
        """Register a family; True if it is new. The same file again changes nothing."""
        file = FamilyFile.from_bytes(data)
        if file.family != family:
            raise MergettaError(f"This file describes the family {file.family!r}, not {family!r}.")
        row = {
            "id": family, "blob": self.put_blob(data), "note": file.note, "preprocessing": dict(file.preprocessing),
            "groups": len(file.base), "parameters": sum(v.size for v in file.base.values()),
            "created": time.time(), "generation": 0, "built": 0, "lease_until": 0.0,
        }  # fmt: skip
        with reachable():
            try:
                with self.database.write() as connection:
                    connection.execute(families.insert().values(row))
                return True
            except IntegrityError:
                if self.family(family).blob != row["blob"]:
                    raise Conflict(f"The family {family!r} is registered with other contents.") from None
                return False

    def family(self, family: str) -> FamilyRecord:
        with reachable(), self.database.read() as connection:
            row = connection.execute(sa.select(families).where(families.c.id == family)).first()
        if row is None:
            raise NotThere(f"The hub does not know the family {family!r}: register it first.")
        return record(FamilyRecord, row)

    def families(self) -> list[FamilyRecord]:
        with reachable(), self.database.read() as connection:
            rows = connection.execute(sa.select(families).order_by(families.c.created)).all()
        return [record(FamilyRecord, row) for row in rows]

    def family_file(self, family: str) -> FamilyFile:
        return FamilyFile.from_bytes(self.blob(self.family(family).blob))

    # experts

    def add_expert(
        self, family: str, data: bytes, token: str, base: FamilyFile | None = None
    ) -> tuple[ExpertRecord, bool]:
        """Store an upload; False if the very same content was there already."""
        expert = Expert.from_bytes(data, "the upload")
        base = base or self.family_file(family)
        if expert.family != family:
            raise MergettaError(f"This expert belongs to the family {expert.family!r}, not {family!r}.")
        check_groups(expert.groups, base.base, "The expert")
        norm, sketch = sketch_of(expert.groups, base.base)
        samples = expert.provenance.get("samples")
        counted = isinstance(samples, int) and not isinstance(samples, bool) and 0 <= samples < 2**62
        now = time.time()
        entry = ExpertRecord(
            digest_of(data), family, expert.domain, str(expert.provenance.get("method", ""))[:100],
            samples if counted else None, len(data), norm, sketch, PENDING, "", False, token, now, now, 0,
        )  # fmt: skip
        known = self.find_expert(entry.id)
        if known is not None:
            return known, False
        self.put_blob(data)
        with reachable():
            try:
                with self.database.write() as connection:
                    revision = self._change(connection, family)
                    connection.execute(experts.insert().values(**{**vars(entry), "revision": revision}))
                return self.expert(entry.id), True
            except IntegrityError:
                return self.expert(entry.id), False

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
        self, family: str, states: Iterable[str] | None = None, limit: int | None = None, revision: int = 0
    ) -> list[ExpertRecord]:
        """In the order of arrival; with `limit`, the last ones; with `revision`, those that changed in or after it."""
        query = sa.select(experts).where(experts.c.family == family, experts.c.revision >= revision)
        query = query.order_by(experts.c.created.desc(), experts.c.id)
        if states is not None:
            query = query.where(experts.c.state.in_(list(states)))
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query.limit(limit) if limit else query).all()
        return [record(ExpertRecord, row) for row in reversed(rows)]

    def left_out(self, family: str, variant: Variant) -> list[str]:
        """Active experts that a variant does without."""
        out: sa.ColumnElement[bool] = experts.c.domain.in_(variant.domains)
        if variant.token is not None:
            out = sa.or_(out, experts.c.token == variant.token)
        query = sa.select(experts.c.id).where(experts.c.family == family, experts.c.state == ACTIVE, out)
        with reachable(), self.database.read() as connection:
            return list(connection.execute(query).scalars())

    def counts(self, family: str) -> dict[str, int]:
        """Experts per state."""
        query = sa.select(experts.c.state, sa.func.count()).where(experts.c.family == family)
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query.group_by(experts.c.state)).all()
        return {row[0]: row[1] for row in rows}

    def kinds(self, family: str) -> set[tuple[str, str]]:
        """(domain, method) of the active experts."""
        query = sa.select(experts.c.domain, experts.c.method).distinct()
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query.where(experts.c.family == family, experts.c.state == ACTIVE)).all()
        return {(domain, method) for domain, method in rows}

    def decide(self, expert: str, state: str, reason: str) -> ExpertRecord:
        """A person's word on an expert; the screening does not change it any more."""
        if state not in (ACTIVE, QUARANTINED, RETIRED):
            raise MergettaError(f"An expert can be made active, quarantined or retired, not {state!r}.")
        before = self.expert(expert)
        if before.state == RETIRED and state != RETIRED:
            raise Conflict("A retired expert stays retired.")
        with reachable(), self.database.write() as connection:
            values = {"state": state, "reason": reason, "decided": True, "changed": time.time()}
            values["revision"] = self._change(connection, before.family)
            connection.execute(experts.update().where(experts.c.id == expert).values(**values))
        return self.expert(expert)

    def judge(self, found: Mapping[str, tuple[str, str]], revision: int) -> None:
        """(state, reason) per expert, by the screening: not a change of the pool, but part of its next bundle."""
        with reachable(), self.database.write() as connection:
            for expert, (state, reason) in found.items():
                later = sa.case((experts.c.revision > revision, experts.c.revision), else_=revision)
                values = {"state": state, "reason": reason, "changed": time.time(), "revision": later}
                mine = experts.update().where(experts.c.id == expert, sa.not_(experts.c.decided))
                connection.execute(mine.values(**values))

    def _change(self, connection: sa.Connection, family: str) -> int:
        """A new generation of the pool. Takes the family's row, so that changes come one after the other."""
        mine = families.update().where(families.c.id == family)
        connection.execute(mine.values(generation=families.c.generation + 1))
        return int(connection.execute(sa.select(families.c.generation).where(families.c.id == family)).scalar_one())

    # bundles

    def lease(self, family: str, owner: str, seconds: float) -> bool:
        """Whether this process may build the family's bundles for now."""
        now = time.time()
        mine = sa.or_(families.c.lease_owner == owner, families.c.lease_until < now)
        with reachable(), self.database.write() as connection:
            done = connection.execute(
                families.update()
                .where(families.c.id == family, mine)
                .values(lease_owner=owner, lease_until=now + seconds)
            )
        return done.rowcount == 1

    def publish(
        self, family: str, variant: Variant, generation: int, bundle: Bundle | None, signature_of: Any, summary: Any
    ) -> None:
        """Swap in a bundle made from a generation of the pool; None if nothing is left to merge."""
        row = None
        if bundle is not None:
            data = bundle.to_bytes()
            row = {
                "family": family, "variant": variant.key, "generation": generation, "id": self.put_blob(data),
                "signature": signature_of(data), "size": len(data), "dimension": bundle.dimension,
                "experts": summary["experts"], "summary": summary, "created": time.time(),
            }  # fmt: skip
        with reachable(), self.database.write() as connection:
            where = (bundles.c.family == family, bundles.c.variant == variant.key)
            if row is None:  # the whole pool is gone: nothing may be served any more
                connection.execute(bundles.delete().where(*where))
            else:
                known = sa.select(bundles.c.id).where(*where, bundles.c.generation == generation)
                if connection.execute(known).first() is None:
                    connection.execute(bundles.insert().values(row))
            if variant.key:
                connection.execute(
                    variants.update()
                    .where(variants.c.family == family, variants.c.key == variant.key, variants.c.built < generation)
                    .values(built=generation)
                )
            else:
                older = (families.c.id == family, families.c.built < generation)
                connection.execute(families.update().where(*older).values(built=generation))

    def current(self, family: str, variant: Variant) -> BundleRecord | None:
        """The newest bundle; None if there is none (yet)."""
        query = (
            sa.select(bundles)
            .where(bundles.c.family == family, bundles.c.variant == variant.key)
            .order_by(bundles.c.generation.desc())
            .limit(1)
        )
        with reachable(), self.database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else record(BundleRecord, row)

    def bundle_exists(self, digest: str) -> bool:
        with reachable(), self.database.read() as connection:
            return connection.execute(sa.select(bundles.c.id).where(bundles.c.id == digest)).first() is not None

    def history(self, family: str, limit: int = 100) -> list[BundleRecord]:
        """Bundles of the whole pool, oldest first."""
        where = (bundles.c.family == family, bundles.c.variant == "")
        query = sa.select(bundles).where(*where).order_by(bundles.c.generation.desc()).limit(limit)
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query).all()
        return [record(BundleRecord, row) for row in reversed(rows)]

    def want(self, family: str, variant: Variant) -> None:
        """Ask for a variant to be built and kept up to date while it is in demand."""
        row = {
            "family": family, "key": variant.key, "domains": list(variant.domains), "token": variant.token,
            "wanted": time.time(), "built": -1,
        }  # fmt: skip
        same = sa.and_(variants.c.family == family, variants.c.key == variant.key)
        with reachable(), self.database.write() as connection:
            if not connection.execute(variants.update().where(same).values(wanted=row["wanted"])).rowcount:
                connection.execute(variants.insert().values(row))

    def variant_built(self, family: str, variant: Variant) -> int:
        """The generation that a variant was last built from; −1 if never."""
        same = sa.and_(variants.c.family == family, variants.c.key == variant.key)
        with reachable(), self.database.read() as connection:
            built = connection.execute(sa.select(variants.c.built).where(same)).scalar()
        return -1 if built is None else int(built)

    def wanted(self, family: str, since: float) -> list[tuple[Variant, int]]:
        """Variants in demand, and the generation that each was last built from."""
        query = sa.select(variants).where(variants.c.family == family, variants.c.wanted >= since)
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query).all()
        return [(Variant.of(row.domains, row.token), row.built) for row in rows]

    # tokens

    def create_token(self, name: str, role: str, rate: float = 0.0, max_upload: int = 0) -> tuple[str, TokenRecord]:
        """The token itself is returned once and stored nowhere; it has 256 random bits, so a plain hash is safe."""
        if role not in ROLES:
            raise MergettaError(f"A role is {', '.join(ROLES)}, not {role!r}.")
        secret = f"mgt_{secrets.token_urlsafe(32)}"
        entry = TokenRecord(secrets.token_hex(6), name, role, rate, max_upload, time.time(), None)
        with reachable(), self.database.write() as connection:
            connection.execute(tokens.insert().values(**vars(entry), hash=hash_of(secret)))
        return secret, entry

    def revoke_token(self, token: str) -> None:
        with reachable(), self.database.write() as connection:
            done = connection.execute(tokens.update().where(tokens.c.id == token).values(revoked=time.time()))
        if not done.rowcount:
            raise NotThere(f"There is no token {token!r}: `mergetta hub token list` shows them.")

    def tokens(self) -> list[TokenRecord]:
        with reachable(), self.database.read() as connection:
            rows = connection.execute(sa.select(tokens).order_by(tokens.c.created)).all()
        return [record(TokenRecord, row) for row in rows]

    def find_token(self, secret: str) -> TokenRecord | None:
        """None for an unknown or revoked one."""
        query = sa.select(tokens).where(tokens.c.hash == hash_of(secret), tokens.c.revoked.is_(None))
        with reachable(), self.database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else record(TokenRecord, row)

    # devices

    def add_reports(self, entries: Sequence[Mapping[str, Any]], token: str) -> None:
        """A device that got no answer sends again: a report of the same device and time is taken once."""
        now = time.time()
        with reachable(), self.database.write() as connection:
            for entry in entries:
                family, device = entry["family"], entry["device"]
                if connection.execute(sa.select(families.c.id).where(families.c.id == family)).first() is None:
                    raise NotThere(f"The hub does not know the family {family!r}: register it first.")
                same = sa.and_(devices.c.family == family, devices.c.device == device)
                seen = {"token": token, "last_seen": now, "last": dict(entry)}
                if not connection.execute(devices.update().where(same).values(**seen)).rowcount:
                    connection.execute(devices.insert().values(family=family, device=device, first_seen=now, **seen))
                mine = sa.and_(reports.c.family == family, reports.c.device == device)
                known = sa.select(reports.c.number).where(mine, reports.c.time == entry["time"])
                if connection.execute(known).first() is None:
                    row = {"family": family, "device": device, "time": entry["time"], "report": dict(entry)}
                    connection.execute(reports.insert().values(**row))
            for family, device in {(entry["family"], entry["device"]) for entry in entries}:
                mine = sa.and_(reports.c.family == family, reports.c.device == device)
                oldest = sa.select(reports.c.number).where(mine).order_by(reports.c.number.desc())
                edge = connection.execute(oldest.offset(self.reports_kept).limit(1)).scalar()
                if edge is not None:
                    connection.execute(reports.delete().where(mine, reports.c.number <= edge))

    def devices(self, family: str) -> list[DeviceRecord]:
        query = sa.select(devices).where(devices.c.family == family).order_by(devices.c.device)
        with reachable(), self.database.read() as connection:
            return [record(DeviceRecord, row) for row in connection.execute(query).all()]

    def reports(self, family: str, device: str) -> list[dict[str, Any]]:
        """Oldest first."""
        query = sa.select(reports.c.report).where(reports.c.family == family, reports.c.device == device)
        with reachable(), self.database.read() as connection:
            return [row.report for row in connection.execute(query.order_by(reports.c.number)).all()]


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
