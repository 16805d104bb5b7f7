"""Bundles and their variants: which is current, who builds, what is kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from mergetta.bundle import Bundle
from mergetta.hub.records import BundleRecord, Variant
from mergetta.hub.settings import Limits
from mergetta.hub.store.schema import bundles, families, variants
from mergetta.hub.store.storage import Conflict, NotThere, Storage, reachable, record, repeated

DEMAND = 3600.0
"""Seconds for which a variant is kept up to date after somebody has asked for it."""
VARIANTS = 200
"""Most variants of a family that are kept up to date."""
BUNDLES_KEPT = 20
"""Of a family, and of each variant; devices ask for the latest."""


class BundleStore(Storage):
    limits: Limits

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

    def lose_bundle(self, bundle: BundleRecord) -> None:
        """Its content is not there any more: forget it, and have it built again."""
        same = (bundles.c.family == bundle.family, bundles.c.id == bundle.id)
        with reachable(), self.database.write() as connection:
            self._generation(connection, bundle.family)
            if connection.execute(bundles.delete().where(*same)).rowcount:
                self._change(connection, bundle.family)
        with reachable():
            self.blobs.delete(bundle.id)

    def publish(
        self,
        family: str,
        variant: Variant,
        generation: int,
        bundle: Bundle | None,
        summary: dict[str, Any],
        sign: Callable[[bytes], str | None],
    ) -> None:
        """Swap in a bundle made from a generation of the pool; None if nothing is left to merge."""
        row = None
        if bundle is not None:
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
            self._generation(connection, family)
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
        """A bundle of any age, by the SHA-256 of its content; that of the whole pool, if a variant is the same."""
        query = sa.select(bundles).where(bundles.c.id == digest).order_by(bundles.c.variant).limit(1)
        with reachable(), self.database.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise NotThere(f"There is no bundle {digest}.")
        return record(BundleRecord, row)

    def variants_of(self, digest: str) -> list[Variant]:
        """Those that have this very bundle."""
        same = sa.and_(bundles.c.family == variants.c.family, bundles.c.variant == variants.c.key)
        query = sa.select(variants.c.domains, variants.c.token).join(bundles, same).where(bundles.c.id == digest)
        with reachable(), self.database.read() as connection:
            return [Variant.of(row.domains, row.token) for row in connection.execute(query).all()]

    def history(self, family: str, limit: int = 100) -> list[BundleRecord]:
        """Bundles of the whole pool, oldest first."""
        where = (bundles.c.family == family, bundles.c.variant == "")
        query = sa.select(bundles).where(*where).order_by(bundles.c.generation.desc()).limit(limit)
        with reachable(), self.database.read() as connection:
            rows = connection.execute(query).all()
        return [record(BundleRecord, row) for row in reversed(rows)]

    def want(self, family: str, variant: Variant, asker: str | None = None) -> bool:
        """Ask for a variant to be built and kept up to date while it is in demand; False if it was not until now."""
        now = time.time()
        same = sa.and_(variants.c.family == family, variants.c.key == variant.key)
        with reachable(), self.database.read() as connection:
            before = connection.execute(sa.select(variants.c.wanted).where(same)).scalar()
            alive = sa.select(sa.func.count()).where(variants.c.family == family, variants.c.wanted > now - DEMAND)
            others = int(connection.execute(alive).scalar_one())
            own = int(connection.execute(alive.where(variants.c.asker == asker)).scalar_one())
        if before is not None and before > now - DEMAND / 12:
            return True  # not worth a write
        if before is None and others >= VARIANTS:
            raise Conflict(f"{others} variants of this family are in use, which is the most the hub keeps.")
        if before is None and own >= self.limits.variants_per_token:
            raise Conflict(f"This token has asked for {own} variants of this family, the most it may have in use.")

        def note() -> None:
            with self.database.write() as connection:
                if not connection.execute(variants.update().where(same).values(wanted=now)).rowcount:
                    row = {"family": family, "key": variant.key, "domains": list(variant.domains), "asker": asker}
                    connection.execute(variants.insert().values(**row, token=variant.token, wanted=now, built=-1))

        with reachable():
            repeated(note)
        return before is not None and before > now - DEMAND

    def forget_variants(self, family: str) -> None:
        """Those that nobody has asked for in a week, and their bundles."""
        old = sa.select(variants.c.key).where(variants.c.family == family, variants.c.wanted < time.time() - 7 * 86400)
        with reachable(), self.database.write() as connection:
            keys = list(connection.execute(old).scalars())
            if not keys:
                return
            mine = (bundles.c.family == family, bundles.c.variant.in_(keys))
            gone = set(connection.execute(sa.select(bundles.c.id).where(*mine)).scalars())
            connection.execute(bundles.delete().where(*mine))
            connection.execute(variants.delete().where(variants.c.family == family, variants.c.key.in_(keys)))
            named = set(connection.execute(sa.select(bundles.c.id).where(bundles.c.id.in_(gone))).scalars())
        with reachable():
            for digest in gone - named:
                self.blobs.delete(digest)

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
