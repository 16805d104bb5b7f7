"""Approved tokens, who registers a family, how moments differ by layer, and generations that survive a restore."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("families", sa.Column("epoch", sa.BigInteger(), nullable=False, server_default="0"))
    op.add_column("experts", sa.Column("layers", sa.LargeBinary(), nullable=False, server_default=""))
    op.add_column("tokens", sa.Column("approved", sa.Float(), nullable=True))
    op.add_column("tokens", sa.Column("registers", sa.Text(), nullable=False, server_default=""))
    op.execute("UPDATE tokens SET approved = created")
