"""The tables. Times are seconds since 1970, in UTC by definition."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)
from sqlalchemy import UniqueConstraint as Unique

metadata = MetaData()
Serial = BigInteger().with_variant(Integer, "sqlite")

families = Table(
    "families",
    metadata,
    Column("id", Text, primary_key=True),
    Column("blob", Text, nullable=False),
    Column("note", Text, nullable=False),
    Column("preprocessing", JSON, nullable=False),
    Column("groups", Integer, nullable=False),
    Column("parameters", Integer, nullable=False),
    Column("created", Float, nullable=False),
    Column("epoch", BigInteger, nullable=False),  # when generations began to count: a restored family is newer
    Column("generation", Integer, nullable=False),  # counts every change of the pool
    Column("built", Integer, nullable=False),  # the generation that the current bundle was made from
    Column("lease_owner", Text),  # which process builds, and until when others leave it alone
    Column("lease_until", Float, nullable=False),
    Column("probes", Text, nullable=False, server_default=""),  # the blob that experts are tried on, if there is one
)
experts = Table(
    "experts",
    metadata,
    Column("id", Text, primary_key=True),  # SHA-256 of the content, which is also the name of its blob
    Column("family", Text, ForeignKey("families.id"), nullable=False),
    Column("domain", Text, nullable=False),
    Column("method", Text, nullable=False),
    Column("samples", BigInteger),
    Column("size", Integer, nullable=False),  # 0: retired long ago, and its content deleted
    Column("norm", Float, nullable=False),
    Column("layers", LargeBinary, nullable=False),  # how far its moments are apart, layer by layer
    Column("sketch", LargeBinary, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("decided", Boolean, nullable=False),
    Column("token", Text, nullable=False),
    Column("created", Float, nullable=False),
    Column("changed", Float, nullable=False),
    Column("revision", Integer, nullable=False),  # the family's generation when it last changed
    Column("probes", Text),  # the blob that it was tried on last,
    Column("usual", Float),  # at which usual length,
    Column("harm", Float),  # and what harm it did
    Column("moments", LargeBinary, nullable=False, server_default=""),  # which way its moments lie
    Index("experts_by_state", "family", "state", "created"),
    Index("experts_by_revision", "family", "revision"),
)
bundles = Table(
    "bundles",
    metadata,
    Column("number", Serial, primary_key=True, autoincrement=True),
    Column("family", Text, ForeignKey("families.id"), nullable=False),
    Column("variant", Text, nullable=False),  # "" for the whole pool, else a digest of what is left out
    Column("generation", Integer, nullable=False),
    Column("id", Text, nullable=False),
    Column("signature", Text),
    Column("size", Integer, nullable=False),
    Column("experts", Integer, nullable=False),
    Column("dimension", Integer, nullable=False),
    Column("summary", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Unique("family", "variant", "generation", name="one_bundle_per_generation"),
    Index("bundles_by_id", "id"),
)
variants = Table(
    "variants",
    metadata,
    Column("family", Text, ForeignKey("families.id"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("domains", JSON, nullable=False),
    Column("token", Text),
    Column("wanted", Float, nullable=False),
    Column("built", Integer, nullable=False),
    Column("asker", Text),
)
tokens = Table(
    "tokens",
    metadata,
    Column("id", Text, primary_key=True),
    Column("hash", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("rate", Float, nullable=False),  # requests per second, 0 for no limit
    Column("max_upload", BigInteger, nullable=False),  # bytes, 0 for the hub's own limit
    Column("created", Float, nullable=False),
    Column("revoked", Float),
    Column("approved", Float),  # since when its uploads are merged
    Column("registers", Text, nullable=False),  # the family that it may register
    Column("expires", Float),
    Column("last_used", Float),  # to within some minutes
    Column("families", JSON),  # that it is for; none for all
    Column("device", Text),  # that it reports for; none for any
    Index("tokens_revoked", "revoked"),
)
sessions = Table(
    "sessions",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("token", Text, ForeignKey("tokens.id"), nullable=False),
    Column("expires", Float, nullable=False),
)
audit = Table(
    "audit",
    metadata,
    Column("number", Serial, primary_key=True, autoincrement=True),
    Column("time", Float, nullable=False),
    Column("actor", Text, nullable=False),  # a token's id, the command line, the screening
    Column("action", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("family", Text, nullable=False),
    Column("why", Text, nullable=False),
)
devices = Table(
    "devices",
    metadata,
    Column("family", Text, ForeignKey("families.id"), primary_key=True),
    Column("device", Text, primary_key=True),
    Column("token", Text, nullable=False),
    Column("first_seen", Float, nullable=False),
    Column("last_seen", Float, nullable=False),
    Column("last", JSON, nullable=False),
)
reports = Table(
    "reports",
    metadata,
    Column("number", Serial, primary_key=True, autoincrement=True),
    Column("family", Text, nullable=False),
    Column("device", Text, nullable=False),
    Column("time", Float, nullable=False),
    Column("report", JSON, nullable=False),
    Index("reports_of_device", "family", "device", "number"),
)
