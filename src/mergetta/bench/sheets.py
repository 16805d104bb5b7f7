"""What a study found, for readers: tables (Markdown, CSV, HTML), figures (SVG, PNG), and the facts behind them."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from mergetta.bench.tables import Number, best_rows, is_ours
from mergetta.errors import MergettaError
from mergetta.files import write_atomically

FORMAT = "mergetta.study/1"


@dataclass(frozen=True)
class Row:
    name: str
    cells: tuple[str, ...]
    best: tuple[int, ...] = ()
    """Columns in which no other row is better by more than the spread."""
    paper: bool = False
    """Whether the numbers are the paper's, not ours."""


@dataclass(frozen=True)
class Sheet:
    """A table of text."""

    caption: str
    columns: tuple[str, ...]
    """The first names the rows."""
    rows: tuple[Row, ...]

    def markdown(self) -> str:
        lines = ["| " + " | ".join(self.columns) + " |", "|---|" + "---:|" * (len(self.columns) - 1)]
        for row in self.rows:
            cells = [f"**{cell}**" if i in row.best else cell for i, cell in enumerate(row.cells)]
            name = f"*{row.name}*" if row.paper else row.name
            lines.append(f"| {name} | " + " | ".join(f"*{c}*" if row.paper and c else c for c in cells) + " |")
        return f"{self.caption}\n\n" + "\n".join(lines) + "\n"

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([row.name, *row.cells] for row in self.rows)
        return text.getvalue()

    def html(self) -> str:
        head = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        body = "".join(map(html_row, self.rows))
        return (
            f"<p>{html.escape(self.caption)}</p><div class=scroll tabindex=0><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )


def html_row(row: Row) -> str:
    cells = "".join(
        f"<td{' class=best' if i in row.best else ''}>{html.escape(cell)}</td>" for i, cell in enumerate(row.cells)
    )
    kind = " class=paper" if row.paper else " class=ours" if is_ours(row.name) else ""
    return f"<tr{kind}><td>{html.escape(row.name)}</td>{cells}</tr>"


@dataclass(frozen=True)
class Drawing:
    caption: str
    svg: str
    png: str
    """Base64."""


@dataclass(frozen=True)
class Study:
    """One table or figure of the paper, measured here."""

    name: str
    title: str
    suite: str
    facts: Mapping[str, Any]
    """Command, samples, seeds, versions: what a reader must know to compare or repeat the numbers."""
    sheets: tuple[Sheet, ...]
    drawings: tuple[Drawing, ...]
    notes: tuple[str, ...] = ()
    records: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    def write(self, folder: Path) -> list[Path]:
        """NAME-SUITE.md, .csv, .svg, .png and .json; all of it is in the last, from which `report` makes its page."""
        stem = f"{self.name}-{self.suite}"
        files: dict[str, bytes] = {f"{stem}.md": self.markdown().encode()}
        for i, sheet in enumerate(self.sheets):
            files[f"{stem}{numbered(i)}.csv"] = sheet.csv().encode()
        for i, drawing in enumerate(self.drawings):
            files[f"{stem}{numbered(i)}.svg"] = drawing.svg.encode()
            files[f"{stem}{numbered(i)}.png"] = base64.b64decode(drawing.png)
        files[f"{stem}.json"] = json.dumps({"format": FORMAT, **asdict(self)}, indent=1).encode()
        for name, content in files.items():
            write_atomically(folder / name, content)
        return [folder / name for name in files]

    def markdown(self) -> str:
        stem = f"{self.name}-{self.suite}"
        parts = [f"# {self.title}\n", f"{self.facts['description']}\n", f"```sh\n{self.facts['command']}\n```\n"]
        parts += [sheet.markdown() for sheet in self.sheets]
        parts += [f"![{d.caption}]({stem}{numbered(i)}.svg)\n\n{d.caption}\n" for i, d in enumerate(self.drawings)]
        parts += ["".join(f"- {note}\n" for note in self.notes)] if self.notes else []
        return "\n".join(parts)

    @classmethod
    def load(cls, path: Path) -> Study:
        try:
            content = json.loads(path.read_text())
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            return TypeAdapter(cls).validate_python(content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise MergettaError(f"{path} is not a study of `mergetta reproduce`.") from error


def numbered(index: int) -> str:
    return f"-{index + 1}" if index else ""


def texts(numbers: Sequence[Number | None]) -> tuple[str, ...]:
    return tuple("" if number is None else str(number) for number in numbers)


def rows_of(table: Mapping[str, Sequence[Number | None]]) -> tuple[Row, ...]:
    """Rows of numbers, the best of each column marked."""
    best = best_rows(list(zip(*table.values(), strict=True)))
    return tuple(
        Row(name, texts(numbers), tuple(column for column, rows in enumerate(best) if index in rows))
        for index, (name, numbers) in enumerate(table.items())
    )
