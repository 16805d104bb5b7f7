"""Everything the hub remembers: metadata in a database, contents in blobs.

A blob is written before the row that names it, so whatever a row names is there; a crash in between leaves a blob that
nobody names, which does no harm. What has been acknowledged is durable.
"""

from __future__ import annotations

import sqlalchemy as sa

from mergetta.hub.settings import Limits
from mergetta.hub.store import schema
from mergetta.hub.store.blobs import Blobs
from mergetta.hub.store.bundles import BundleStore
from mergetta.hub.store.database import Database
from mergetta.hub.store.reports import ReportStore
from mergetta.hub.store.storage import reachable
from mergetta.hub.store.tokens import TokenStore
from mergetta.hub.store.uploads import UploadStore

PROBE = b"mergetta"
"""Written to see whether blobs can be."""


class Store(UploadStore, BundleStore, TokenStore, ReportStore):
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
                connection.execute(sa.select(sa.func.count()).select_from(schema.families))
            self.put_blob(PROBE)
