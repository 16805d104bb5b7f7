"""`mergetta upload`: an expert file → a hub."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from mergetta.cli.run import Authorities, Token

if TYPE_CHECKING:
    from mergetta.device.hub_client import HubClient
    from mergetta.expert import Expert
    from mergetta.family_file import FamilyFile


def command(
    expert: Annotated[Path, typer.Argument(help="The file that `mergetta adapt` wrote.")],
    hub: Annotated[str, typer.Option(help="Address of the hub.")],
    token: Token = None,
    ca: Authorities = None,
) -> None:
    """Share an expert with a hub; the same one again changes nothing.

    Example: `mergetta upload fog.safetensors --hub https://hub.example --token …`
    """
    from mergetta.device.hub_client import HubClient
    from mergetta.expert import Expert

    loaded = Expert.load(expert)
    client = HubClient(hub, token, ca=ca)
    if loaded.source is not None:
        introduce(client, loaded.source)
    share(client, loaded)


def introduce(client: HubClient, source: FamilyFile) -> None:
    """Let the hub know the family. It refuses here whoever may not contribute, before there is any work to lose."""
    from mergetta.device.hub_client import HubError

    try:
        client.register_family(source.to_bytes())
    except HubError as error:
        if error.status != 409:  # known by a file that describes it in other words
            raise


def share(client: HubClient, expert: Expert) -> None:
    """The hub has the source model once, not with every expert."""
    known = client.upload_expert(dataclasses.replace(expert, source=None))
    told = f"{client.url}: {known.get('state', 'taken')}, as {known.get('id', '')[:12]}"
    Console().print(told, highlight=False, markup=False)
