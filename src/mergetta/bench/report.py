"""One self-contained HTML page of a run: tables, figures, protocol, settings."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mergetta
from mergetta.bench.figures import all_figures
from mergetta.bench.reproduce import STUDIES
from mergetta.bench.sheets import Study
from mergetta.bench.tables import SPREAD, ErrorTable, Record, best_rows, error_table
from mergetta.files import write_atomically

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } .lead { opacity: .75; margin-top: .2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tfoot td { background: var(--soft); }
td.best { font-weight: 700; } tr.paper td { font-style: italic; opacity: .8; }
.scroll > table > * > tr > :first-child { position: sticky; left: 0; background: Canvas; }
nav ul { columns: 18rem; } h2 { margin-top: 3rem; } code { overflow-wrap: anywhere; }
figure { margin: 2rem 0; background: #fff; color: #000; padding: 1rem; border-radius: 6px; }
figure svg { width: 100%; height: auto; } figcaption { font-size: .9em; opacity: .8; }
pre { overflow-x: auto; background: var(--soft); padding: 1rem; border-radius: 6px; font-size: .85em; }
.narrow { min-width: 560px; }
@media (max-width: 640px) {
  .scroll > table > * > tr > :first-child { white-space: normal; min-width: 7rem; max-width: 9rem; }
}
@media print {
  body { max-width: none; font-size: 9px; } figure, tr { break-inside: avoid; } nav { display: none; }
  .scroll { overflow: visible; } th, td { padding: .1rem .25rem; white-space: normal; }
  h2 { break-before: page; }
}
"""


PROTOCOL = """Each target domain starts from the source model and has the experts of all domains but its own, unless the
description names a continual run or folds; one pass over the stream; a batch is predicted before or while it is adapted
on, never after. All methods see the same stream for a seed."""


def write_report(path: Path, title: str, note: str, records: Sequence[Record], settings: dict[str, Any]) -> None:
    """Everything in one file that opens anywhere, offline."""
    figures = "".join(
        f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, svg in all_figures(records).items()
    )
    backprop = ", ".join(dict.fromkeys(r["method"] for r in records if r["backprop"])) or "None of these methods"
    body = f"""<h2>Error, percent</h2><div class="scroll">{html_table(error_table(records))}</div>
<p>{SPREAD}; bold: no other is better by more than the spread.</p>
{figures}
<h2>Protocol</h2><p>{PROTOCOL} {html.escape(backprop)} back-propagate; all others run forward passes only.</p>
<h2>Settings</h2><pre>{html.escape(json.dumps(settings, indent=1))}</pre>
"""
    write_atomically(path, page(title, note, body).encode())


def page(title: str, lead: str, body: str) -> str:
    """An HTML document around a body, in the style of all pages."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1><p class="lead">{html.escape(lead)}</p>
{body}
<p>mergetta {mergetta.__version__}</p></body></html>
"""


def html_table(table: ErrorTable) -> str:
    def row(name: str, numbers: list[Any], tag: str = "td") -> str:
        (best,) = best_rows([numbers])
        cells = "".join(f"<td{' class=best' if i in best else ''}>{number}</td>" for i, number in enumerate(numbers))
        return f"<tr><td>{html.escape(name)}</td>{cells}</tr>"

    head = "".join(f"<th>{html.escape(method)}</th>" for method in table.methods)
    body = "".join(
        row(domain.replace("_", " "), [table.cells[domain, method] for method in table.methods])
        for domain in table.domains
    )
    foot = row("average", [table.average[method] for method in table.methods])
    return f"<table><thead><tr><th>domain</th>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


def write_studies(path: Path, studies: Sequence[Study]) -> None:
    """All studies on one page, those of a suite together, in the paper's order."""
    suites = list(dict.fromkeys(study.suite for study in studies))
    ordered = sorted(studies, key=lambda study: (suites.index(study.suite), place(study)))
    links = "".join(
        f'<li><a href="#{anchor(s)}">{html.escape(s.suite)}: {html.escape(s.title)}</a></li>' for s in ordered
    )
    body = f"""<nav><ul>{links}</ul></nav>
<h3>Protocol</h3><p>{PROTOCOL} Numbers are means over seeds ± standard deviation. Bold: no other row of its kind is
better by more than the larger of the two spreads. Italics: the paper's numbers, for its own families and data.</p>
{"".join(map(section, ordered))}"""
    lead = "Tables and figures of the paper, measured by mergetta."
    write_atomically(path, page("mergetta · results", lead, body).encode())


def place(study: Study) -> int:
    return STUDIES.index(study.name) if study.name in STUDIES else len(STUDIES)


def anchor(study: Study) -> str:
    return html.escape(f"{study.name}-{study.suite}", quote=True)


def section(study: Study) -> str:
    figures = "".join(
        f"<figure><div class=scroll tabindex=0><div class=narrow>{drawing.svg}</div></div>"
        f"<figcaption>{html.escape(drawing.caption)}</figcaption></figure>"
        for drawing in study.drawings
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in study.notes)
    versions = ", ".join(f"{name} {number}" for name, number in study.facts["versions"].items())
    settings = html.escape(json.dumps(study.facts["settings"], indent=1))
    return f"""<section id="{anchor(study)}"><h2>{html.escape(study.suite)}: {html.escape(study.title)}</h2>
<p>{html.escape(study.facts["description"])}</p><p><code>{html.escape(study.facts["command"])}</code></p>
{"".join(sheet.html() for sheet in study.sheets)}
{figures}
<ul>{notes}</ul><p>{html.escape(versions)}</p><details><summary>Settings</summary><pre>{settings}</pre></details></section>
"""
