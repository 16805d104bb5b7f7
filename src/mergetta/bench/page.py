"""An HTML page in the style of all pages: one file that opens anywhere, offline. Devices write some: no matplotlib."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

import mergetta

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --ours: #c8401a; }
@media (prefers-color-scheme: dark) { :root { --ours: #ff8a66; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } .lead { opacity: .75; margin-top: .2rem; overflow-wrap: anywhere; }
.hero { font-size: 1.25rem; max-width: 44rem; }
.number { font-size: clamp(2.4rem, 9vw, 4.5rem); font-weight: 700; line-height: 1.1; margin: 1.5rem 0 0; }
.number span { opacity: .55; font-weight: 400; } .ours, .number b { color: var(--ours); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } tfoot td { border-top: 2px solid var(--line); }
td[style] { background: rgb(120 120 120 / calc(var(--heat) * .5)); }
td.best { font-weight: 700; } tr.paper td { font-style: italic; opacity: .8; }
th.ours, td.ours { border-inline: 2px solid var(--ours); } td.ours, tr.ours td { color: var(--ours); }
.scroll > table > * > tr > :first-child { position: sticky; left: 0; background: Canvas; }
nav ul { columns: 18rem; column-gap: 2.5rem; } h2 { margin-top: 3rem; } code { overflow-wrap: anywhere; }
figure { margin: 2rem 0; } figure svg { width: 100%; height: auto; } figcaption { font-size: .9em; opacity: .8; }
.strip, .gallery { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(7.2rem, 1fr)); }
.gallery { grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
.strip figure, .gallery figure { margin: 0; text-align: center; line-height: 1.25; }
.strip img, .gallery img { width: 100%; aspect-ratio: 1; object-fit: cover; display: block; }
.strip img, .gallery img { image-rendering: pixelated; }
.gallery s { opacity: .7; } .gallery figcaption > * { display: block; } .gallery b { color: var(--ours); }
pre { overflow-x: auto; background: var(--soft); padding: 1rem; border-radius: 6px; font-size: .85em; }
.narrow { min-width: 560px; }
@media (max-width: 640px) {
  .scroll > table > * > tr > :first-child { white-space: normal; min-width: 5rem; max-width: 9rem; }
  .strip { grid-template-columns: repeat(4, 1fr); gap: .4rem; font-size: .85em; }
  .gallery { grid-template-columns: repeat(3, 1fr); gap: .6rem; }
}
@media print {
  body { max-width: none; font-size: 9px; } figure, tr { break-inside: avoid; } nav { display: none; }
  .scroll { overflow: visible; } th, td { padding: .1rem .25rem; white-space: normal; }
  h2 { break-before: page; }
}
"""


def page(title: str, lead: str, body: str) -> str:
    """An HTML document around a body, in the style of all pages."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>{f"<p class=lead>{html.escape(lead)}</p>" if lead else ""}
{body}
<p>mergetta {mergetta.__version__}</p></body></html>
"""


def number(before: float, after: float) -> str:
    """What a page opens with."""
    return f"<p class=number>{before:.1f}&thinsp;% <span>→</span> <b>{after:.1f}&thinsp;%</b></p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], ours: int | None = None) -> str:
    """Text in rows, which scrolls where it is too wide; one column may stand out."""

    def row(kind: str, cells: Sequence[str]) -> str:
        marked = (" class=ours" if i == ours else "" for i in range(len(cells)))
        inner = (f"<{kind}{mark}>{html.escape(cell)}</{kind}>" for mark, cell in zip(marked, cells, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(row("td", cells) for cells in rows)
    return f"<div class=scroll tabindex=0><table><thead>{row('th', columns)}</thead><tbody>{body}</tbody></table></div>"
