"""Which way moments lie; of experts that were uploaded before, that is not known."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("experts", sa.Column("moments", sa.LargeBinary, nullable=False, server_default=""))
