"""The command line: one file per verb. Exit codes: 0 done, 1 it could not be done, 2 input that cannot be used."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from mergetta import __version__
from mergetta.cli import (
    adapt,
    bench,
    build,
    calibrate,
    corrupt,
    cost,
    demo,
    evaluate,
    export,
    hub,
    inspect,
    report,
    reproduce,
    run,
    upload,
)
from mergetta.errors import MergettaError, how_to_install

app = typer.Typer(
    name="mergetta",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
VERBS = (demo, bench, reproduce, report, adapt, upload, build, export, calibrate, run, evaluate, cost, corrupt, inspect)
for verb in VERBS:
    app.command(verb.__name__.rpartition(".")[2])(verb.command)
app.add_typer(hub.app, name="hub")


def show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mergetta {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Print the version and exit.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Before the verb: say where in the code an error comes from.")
    ] = False,
) -> None:
    """Keep a deployed image classifier accurate when its data changes, with forward passes alone.

    Example: `mergetta demo` shows all of it on real images; every verb has examples in its `--help`.
    """


def main() -> None:
    try:
        app()
    except MergettaError as error:
        fail(f"[red]error:[/] {escape(str(error))}")
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extras = OF_VERBS.get("".join(sys.argv[1:2]), EXTRAS[error.name])
        fail(escape(f"This command needs {error.name}: {how_to_install(extras)}"))


def fail(markup: str) -> NoReturn:
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if {"--verbose", "-v"} & set(sys.argv[1:2]):
        console.print_exception()
    console.print(markup)
    sys.exit(2)


OF_VERBS = {"export": "torch,export"}
"""Extras of verbs that lack packages of several."""
EXTRAS = {
    "torch": "torch,bench",
    "cv2": "torch,bench",
    "matplotlib": "torch,bench",
    "onnx": "export",
    "onnxscript": "export",
    **dict.fromkeys(("fastapi", "uvicorn", "sqlalchemy", "alembic", "fsspec", "cryptography", "plotly"), "hub"),
    "PIL": "bench",
}
