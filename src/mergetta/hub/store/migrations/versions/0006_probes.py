"""What experts do on images that the operator vouches for."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("families", sa.Column("probes", sa.Text, nullable=False, server_default=""))
    for column in (sa.Column("probes", sa.Text), sa.Column("usual", sa.Float), sa.Column("harm", sa.Float)):
        op.add_column("experts", column)
