"""The command line: one file per verb. Exit codes: 0 done, 1 it could not be done, 2 input that cannot be used."""

from __future__ import annotations

import sys

import typer
from rich.console import Console
from rich.markup import escape

from mergetta.cli import (
    adapt,
    bench,
    build,
    calibrate,
    corrupt,
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
from mergetta.errors import MergettaError

app = typer.Typer(
    name="mergetta",
    help="Keep a deployed image classifier accurate when its data changes, with forward passes alone.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
for verb in (demo, bench, reproduce, report, adapt, upload, build, export, calibrate, run, evaluate, corrupt, inspect):
    app.command(verb.__name__.rpartition(".")[2])(verb.command)
app.add_typer(hub.app, name="hub")


def main() -> None:
    try:
        app()
    except MergettaError as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"[red]error:[/] {escape(str(error))}")
        sys.exit(2)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        Console(stderr=True, highlight=False, soft_wrap=True).print(
            f"This command needs {error.name}: install it with  pip install 'mergetta[{EXTRAS[error.name]}]'",
            markup=False,
        )
        sys.exit(2)


EXTRAS = {
    "torch": "torch,bench",
    "cv2": "torch,bench",
    "matplotlib": "torch,bench",
    "onnx": "torch,export",
    "onnxscript": "torch,export",
    **dict.fromkeys(("fastapi", "uvicorn", "sqlalchemy", "alembic", "fsspec", "cryptography", "plotly"), "hub"),
    "PIL": "bench",
    "scipy": "bench",
}
