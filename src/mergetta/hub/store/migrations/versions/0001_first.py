"""The first shape of the tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "families",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("blob", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("preprocessing", sa.JSON(), nullable=False),
        sa.Column("groups", sa.Integer(), nullable=False),
        sa.Column("parameters", sa.Integer(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("built", sa.Integer(), nullable=False),
        sa.Column("lease_owner", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "reports",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    op.create_index("reports_of_device", "reports", ["family", "device", "number"], unique=False)
    op.create_table(
        "tokens",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("rate", sa.Float(), nullable=False),
        sa.Column("max_upload", sa.BigInteger(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("revoked", sa.Float(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("hash"),
    )
    op.create_table(
        "bundles",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("variant", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("experts", sa.Integer(), nullable=False),
        sa.Column("dimension", sa.Integer(), nullable=False),
        sa.Column("summary", sa.JSON(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["family"],
            ["families.id"],
        ),
        sa.PrimaryKeyConstraint("number"),
        sa.UniqueConstraint("family", "variant", "generation", name="one_bundle_per_generation"),
    )
    op.create_index("bundles_by_id", "bundles", ["id"], unique=False)
    op.create_table(
        "devices",
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("first_seen", sa.Float(), nullable=False),
        sa.Column("last_seen", sa.Float(), nullable=False),
        sa.Column("last", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["family"],
            ["families.id"],
        ),
        sa.PrimaryKeyConstraint("family", "device"),
    )
    op.create_table(
        "experts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("domain", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=True),
        sa.Column("size", sa.Integer(), nullable=False),
        sa.Column("norm", sa.Float(), nullable=False),
        sa.Column("moments_apart", sa.Float(), nullable=False),
        sa.Column("sketch", sa.LargeBinary(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("decided", sa.Boolean(), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("created", sa.Float(), nullable=False),
        sa.Column("changed", sa.Float(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["family"],
            ["families.id"],
        ),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("experts_by_revision", "experts", ["family", "revision"], unique=False)
    op.create_index("experts_by_state", "experts", ["family", "state", "created"], unique=False)
    op.create_table(
        "variants",
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("domains", sa.JSON(), nullable=False),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("wanted", sa.Float(), nullable=False),
        sa.Column("built", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["family"],
            ["families.id"],
        ),
        sa.PrimaryKeyConstraint("family", "key"),
    )
