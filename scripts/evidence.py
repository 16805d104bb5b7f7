"""Tables of README.md and docs/results, from small summaries of the runs that they are made of.

python scripts/evidence.py add runs/*.json     # files of `mergetta bench --json`: keeps summaries, renders the pages
python scripts/evidence.py render              # the pages again, from the summaries
python scripts/evidence.py missing             # cells whose run is not kept, and runs of other code than today's
python scripts/evidence.py commands > run.sh   # all that measures the tables; `--missing`: only what is not kept

A run is called by its settings (`slug_of`), and its summary is `docs/results/runs/SLUG.json`: errors per method, domain
and seed, with a digest of the code. `docs/results/runs/tables.yaml` says which cell comes from which run. A table is
what stands between `<!-- measured: NAME -->` and `<!-- end -->`. A cell whose run is not kept stays as it is in the
page, and is marked with §; a row of which nothing is known yet is left out. `tests/test_evidence.py` fails where a
page and the summaries differ.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mergetta.bench.keys import code_of
from mergetta.bench.suite import load_suite
from mergetta.bench.tables import Number, number
from mergetta.errors import MergettaError
from mergetta.files import write_atomically

ROOT = Path(__file__).parents[1]
RUNS = Path("docs/results/runs")
UNKEPT = "§"
FOOTNOTE = f"{UNKEPT} of a run whose results were not kept: `python scripts/evidence.py missing` names its command."
TABLE = re.compile(r"<!-- measured: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
MARKS = {"bold": "**{}**", "italics": "*{}*", "": "{}"}
CONTEXT = ("samples", "expert_samples", "batch_size", "order", "passes", "continual", "folds", "severity")
DECIMALS = 3


# ---- from `mergetta bench --json` to a summary


def slug_of(content: dict[str, Any]) -> str:
    """The name of a run: what it was measured on, without methods and seeds.

    >>> settings = {"name": "cifar10-c", "family": "resnet-20", "samples": 4000, "order": "mixed", "batch_size": 200,
    ...             "passes": 10, "continual": False, "folds": 2, "severity": 5, "domains": ["fog", "snow"]}
    >>> slug_of({"settings": settings, "results": [{"domain": "fog"}, {"domain": "snow"}]})
    'cifar10-c-resnet-20-4000-mixed-200-10-passes'
    """
    settings, records = content["settings"], content["results"]
    family = Path(str(settings["family"]).replace(":", "-")).stem
    domains = {record["domain"] for record in records}
    folds = settings["folds"] < len(settings["domains"])
    parts = [
        settings["name"] if family in settings["name"] else f"{settings['name']}-{family}",
        settings["samples"],
        f"{settings['order']}-{settings['batch_size']}",
        f"{settings['passes']}-passes" if settings["passes"] > 1 else "",
        "continual" if settings["continual"] else f"{settings['folds']}-folds" if folds else "",
        f"severity-{settings['severity']}" if settings["severity"] != 5 else "",
        f"{len(domains)}-domains" if len(domains) < len(settings["domains"]) else "",
        f"{settings['expert']}-experts" if settings.get("expert", "roid") != "roid" else "",
        *runtimes_of(records),
    ]
    # with two domains in two folds, each is a fold of its own: nothing to say
    return "-".join(str(part) for part in parts if part)


def runtimes_of(records: list[dict[str, Any]]) -> list[str]:
    """`onnx` or `int8`, if methods ran on such models."""
    found = {(record.get("settings") or {}).get("runtime") for record in records}
    return sorted(str(runtime) for runtime in found if runtime)


def summary_of(content: dict[str, Any]) -> dict[str, Any]:
    """Errors in percent per method and domain, one per seed; what a table needs, and no path of any machine."""
    settings, records = content["settings"], content["results"]
    domains = list(dict.fromkeys(record["domain"] for record in records))
    methods = {}
    for name in dict.fromkeys(record["method"] for record in records):
        own = [record for record in records if record["method"] == name]
        seeds = sorted({record["seed"] for record in own})
        cells = {(record["domain"], record["seed"]): record for record in own}
        if len(cells) != len(own) or len(cells) != len(domains) * len(seeds):
            raise MergettaError(f"{name} was not measured once per domain and seed: this run cannot be summed up.")
        passes = [
            np.mean([cells[domain, seed].get("passes") or [np.nan] for domain in domains], axis=0) for seed in seeds
        ]
        methods[name] = {
            "code": content.get("code", {}).get(name, ""),
            "seeds": seeds,
            "forwards": round(float(np.mean([record["forwards"] for record in own])), 2),
            "errors": {d: [round(cells[d, seed]["error"], DECIMALS) for seed in seeds] for d in domains},
            **({"passes": np.round(passes, DECIMALS).tolist()} if settings["passes"] > 1 else {}),
        }
    context = {name: settings.get(name) for name in CONTEXT}
    return {
        "run": slug_of(content),
        "suite": settings["name"],
        "family": Path(str(settings["family"])).name,
        "data": records[0]["data"],
        "experts": settings.get("expert"),
        "runtime": next(iter(runtimes_of(records)), None),
        **context,
        "domains": domains,
        "methods": methods,
    }


def joined(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """The summary with what is new; methods that were not measured again stay."""
    if old is None:
        return new
    different = [name for name in new if name != "methods" and old.get(name) != new[name]]
    if different:
        raise MergettaError(f"{new['run']} is kept with another {different[0]}: remove the old summary first.")
    return {**new, "methods": {**old["methods"], **new["methods"]}}


def text_of(summary: dict[str, Any]) -> str:
    """JSON with one line per list of numbers."""
    flat = re.sub(
        r"\[[^\[\]{}\"]*\]", lambda found: " ".join(found[0].split()).replace("[ ", "[").replace(" ]", "]"),
        json.dumps(summary, indent=1, ensure_ascii=False),
    )  # fmt: skip
    return flat + "\n"


# ---- from summaries to tables


@dataclass(frozen=True)
class Cell:
    """Where a number of a table comes from."""

    run: str
    method: str
    value: str = "average"
    """`average` over domains, one of them, `forwards` per image, `pass N`, `last pass`, or `last quarter` of ten."""


def value_of(entry: dict[str, Any], value: str) -> Number:
    if value == "forwards":
        return Number(entry["forwards"], None)
    if value in entry["errors"]:
        return number(entry["errors"][value])
    if value == "average":
        return number(np.mean(list(entry["errors"].values()), axis=0).tolist())
    passes = np.array(entry["passes"])
    last = {"last quarter": -2, "last pass": -1}
    chosen = passes[:, last[value] :] if value in last else passes[:, [int(value.removeprefix("pass ")) - 1]]
    return number(chosen.mean(axis=1).tolist())


def shown(entry: dict[str, Any], value: str) -> str:
    """
    >>> shown({"errors": {"fog": [20.0, 22.0], "snow": [10.0, 10.0]}}, "average")
    '15.5 ± 0.7'
    """
    found = value_of(entry, value)
    if value == "forwards":
        return f"{found.mean:.2f}"
    return f"{found.mean:.1f}" if value.startswith("pass") else str(found)


@dataclass
class Pages:
    """The pages of a checkout, their tables, and the summaries."""

    root: Path = ROOT
    spec: dict[str, Any] = field(init=False)
    runs: dict[str, dict[str, Any]] = field(init=False)

    def __post_init__(self) -> None:
        self.spec = yaml.safe_load((self.root / RUNS / "tables.yaml").read_text())
        found = sorted((self.root / RUNS).glob("*.json"))
        self.runs = {path.stem: json.loads(path.read_text()) for path in found}

    def names(self) -> dict[str, list[str]]:
        """The tables of each page, as the page has them."""
        return {
            page: [name for name, _ in TABLE.findall((self.root / page).read_text())] for page in self.spec["pages"]
        }

    def cells(self, row: dict[str, Any], table: dict[str, Any]) -> list[Cell | None]:
        count = len(table["columns"])
        methods = row.get("methods") or [row["method"]] * count
        values = table.get("values") or [row.get("value", "average")] * count
        runs = table.get("runs") or [row["run"]] * count
        if not count == len(methods) == len(values) == len(runs):
            raise MergettaError(f"The row {row['name']!r} has not as many cells as its table has columns ({count}).")
        sources = zip(runs, methods, values, strict=True)
        return [Cell(run, method, value) if method else None for run, method, value in sources]

    def entry(self, cell: Cell) -> dict[str, Any] | None:
        methods: dict[str, dict[str, Any]] = self.runs.get(cell.run, {}).get("methods", {})
        return methods.get(cell.method)

    def wanted(self) -> Iterator[tuple[str, str, Cell]]:
        """Every cell with its page and row."""
        for page, tables in self.spec["pages"].items():
            for table in tables.values():
                for row in table["rows"]:
                    yield from ((page, row["name"], cell) for cell in self.cells(row, table) if cell)

    def rendered(self, page: str) -> str:
        """The text of a page with its tables made anew."""
        tables = self.spec["pages"][page]
        return TABLE.sub(lambda found: self.table(found[1], found[2], tables[found[1]]), (self.root / page).read_text())

    def table(self, name: str, before: str, table: dict[str, Any]) -> str:
        old = cells_by_row(before)
        marks = table.get("marks", [""] * len(table["columns"]))
        lines = [f"| {' | '.join([table.get('corner', ''), *map(str, table['columns'])])} |"]
        lines.append(f"|---|{'---:|' * len(table['columns'])}")
        for row in table["rows"]:
            name_, texts = self.row(row, row.get("marks", marks), old.get(row["name"], []), table)
            if any(texts):
                lines.append(f"| {' | '.join([name_, *texts])} |")
        lines = [re.sub(r"  +", " ", line) for line in lines]
        foot = ["", FOOTNOTE] if UNKEPT in "\n".join(lines) else []
        return "\n".join([f"<!-- measured: {name} -->", "", *lines, *foot, "", "<!-- end -->"])

    def row(
        self, row: dict[str, Any], marks: list[str], before: list[str], table: dict[str, Any]
    ) -> tuple[str, list[str]]:
        """Its name and its cells; the name has the mark if all of them are of runs that are not kept."""
        cells = self.cells(row, table)
        kept = [text.removesuffix(UNKEPT).strip() for text in before] + [""] * (len(cells) - len(before))
        entries = [self.entry(cell) if cell else None for cell in cells]
        if any(kept) and not any(entries):
            return f"{row['name']} {UNKEPT}", [text if cell else "" for cell, text in zip(cells, kept, strict=True)]
        texts = []
        for cell, entry, mark, text in zip(cells, entries, marks, kept, strict=True):
            old = f"{text} {UNKEPT}" if cell and text else ""
            texts.append(MARKS[mark].format(shown(entry, cell.value)) if cell and entry else old)
        return row["name"], texts

    def commands(self, only_missing: bool) -> list[str]:
        """What measures the tables, each command once; the runs are those that the tables name."""
        absent = {(cell.run, cell.method) for _, _, cell in self.wanted() if self.entry(cell) is None}
        named = {cell.run for _, _, cell in self.wanted()}
        found: dict[str, None] = {}
        for run, commands in self.spec["runs"].items():
            for number_, command in enumerate(commands if run in named else []):
                methods = set(re.search(r"--methods (\S+)", command)[1].split(","))  # type: ignore[index]
                if not only_missing or any((run, method) in absent for method in methods):
                    found[f"{command} --json runs/{run}{f'-{number_ + 1}' if number_ else ''}.json"] = None
        return list(found)


def cells_by_row(table: str) -> dict[str, list[str]]:
    """The cells of a table in a page, by the name of their row without its mark."""
    rows = [line.strip().strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    return {row[0].strip().removesuffix(f" {UNKEPT}"): [text.strip() for text in row[1:]] for row in rows}


# ---- commands


def outdated(summary: dict[str, Any]) -> list[str]:
    """Methods whose code, or whose experts' code, is not today's."""
    suite = load_suite(summary["suite"], summary["family"]).restricted(summary["methods"])
    suite = suite.on(summary["runtime"]) if summary["runtime"] else suite
    today = {name: code_of(settings, summary["experts"]) for name, settings in suite.methods.items()}
    return [name for name, entry in summary["methods"].items() if entry["code"] != today[name]]


def add(*files: str, root: Path = ROOT) -> None:
    for file in files:
        content = json.loads(Path(file).read_text())
        summary = summary_of(content)
        path = root / RUNS / f"{summary['run']}.json"
        old = json.loads(path.read_text()) if path.exists() else None
        write_atomically(path, text_of(joined(old, summary)).encode())
        print(f"{file}: {', '.join(summary['methods'])} of {summary['run']}")
    render(root=root)


def render(root: Path = ROOT) -> None:
    pages = Pages(root)
    for page in pages.spec["pages"]:
        text = pages.rendered(page)
        if text != (root / page).read_text():
            write_atomically(root / page, text.encode())
            print(f"{page} has changed")


def missing(root: Path = ROOT) -> None:
    pages = Pages(root)
    absent = [(page, row, cell.run, cell.method) for page, row, cell in pages.wanted() if pages.entry(cell) is None]
    for page, row, run, method in dict.fromkeys(absent):
        print(f"{page}: {method} in the row {row!r}: there is no {method} in {run}.json")
    print(f"{len(absent)} of {sum(1 for _ in pages.wanted())} cells are of runs that are not kept.")
    for run, summary in pages.runs.items():
        if old := outdated(summary):
            print(f"{run}: measured with other code than today's: {', '.join(old)}")
    print("\n".join(pages.commands(only_missing=True)))


def commands(*options: str, root: Path = ROOT) -> None:
    """For a shell; DATA is the folder of the public weights and images."""
    print(': "${DATA:?set DATA to the folder that holds cifar10/ and imagenet/}"\nmkdir -p runs')
    print("\n".join(Pages(root).commands("--missing" in options)))
    print("python scripts/evidence.py add runs/*.json")


if __name__ == "__main__":
    tasks: dict[str, Any] = {task.__name__: task for task in (add, render, missing, commands)}
    if len(sys.argv) < 2 or sys.argv[1] not in tasks:
        sys.exit(__doc__)
    tasks[sys.argv[1]](*sys.argv[2:])
