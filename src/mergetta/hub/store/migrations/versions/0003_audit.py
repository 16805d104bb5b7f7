"""An audit log that only grows, sessions of the dashboard, tokens with an end, a scope and a last use."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("family", sa.Text(), nullable=False),
        sa.Column("why", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("number"),
    )
    if op.get_bind().dialect.name == "sqlite":
        for action in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER audit_no_{action.lower()} BEFORE {action} ON audit "
                "BEGIN SELECT RAISE(ABORT, 'the audit log only grows'); END"
            )
    else:
        op.execute(
            "CREATE FUNCTION audit_only_grows() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'the audit log only grows'; END $$"
        )
        op.execute(
            "CREATE TRIGGER audit_only_grows BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION audit_only_grows()"
        )
    op.create_table(
        "sessions",
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("expires", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["token"], ["tokens.id"]),
        sa.PrimaryKeyConstraint("hash"),
    )
    op.add_column("tokens", sa.Column("expires", sa.Float(), nullable=True))
    op.add_column("tokens", sa.Column("last_used", sa.Float(), nullable=True))
    op.add_column("tokens", sa.Column("families", sa.JSON(), nullable=True))
    op.add_column("tokens", sa.Column("device", sa.Text(), nullable=True))
    op.create_index("tokens_revoked", "tokens", ["revoked"], unique=False)
