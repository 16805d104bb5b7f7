"""How far an expert's moments are apart is told by layer only."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.drop_column("experts", "moments_apart")
