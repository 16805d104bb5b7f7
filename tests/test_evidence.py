"""The numbers of the README and of docs/results are those of the runs whose summaries are kept."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mergetta import MergettaError
from mergetta.bench.keys import code_of
from mergetta.bench.runner import cells_of
from mergetta.bench.suite import load_suite
from mergetta.bench.tables import settings_of

ROOT = Path(__file__).parents[1]
RUN = "fashion-bn-4000-mixed-200-2-domains"


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def evidence() -> ModuleType:
    return script("evidence")


def test_figures_show_what_runs_say() -> None:
    findings = script("findings")
    for name, runs, methods in findings.BARS:
        svg = (findings.RESULTS / f"finding-{name}.svg").read_text()
        for run in runs.values():
            for method in set(methods) & set(findings.methods_of(run)):
                mean, _ = findings.average(findings.methods_of(run)[method])
                assert f"{method} {mean:.1f}" in svg, "python scripts/findings.py draws the figures"


def bench(methods: tuple[str, ...] = ("source", "cola"), seeds: int = 2, **changes: Any) -> dict[str, Any]:
    """What `mergetta bench --json` writes, of errors that can be added up by hand: 10, 12, … per domain and seed."""
    suite = load_suite("fashion-bn").restricted(methods).changed(**changes)
    cells = cells_of(suite, "roid", ["fog", "snow"], list(range(seeds)))
    records = [
        {"method": cell.method, "domain": cell.domain, "seed": cell.seed, "data": "drawn", "forwards": 1.0,
         "error": 10.0 + 2 * cell.seed + (cell.domain == "snow"), "passes": [20.0 + cell.seed, 10.0],
         "settings": suite.methods[cell.method].model_dump()}
        for cell in cells
    ]  # fmt: skip
    return {
        "suite": suite.name,
        "settings": settings_of(suite, "roid", range(seeds)),
        "code": {name: code_of(settings, "roid") for name, settings in suite.methods.items()},
        "results": records,
    }


def checkout(evidence: ModuleType, folder: Path, page: str) -> Path:
    """A page with one table, of two methods and a third one that nobody has run."""
    (folder / evidence.RUNS).mkdir(parents=True)
    row = {"name": "mixed", "run": RUN, "methods": ["source", "cola", "roid"]}
    spec = {
        "pages": {"page.md": {"one": {"columns": ["a", "b", "c"], "marks": ["", "bold", ""], "rows": [row]}}},
        "runs": {RUN: ["mergetta bench fashion-bn --methods source,cola", "mergetta bench fashion-bn --methods roid"]},
    }
    (folder / evidence.RUNS / "tables.yaml").write_text(json.dumps(spec))
    (folder / "page.md").write_text(page)
    return folder


@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/results/{name}.md" for name in ("streams", "long", "peers", "imagenet"))]
)
def test_pages_are_what_the_runs_say(evidence: ModuleType, page: str) -> None:
    """If not, a number was changed by hand, or a summary without its pages: `python scripts/evidence.py render`."""
    pages = evidence.Pages(ROOT)
    assert pages.rendered(page) == (ROOT / page).read_text()
    assert pages.names()[page] == list(pages.spec["pages"][page])


def test_every_cell_has_a_command(evidence: ModuleType) -> None:
    pages = evidence.Pages(ROOT)
    for _, row, cell in pages.wanted():
        found = [command for command in pages.spec["runs"][cell.run] if cell.method in command]
        assert any(cell.method in command.split("--methods ")[1].split(",") for command in found), (row, cell)


def test_a_changed_number_is_found(evidence: ModuleType, tmp_path: Path) -> None:
    """Of the README itself, once its run is kept."""
    for name in ("README.md", "docs/results", "docs/methods"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    content = bench(("source", "bn-stats", "cola", "race-merge", "roid"))
    content["settings"]["domains"] = ["fog", "snow"]  # as if it were all of them
    content["settings"]["folds"] = 2
    (tmp_path / "bench.json").write_text(json.dumps(content))
    for old in (tmp_path / evidence.RUNS).glob("fashion-bn-4000-mixed-200.json"):
        old.unlink()
    evidence.add(str(tmp_path / "bench.json"), root=tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| 11.5 ± 1.4 | 11.5 ± 1.4 | 11.5 ± 1.4 | **11.5 ± 1.4** | *11.5 ± 1.4* |" in text
    (tmp_path / "README.md").write_text(text.replace("**11.5 ± 1.4**", "**11.4 ± 1.4**"))
    pages = evidence.Pages(tmp_path)
    assert pages.rendered("README.md") == text


def test_a_summary_is_small_and_has_no_paths(evidence: ModuleType) -> None:
    content = bench(passes=2)
    content["settings"] |= {"checkpoint": "/somewhere/weights.pt", "folder": "/somewhere", "family": "/somewhere/my.pt"}
    summary = evidence.summary_of(content)
    text = evidence.text_of(summary)
    assert "/somewhere" not in text and json.loads(text) == summary
    assert summary["run"] == "fashion-bn-my-4000-mixed-200-2-passes-2-domains"
    assert summary["methods"]["cola"]["errors"] == {"fog": [10.0, 12.0], "snow": [11.0, 13.0]}
    assert [evidence.shown(summary["methods"]["cola"], value) for value in ("average", "pass 1", "forwards")] == [
        "11.5 ± 1.4",
        "20.5",
        "1.00",
    ]
    assert evidence.shown(summary["methods"]["cola"], "last pass") == "10.0 ± 0.0"
    assert evidence.shown(summary["methods"]["cola"], "snow") == "12.0 ± 1.4"
    assert evidence.shown(summary["methods"]["cola"], "last quarter") == "15.2 ± 0.4"


def test_what_is_not_kept_is_marked(evidence: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of a row by its name, else the cell; a number of the page stays until its run is there."""
    head = "<!-- measured: one -->\n\n| | a | b | c |\n|---|---:|---:|---:|\n"
    root = checkout(evidence, tmp_path, f"{head}| mixed | 1.0 | 2.0 | 3.0 |\n\n<!-- end -->\n")
    evidence.render(root=root)
    assert "| mixed § | 1.0 | 2.0 | 3.0 |" in (root / "page.md").read_text()
    (root / "bench.json").write_text(json.dumps(bench()))
    evidence.add(str(root / "bench.json"), root=root)
    assert "| mixed | 11.5 ± 1.4 | **11.5 ± 1.4** | 3.0 § |" in (root / "page.md").read_text()
    capsys.readouterr()
    evidence.missing(root=root)
    printed = capsys.readouterr().out
    assert f"there is no roid in {RUN}.json" in printed
    evidence.commands("--missing", root=root)
    printed = capsys.readouterr().out
    assert "--methods roid --json runs/" in printed and "--methods source,cola" not in printed
    (root / "more.json").write_text(json.dumps(bench(("roid",), seeds=1)))
    evidence.add(str(root / "more.json"), root=root)
    assert "| mixed | 11.5 ± 1.4 | **11.5 ± 1.4** | 10.5 |" in (root / "page.md").read_text()
    assert "§" not in (root / "page.md").read_text()


def test_numbers_of_other_code_are_told(evidence: ModuleType) -> None:
    summary = evidence.summary_of(bench())
    assert evidence.outdated(summary) == []
    summary["methods"]["cola"]["code"] = "of last week"
    assert evidence.outdated(summary) == ["cola"]


def test_what_cannot_be_summed_up_is_refused(evidence: ModuleType) -> None:
    content = bench()
    content["results"] = content["results"][:-1]
    with pytest.raises(MergettaError, match="once per domain and seed"):
        evidence.summary_of(content)
    old, other = evidence.summary_of(bench()), evidence.summary_of(bench(expert_samples=50))
    with pytest.raises(MergettaError, match="another expert_samples"):
        evidence.joined(old, other)
