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
    """Let the hub know the family, or see that it has the same source model and takes experts from us, before there is
    any work to lose.
    """
    from mergetta.family_file import FamilyFile

    known = client.family_file(source.family)
    if known is None:
        client.register_family(source.to_bytes())
    else:
        FamilyFile.from_bytes(known, "the hub's family file").check_base(source.base)
        client.check_contributor(source.family)


def share(client: HubClient, expert: Expert) -> None:
    """The hub has the source model once, not with every expert."""
    known = client.upload_expert(dataclasses.replace(expert, source=None))
    why = f" ({known['reason']})" if known.get("reason") else ""
    told = f"{client.url}: {known.get('state', 'taken')}{why}, as {known.get('id', '')[:12]}"
    Console().print(told, highlight=False, markup=False, soft_wrap=True)
