"""`mergetta report`: one page of all that `mergetta reproduce` has measured so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def command(
    folder: Annotated[Path, typer.Argument(help="Where `mergetta reproduce` wrote its studies.")] = Path("results"),
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="The page (default: report.html in the folder).")
    ] = None,
) -> None:
    """Put all studies of a folder on one self-contained page: tables, figures, protocol, versions, seeds, commands.

    Example: `mergetta report results --out report.html`
    """
    from mergetta.bench.report import write_studies
    from mergetta.bench.sheets import Study
    from mergetta.errors import MergettaError

    if not folder.is_dir():
        raise MergettaError(f"There is no folder {folder}: run `mergetta reproduce` first, or name its --out.")
    files = sorted(folder.glob("*.json"))
    studies = []
    for file in files:
        try:
            studies.append(Study.load(file))
        except MergettaError as error:
            Console(stderr=True).print(f"left out: {error}", highlight=False)
    if not studies:
        raise MergettaError(f"There are no studies in {folder}: run `mergetta reproduce` first.")
    path = out or folder / "report.html"
    write_studies(path, studies)
    Console().print(f"{len(studies)} studies: {path}", highlight=False)
