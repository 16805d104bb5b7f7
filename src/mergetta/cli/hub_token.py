"""`mergetta hub token`: who may use the hub."""

from __future__ import annotations

import dataclasses
import json as json_format
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mergetta.cli.hub_place import Blobs, Database, Folder, day, opened

if TYPE_CHECKING:
    from mergetta.hub.records import TokenRecord

Called = Annotated[str, typer.Argument(help="Its name or its id, as `list` shows them, or how one of these begins.")]
app = typer.Typer(help="Who may use the hub: create, list and revoke tokens.", no_args_is_help=True)


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Whose token it is, for people.")],
    role: Annotated[str, typer.Option(help="`contribute` (experts), `consume` (bundles) or `admin` (everything).")],
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
    rate: Annotated[float, typer.Option(min=0, help="Most requests per second; 0 for no limit.")] = 50.0,
    max_upload: Annotated[int, typer.Option(min=0, help="Most bytes of one request; 0 for the hub's limit.")] = 0,
    approved: Annotated[bool, typer.Option("--approved", help="Merge what it uploads, without `approve`.")] = False,
    register: Annotated[str, typer.Option(help="A family that it may register.")] = "",
    days: Annotated[float | None, typer.Option(min=0, help="Refuse it after so many days (default: never).")] = None,
    family: Annotated[list[str] | None, typer.Option(help="For this family; again for more (default: all).")] = None,
    device: Annotated[str | None, typer.Option(help="Take reports of this device only (default: any).")] = None,
) -> None:
    """Create a token and print it, once: the hub keeps only a hash.

    Example: `mergetta hub token create camera-7 --role consume --days 365 --device camera-7`
    """
    expires = None if days is None else time.time() + 86400 * days
    store = opened(folder, database, blobs)
    secret, made = store.create_token(
        name, role, rate, max_upload, expires, family, device, approved=approved, registers=register
    )
    typer.echo(secret)
    waits = (
        ""
        if made.approved or role != "contribute"
        else f"; its uploads wait for `mergetta hub token approve {made.id}`"
    )
    typer.echo(f"id {made.id}{waits}", err=True)


@app.command("approve")
def approve(
    token: Called,
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
) -> None:
    """Merge what a token has uploaded and will upload; until then its uploads wait.

    Example: `mergetta hub token approve workstation`
    """
    store = opened(folder, database, blobs)
    found = store.token_called(token)
    store.approve_token(found.id)
    typer.echo(f"{found.name} ({found.id}) is approved")


@app.command("list")
def list_tokens(
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show all tokens (not their secrets).

    Example: `mergetta hub token list`
    """
    tokens = opened(folder, database, blobs).tokens()
    if json:
        typer.echo(json_format.dumps([dataclasses.asdict(token) for token in tokens]))
        return
    table = Table("id", "role", Column("name", overflow="fold"), Column("what else is known", overflow="fold"))
    for token in tokens:
        table.add_row(token.id, token.role, escape(token.name), escape(known_of(token)))
    Console().print(table)


def known_of(token: TokenRecord) -> str:
    """What is not as it is for every token, so that a list fits into 80 columns."""
    facts = {
        "created": day(token.created),
        "last used": day(token.last_used),
        "approved": day(token.approved) if token.role == "contribute" else "",
        "ends": day(token.expires),
        "revoked": day(token.revoked),
        "families": ", ".join(token.families or ()),
        "registers": token.registers,
        "device": token.device or "",
        "requests/s": f"{token.rate:g}" if token.rate else "",
    }
    waits = token.role == "contribute" and token.approved is None
    return "; ".join([*(f"{name} {fact}" for name, fact in facts.items() if fact), *["not approved"] * waits])


@app.command("revoke")
def revoke(
    token: Called,
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
    retire: Annotated[bool, typer.Option("--retire", help="Also retire every expert that it uploaded.")] = False,
) -> None:
    """Refuse a token from now on (running hubs follow within a second).

    Example: `mergetta hub token revoke workstation --retire`
    """
    store = opened(folder, database, blobs)
    found = store.token_called(token)
    store.revoke_token(found.id)
    retired = f", {store.retire_all(found.id, 'its token was revoked')} experts retired" if retire else ""
    typer.echo(f"{found.name} ({found.id}) is revoked{retired}")
