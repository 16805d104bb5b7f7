"""Where a hub's data is: what all commands of `mergetta hub` share."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from mergetta.hub.settings import HubSettings
    from mergetta.hub.store import Store

Folder = Annotated[
    Path,
    typer.Option(file_okay=False, help="Where SQLite and blobs are kept, unless the addresses below say otherwise."),
]
Database = Annotated[str | None, typer.Option(envvar="MERGETTA_DATABASE", help="postgresql://… for a shared database.")]
Blobs = Annotated[str | None, typer.Option(envvar="MERGETTA_BLOBS", help="s3://bucket/path for a shared blob store.")]


def settings_of(folder: Path, database: str | None, blobs: str | None, **others: object) -> HubSettings:
    from mergetta.hub.settings import HubSettings

    chosen = {key: value for key, value in {"database": database, "blobs": blobs}.items() if value}
    return HubSettings.in_folder(folder, **others).model_copy(update=chosen)


def opened(folder: Path, database: str | None, blobs: str | None, new: bool = False) -> Store:
    """What `serve` has made; with `new`, it may be made here."""
    from mergetta.errors import MergettaError
    from mergetta.hub.store import Store

    if not (new or database or (folder / "hub.db").is_file()):
        raise MergettaError(f"There is no hub in the folder {folder}: hub.db is missing.")
    settings = settings_of(folder, database, blobs)
    return Store(settings.database, settings.blobs)


def day(seconds: float | None) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M") if seconds else ""
