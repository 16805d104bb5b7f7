"""Approved tokens, who registers a family, how moments differ by layer, and generations that survive a restore."""

import time

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
    retire = sa.text("UPDATE experts SET layers = :empty, state = 'retired', reason = :reason, changed = :now")
    reason = "it is of an older format: adapt and upload again"
    op.get_bind().execute(retire, {"empty": b"", "reason": reason, "now": time.time()})
    op.execute("UPDATE families SET generation = generation + 1 WHERE id IN (SELECT family FROM experts)")
