"""Everything the hub remembers: metadata in a database, contents in blobs.

A blob is written before the row that names it, so whatever a row names is there; a crash in between leaves a blob that
nobody names, which does no harm. What has been acknowledged is durable.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, TimeoutError

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
from mergetta.hub.validation import check_expert, check_family

R = TypeVar("R")
DEMAND = 3600.0
"""Seconds for which a variant is kept up to date after somebody has asked for it."""
VARIANTS = 200
"""Most variants of a family that are kept up to date."""
BUNDLES_KEPT = 20
"""Of a family, and of each variant; devices ask for the latest."""


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
    except DataError as error:
        raise MergettaError(f"The database cannot hold this: {first_line(error.orig or error)}.") from error
    except (DBAPIError, TimeoutError) as error:
        cause = getattr(error, "orig", None) or error
        raise Unavailable(f"The hub's database is not available: {first_line(cause)}.") from error
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith(("botocore", "aiobotocore", "aiohttp")):
            raise Unavailable(f"The hub's blob store is not available: {first_line(error)}.") from error
        raise


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def repeated(action: Callable[[], None]) -> None:
    """Run a transaction, and again if another process inserted the same row in between: then it is an update."""
    try:
        action()
    except IntegrityError:
        action()


def record(kind: type[R], row: sa.Row[Any]) -> R:
    return kind(**{f.name: row._mapping[f.name] for f in fields(kind)})  # type: ignore[arg-type]


class Store:
    def __init__(self, database: str, blobs_at: str, reports_kept: int = 500, pool_memory: int = 2**31) -> None:
        """`reports_kept` per device; families whose scatter matrices exceed `pool_memory` bytes are refused."""
        self.database, self.blobs = Database(database), Blobs(blobs_at)
        self.reports_kept, self.pool_memory = reports_kept, pool_memory
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
            except (MergettaError, FileNotFoundError) as error:  # a file that cannot be written, a bucket not there
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
        check_family(file, self.pool_memory)
        known = self._family(family)
        if known is not None:
            if known.blob != digest_of(data):
                raise Conflict(f"The family {family!r} is registered with other contents.")
            return False
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
            except IntegrityError:  # somebody else was quicker
                return self.put_family(data, family)

    def _family(self, family: str) -> FamilyRecord | None:
        with reachable(), self.database.read() as connection:
            row = connection.execute(sa.select(families).where(families.c.id == family)).first()
        return None if row is None else record(FamilyRecord, row)

    def family(self, family: str) -> FamilyRecord:
        found = self._family(family)
        if found is None:
            raise NotThere(f"The hub does not know the family {family!r}: register it first.")
        return found

    def delete_family(self, family: str) -> None:
        """With everything that belongs to it; its blobs stay, unnamed."""
        self.family(family)
        with reachable(), self.database.write() as connection:
            for table in (reports, devices, variants, bundles, experts):
                connection.execute(table.delete().where(table.c.family == family))
            connection.execute(families.delete().where(families.c.id == family))

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
        check_expert(expert)
        norm, sketch = sketch_of(expert.groups, base.base)
        samples = expert.provenance.get("samples")
        counted = isinstance(samples, int) and not isinstance(samples, bool) and 0 <= samples < 2**62
        now = time.time()
        entry = ExpertRecord(
            digest_of(data), family, expert.domain, str(expert.provenance.get("method", "")),
            samples if counted else None, len(data), norm, sketch, PENDING, "", False, token, now, now, 0,
        )  # fmt: skip
        self.put_blob(data)  # even if known: the blob may have been lost or damaged
        known = self.find_expert(entry.id)
        if known is not None:
            return known, False
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

    def counts(self, family: str) -> dict[str, int]:
        """Experts per state."""
        query = sa.select(experts.c.state, sa.func.count()).where(experts.c.family == family)
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query.group_by(experts.c.state)).all()
        return {row[0]: row[1] for row in rows}

    def decide(self, expert: str, state: str, reason: str) -> ExpertRecord:
        """A person's word on an expert; the screening does not change it any more."""
        if state not in (ACTIVE, QUARANTINED, RETIRED):
            raise MergettaError(f"An expert can be made active, quarantined or retired, not {state!r}.")
        before = self.expert(expert)
        if before.state == state and before.decided:
            return before
        with reachable(), self.database.write() as connection:
            values = {"state": state, "reason": reason, "decided": True, "changed": time.time()}
            values["revision"] = self._change(connection, before.family)
            mine = experts.update().where(experts.c.id == expert, experts.c.state != RETIRED)
            if not connection.execute(mine.values(**values)).rowcount:
                raise Conflict("A retired expert stays retired.")
        return self.expert(expert)

    def retire_all(self, token: str, reason: str) -> int:
        """Everything that one token has uploaded, of any family."""
        query = sa.select(experts.c.id).where(experts.c.token == token, experts.c.state != RETIRED)
        with reachable(), self.database.read() as connection:
            found = list(connection.execute(query).scalars())
        for expert in found:
            self.decide(expert, RETIRED, reason)
        return len(found)

    def judge(self, family: str, found: Mapping[str, tuple[str, str]]) -> None:
        """(state, reason) per expert, by the screening: not a change of the pool, but part of its next bundle."""
        current = sa.select(families.c.generation).where(families.c.id == family)
        with reachable(), self.database.write() as connection:
            revision = connection.execute(current).scalar_one()
            for expert, (state, reason) in found.items():
                values = {"state": state, "reason": reason, "changed": time.time(), "revision": revision}
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
        mine = sa.or_(
            families.c.lease_owner == owner,
            families.c.lease_until < now,
            families.c.lease_until > now + 2 * abs(seconds),  # by a clock that was wrong
        )
        with reachable(), self.database.write() as connection:
            done = connection.execute(
                families.update()
                .where(families.c.id == family, mine)
                .values(lease_owner=owner, lease_until=now + seconds)
            )
        return done.rowcount == 1

    def release(self, owner: str) -> None:
        """Let others build at once."""
        with reachable(), self.database.write() as connection:
            connection.execute(families.update().where(families.c.lease_owner == owner).values(lease_until=0.0))

    def touch(self, family: str) -> None:
        """A new generation of the same experts: their bundles are to be made again."""
        with reachable(), self.database.write() as connection:
            self._change(connection, family)

    def publish(
        self,
        family: str,
        variant: Variant,
        generation: int,
        bundle: Bundle | None,
        summary: dict[str, Any] | None,
        sign: Callable[[bytes], str | None],
    ) -> None:
        """Swap in a bundle made from a generation of the pool; None if nothing is left to merge."""
        row = None
        if bundle is not None and summary is not None:
            data = bundle.to_bytes()
            Bundle.from_bytes(data)  # what a device would refuse is not published
            row = {
                "family": family, "variant": variant.key, "generation": generation, "id": self.put_blob(data),
                "signature": sign(data), "size": len(data), "dimension": bundle.dimension,
                "experts": summary["experts"], "summary": summary, "created": time.time(),
            }  # fmt: skip
        with reachable():
            repeated(lambda: self._swap(family, variant, generation, row))
            for digest in self._old(family, variant):
                self.blobs.delete(digest)

    def _swap(self, family: str, variant: Variant, generation: int, row: dict[str, Any] | None) -> None:
        where = (bundles.c.family == family, bundles.c.variant == variant.key)
        with self.database.write() as connection:
            if row is None:  # nothing is left: nothing may be served any more
                connection.execute(bundles.delete().where(*where, bundles.c.generation <= generation))
            else:
                known = sa.select(bundles.c.id).where(*where, bundles.c.generation == generation)
                if connection.execute(known).first() is None:
                    connection.execute(bundles.insert().values(row))
            if variant.key:
                mine = (variants.c.family == family, variants.c.key == variant.key, variants.c.built < generation)
                connection.execute(variants.update().where(*mine).values(built=generation))
            else:
                older = (families.c.id == family, families.c.built < generation)
                connection.execute(families.update().where(*older).values(built=generation))

    def _old(self, family: str, variant: Variant) -> list[str]:
        """Forget all but the latest bundles; the blobs that nobody names any more."""
        where = (bundles.c.family == family, bundles.c.variant == variant.key)
        with self.database.write() as connection:
            newest = sa.select(bundles.c.generation).where(*where).order_by(bundles.c.generation.desc())
            edge = connection.execute(newest.offset(BUNDLES_KEPT).limit(1)).scalar()
            if edge is None:
                return []
            gone = (*where, bundles.c.generation <= edge)
            old = set(connection.execute(sa.select(bundles.c.id).where(*gone)).scalars())
            connection.execute(bundles.delete().where(*gone))
            named = sa.select(bundles.c.id).where(bundles.c.id.in_(old))
            return sorted(old - set(connection.execute(named).scalars()))

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

    def latest(self, family: str) -> set[str]:
        """Ids of the newest bundles, of the whole pool and of each variant."""
        newest = sa.select(bundles.c.variant, sa.func.max(bundles.c.generation).label("generation"))
        newest_of = newest.where(bundles.c.family == family).group_by(bundles.c.variant).subquery()
        same = sa.and_(bundles.c.variant == newest_of.c.variant, bundles.c.generation == newest_of.c.generation)
        query = sa.select(bundles.c.id).join(newest_of, same).where(bundles.c.family == family)
        with reachable(), self.database.read() as connection:
            return set(connection.execute(query).scalars())

    def bundle(self, digest: str) -> BundleRecord:
        """A bundle of any age, by the SHA-256 of its content."""
        with reachable(), self.database.read() as connection:
            row = connection.execute(sa.select(bundles).where(bundles.c.id == digest).limit(1)).first()
        if row is None:
            raise NotThere(f"There is no bundle {digest}.")
        return record(BundleRecord, row)

    def history(self, family: str, limit: int = 100) -> list[BundleRecord]:
        """Bundles of the whole pool, oldest first."""
        where = (bundles.c.family == family, bundles.c.variant == "")
        query = sa.select(bundles).where(*where).order_by(bundles.c.generation.desc()).limit(limit)
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query).all()
        return [record(BundleRecord, row) for row in reversed(rows)]

    def want(self, family: str, variant: Variant) -> bool:
        """Ask for a variant to be built and kept up to date while it is in demand; False if it was not until now."""
        now = time.time()
        same = sa.and_(variants.c.family == family, variants.c.key == variant.key)
        with reachable(), self.database.read() as connection:
            before = connection.execute(sa.select(variants.c.wanted).where(same)).scalar()
            alive = sa.select(sa.func.count()).where(variants.c.family == family, variants.c.wanted > now - DEMAND)
            others = int(connection.execute(alive).scalar_one())
        if before is not None and before > now - DEMAND / 12:
            return True  # not worth a write
        if before is None and others >= VARIANTS:
            raise Conflict(f"{others} variants of this family are in use, which is the most the hub keeps.")

        def note() -> None:
            with self.database.write() as connection:
                if not connection.execute(variants.update().where(same).values(wanted=now)).rowcount:
                    row = {"family": family, "key": variant.key, "domains": list(variant.domains)}
                    connection.execute(variants.insert().values(**row, token=variant.token, wanted=now, built=-1))

        with reachable():
            repeated(note)
        return before is not None and before > now - DEMAND

    def forget_variants(self, family: str) -> None:
        """Those that nobody has asked for in a week, and their bundles."""
        old = sa.select(variants.c.key).where(variants.c.family == family, variants.c.wanted < time.time() - 7 * 86400)
        with reachable(), self.database.write() as connection:
            keys = list(connection.execute(old).scalars())
            for table, column in ((bundles, bundles.c.variant), (variants, variants.c.key)):
                if keys:
                    connection.execute(table.delete().where(table.c.family == family, column.in_(keys)))

    def variant_built(self, family: str, variant: Variant) -> int:
        """The generation that a variant was last built from; −1 if never."""
        same = sa.and_(variants.c.family == family, variants.c.key == variant.key)
        with reachable(), self.database.read() as connection:
            built = connection.execute(sa.select(variants.c.built).where(same)).scalar()
        return -1 if built is None else int(built)

    def wanted(self, family: str) -> list[tuple[Variant, int]]:
        """Variants in demand, and the generation that each was last built from."""
        query = sa.select(variants).where(variants.c.family == family, variants.c.wanted >= time.time() - DEMAND)
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
        with reachable():
            repeated(lambda: self._add_reports(entries, token))

    def _add_reports(self, entries: Sequence[Mapping[str, Any]], token: str) -> None:
        now = time.time()
        with self.database.write() as connection:
            for family in {entry["family"] for entry in entries}:
                if connection.execute(sa.select(families.c.id).where(families.c.id == family)).first() is None:
                    raise NotThere(f"The hub does not know the family {family!r}: register it first.")
            for family, device in {(entry["family"], entry["device"]) for entry in entries}:
                mine = [entry for entry in entries if (entry["family"], entry["device"]) == (family, device)]
                same = sa.and_(devices.c.family == family, devices.c.device == device)
                seen = {"token": token, "last_seen": now, "last": dict(mine[-1])}
                if not connection.execute(devices.update().where(same).values(**seen)).rowcount:
                    connection.execute(devices.insert().values(family=family, device=device, first_seen=now, **seen))
                of_device = sa.and_(reports.c.family == family, reports.c.device == device)
                times = sa.select(reports.c.time).where(of_device, reports.c.time.in_([e["time"] for e in mine]))
                known = set(connection.execute(times).scalars())
                rows = [
                    {"family": family, "device": device, "time": entry["time"], "report": dict(entry)}
                    for entry in mine
                    if entry["time"] not in known
                ]
                if rows:
                    connection.execute(reports.insert(), rows)
                newest = sa.select(reports.c.number).where(of_device).order_by(reports.c.number.desc())
                edge = connection.execute(newest.offset(self.reports_kept).limit(1)).scalar()
                if edge is not None:
                    connection.execute(reports.delete().where(of_device, reports.c.number <= edge))

    def devices(self, family: str, limit: int = 1000) -> list[DeviceRecord]:
        """Those heard of last, by name."""
        latest = sa.select(devices).where(devices.c.family == family).order_by(devices.c.last_seen.desc()).limit(limit)
        chosen = latest.subquery()
        query = sa.select(chosen).order_by(chosen.c.device)
        with reachable(), self.database.read() as connection:
            return [record(DeviceRecord, row) for row in connection.execute(query).all()]

    def reports(self, family: str, device: str) -> list[dict[str, Any]]:
        """Oldest first."""
        query = sa.select(reports.c.report).where(reports.c.family == family, reports.c.device == device)
        with reachable(), self.database.read() as connection:
            return [row.report for row in connection.execute(query.order_by(reports.c.number)).all()]


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
