"""One self-contained HTML page of a run: tables, figures, protocol, settings."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergetta.bench.figures import INK, all_figures
from mergetta.bench.page import number, page
from mergetta.bench.reproduce import STUDIES
from mergetta.bench.reproduce.setting import averages
from mergetta.bench.sheets import Study
from mergetta.bench.showcase import worded
from mergetta.bench.tables import (
    BY_PASS,
    OURS,
    SOURCE,
    SPREAD,
    ErrorTable,
    Number,
    Record,
    best_rows,
    error_table,
    pass_table,
)
from mergetta.files import write_atomically

PROTOCOL = """Each target domain starts from the source model and has the experts of all domains but its own, unless the
description names a continual run or folds; one pass over the stream, unless it names more; a batch is predicted before
or while it is adapted on, never after. All methods see the same stream for a seed."""


def write_report(
    path: Path, title: str, note: str, records: Sequence[Record], settings: dict[str, Any], pictures: str = ""
) -> None:
    """Everything in one file that opens anywhere, offline: one number, images (`pictures`), the table, the figures."""
    table = error_table(records)
    figures = "".join(figure(caption, svg) for caption, svg in all_figures(records).items())
    backprop = ", ".join(dict.fromkeys(r["method"] for r in records if r["backprop"]))
    kinds = f"{backprop} back-propagate; all others" if backprop else "All methods"
    several = any(mean.spread is not None for mean in table.average.values())
    body = f"""{headline(table.average, table.domains)}
<p class=lead>{html.escape(note)}</p>
{pictures}
<h2>Error, percent</h2><div class=scroll tabindex=0>{html_table(table)}</div>
<p>{f"{SPREAD}; " if several else ""}bold: no other is better{" by more than the spread" if several else ""}; the
stronger the shade, the more errors.</p>
{by_pass(records)}{figures}
<h2>Protocol</h2><p>{PROTOCOL} {html.escape(kinds)} run forward passes only.</p>
<details><summary>Settings</summary><pre>{html.escape(json.dumps(settings, indent=1))}</pre></details>
"""
    write_atomically(path, page(title, "", body).encode())


def by_pass(records: Sequence[Record]) -> str:
    """The errors of long streams, pass by pass."""
    if all(len(record["passes"]) == 1 for record in records):
        return ""
    table = html_table(pass_table(records), "pass")
    return f"<h2>Error by pass, percent</h2><p>{BY_PASS}</p><div class=scroll tabindex=0>{table}</div>"


def headline(average: Mapping[str, Number], names: Sequence[str], suite: str = "") -> str:
    """One number and one sentence, if the source model and ours were compared on these domains (of a suite)."""
    if SOURCE not in average or OURS not in average:
        return ""
    domains = f"{len(names)} domains" if len(names) > 1 else worded(names[0])
    domains += f" of {html.escape(suite)}" if suite else ""
    return (
        f"{number(average[SOURCE].mean, average[OURS].mean)}<p class=hero>of the predictions on {domains} that the "
        f"model was never trained for are wrong: before, and with <b class=ours>{OURS}</b>, which adapts while it "
        "predicts, with forward passes alone.</p>"
    )


def figure(caption: str, svg: str) -> str:
    """In the colours of the page: ink is the text's, and there is no paper."""
    drawn = svg.replace(INK, "currentColor").replace("fill: #ffffff", "fill: none")
    return (
        f"<figure><div class=scroll tabindex=0><div class=narrow>{drawn}</div></div>"
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


def html_table(table: ErrorTable, rows: str = "domain") -> str:
    """A heat map with numbers; ours stands out."""
    most = max(cell.mean for cell in table.cells.values()) or 1.0
    methods = sorted(table.methods, key=lambda method: (method != SOURCE, method != OURS))  # before and after first
    ours = [" ours" if method == OURS else "" for method in methods]

    def row(name: str, numbers: list[Number]) -> str:
        (best,) = best_rows([numbers])
        cells = "".join(
            f'<td class="{"best" if i in best else ""}{ours[i]}" style="--heat: {cell.mean / most:.2f}">{cell}</td>'
            for i, cell in enumerate(numbers)
        )
        return f"<tr><td>{worded(name)}</td>{cells}</tr>"

    head = "".join(f'<th class="{mark}">{html.escape(method)}</th>' for method, mark in zip(methods, ours, strict=True))
    body = "".join(row(domain, [table.cells[domain, method] for method in methods]) for domain in table.domains)
    foot = row("average", [table.average[method] for method in methods])
    return f"<table><thead><tr><th>{rows}</th>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


def write_studies(path: Path, studies: Sequence[Study]) -> None:
    """All studies on one page, those of a suite together, in the paper's order."""
    suites = list(dict.fromkeys(study.suite for study in studies))
    ordered = sorted(studies, key=lambda study: (suites.index(study.suite), place(study)))
    links = "".join(
        f'<li><a href="#{anchor(s)}">{html.escape(s.suite)}: {html.escape(s.title)}</a></li>' for s in ordered
    )
    openings = (opening(study) for study in ordered if study.name == STUDIES[0])
    body = f"""{next(filter(None, openings), "")}
<nav><ul>{links}</ul></nav>
<h3>Protocol</h3><p>{PROTOCOL} Numbers are means over seeds ± standard deviation. Bold: no other row of its kind is
better by more than the larger of the two spreads. Italics: the paper's numbers, for its own families and data.</p>
{"".join(map(section, ordered))}"""
    lead = "Tables and figures of the paper, measured by mergetta."
    write_atomically(path, page("mergetta · results", lead, body).encode())


def opening(study: Study) -> str:
    """The headline of a study that has the source model and ours in one part."""
    found = [dict(r) for r in study.records if r.get("part") == "roid" and r["method"] in (SOURCE, OURS)]
    return headline(averages(found, study.facts["domains"]), study.facts["domains"], study.suite)


def place(study: Study) -> int:
    return STUDIES.index(study.name) if study.name in STUDIES else len(STUDIES)


def anchor(study: Study) -> str:
    return html.escape(f"{study.name}-{study.suite}", quote=True)


def section(study: Study) -> str:
    figures = "".join(figure(drawing.caption, drawing.svg) for drawing in study.drawings)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in study.notes)
    versions = ", ".join(f"{name} {number}" for name, number in study.facts["versions"].items())
    settings = html.escape(json.dumps(study.facts["settings"], indent=1))
    return f"""<section id="{anchor(study)}"><h2>{html.escape(study.suite)}: {html.escape(study.title)}</h2>
<p>{html.escape(study.facts["description"])}</p><p><code>{html.escape(study.facts["command"])}</code></p>
{"".join(sheet.html() for sheet in study.sheets)}
{figures}
<ul>{notes}</ul><p>{html.escape(versions)}</p><details><summary>Settings</summary><pre>{settings}</pre></details></section>
"""
