"""One self-contained HTML page of a run: tables, figures, protocol, settings."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mergetta
from mergetta.bench.figures import all_figures
from mergetta.bench.tables import SPREAD, ErrorTable, Record, error_table
from mergetta.files import write_atomically

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } .lead { opacity: .75; margin-top: .2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tfoot td { background: var(--soft); }
td.best { font-weight: 700; }
figure { margin: 2rem 0; background: #fff; color: #000; padding: 1rem; border-radius: 6px; }
figure svg { width: 100%; height: auto; } figcaption { font-size: .9em; opacity: .8; }
pre { overflow-x: auto; background: var(--soft); padding: 1rem; border-radius: 6px; font-size: .85em; }
@media print { figure { break-inside: avoid; } }
"""


def write_report(path: Path, title: str, note: str, records: Sequence[Record], settings: dict[str, Any]) -> None:
    """Everything in one file that opens anywhere, offline."""
    figures = "".join(
        f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for caption, svg in all_figures(records).items()
    )
    backprop = ", ".join(dict.fromkeys(r["method"] for r in records if r["backprop"])) or "None of these methods"
    body = f"""<h2>Error, percent</h2><div class="scroll">{html_table(error_table(records))}</div>
<p>{SPREAD}; best in bold.</p>
{figures}
<h2>Protocol</h2><p>Each target domain starts from the source model; the target's own expert is left out of the pool;
one pass over the stream; a batch is predicted before or while it is adapted on, never after. All methods see the same
stream for a seed. {html.escape(backprop)} back-propagate; all others run forward passes only.</p>
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
        best = min(round(number.mean, 1) for number in numbers)
        cells = "".join(
            f"<td{' class=best' if round(number.mean, 1) <= best else ''}>{number}</td>" for number in numbers
        )
        return f"<tr><td>{html.escape(name)}</td>{cells}</tr>"

    head = "".join(f"<th>{html.escape(method)}</th>" for method in table.methods)
    body = "".join(
        row(domain.replace("_", " "), [table.cells[domain, method] for method in table.methods])
        for domain in table.domains
    )
    foot = row("average", [table.average[method] for method in table.methods])
    return f"<table><thead><tr><th>domain</th>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"
