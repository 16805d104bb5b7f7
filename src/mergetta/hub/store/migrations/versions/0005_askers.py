"""Who asked for a variant first."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("variants", sa.Column("asker", sa.Text))
