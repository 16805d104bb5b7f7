"""Studies: each table and figure of the paper on a few images, with tables that say what the records say."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergetta import MergettaError
from mergetta.bench.cells import Cell, members
from mergetta.bench.executors import Task
from mergetta.bench.plan import missing_of
from mergetta.bench.protocol import run_cell
from mergetta.bench.report import write_studies
from mergetta.bench.reproduce import STUDIES, chosen_studies, paper, parts_of, reproduce
from mergetta.bench.reproduce.ablation import ALL
from mergetta.bench.reproduce.setting import Setting, averages, error_upto
from mergetta.bench.sheets import Drawing, Row, Sheet, Study, rows_of
from mergetta.bench.store import Store
from mergetta.bench.suite import BundleSettings, MethodSettings, load_suite
from mergetta.bench.tables import Number, best_rows
from mergetta.cli.reproduce import reported

from .suites import THREE, small


class Inline:
    """Runs tasks in this process."""

    def run(self, tasks: Sequence[Task], cache: Path) -> Iterator[tuple[Task, str | None]]:
        for task in tasks:
            task.run(cache)
            yield task, None


def setting(name: str = "fashion-bn", seeds: tuple[int, ...] = (0, 1)) -> Setting:
    return Setting(small(name=name, samples=40), seeds, ("fog",))


def study(what: str, where: Setting, cache: Path) -> Study:
    result, failures = reproduce(what, where, cache, Inline(), "mergetta reproduce", lambda *_: None)
    assert not failures
    return result


@pytest.mark.parametrize("what", ["corruption-table", "ablation", "dimensions", "quantised"])
def test_studies_write_tables_and_figures(what: str, tmp_path: Path) -> None:
    result = study(what, setting(), tmp_path / "cache")
    written = {path.suffix for path in result.write(tmp_path / "out")}
    assert written == {".md", ".csv", ".svg", ".png", ".json"}
    assert Study.load(tmp_path / "out" / f"{what}-fashion-bn.json") == result
    rows = list(csv.reader((tmp_path / "out" / f"{what}-fashion-bn.csv").open()))
    assert len({len(row) for row in rows}) == 1
    again = study(what, setting(), tmp_path / "cache")  # all from the cache: not even the times differ
    assert again.records == result.records


def test_corruption_table_has_both_kinds_of_experts_and_the_paper_beside(tmp_path: Path) -> None:
    result = study("corruption-table", setting(), tmp_path)
    (sheet,) = result.sheets
    names = [row.name for row in sheet.rows]
    assert "zo-merge, DeYO experts" in names and "zo-merge, ROID experts" in names
    assert "roid (back-propagation)" in names
    theirs = {row.name: row for row in sheet.rows if row.paper}
    ours = theirs["ours (ROID) (paper)"]
    assert ours.cells == ("12.8", "12.8")  # on the domains shown
    everywhere = {row.name: row for row in paper.rows("cifar10-c", "wrn-28-10", paper.domains())}
    assert everywhere["ours (ROID) (paper)"].cells[-1] == "16.3"
    assert "wrn-28-10 on cifar10-c" in sheet.caption
    mean = np.mean([r["error"] for r in result.records if r["method"] == "bn-stats"])
    shown = next(row for row in sheet.rows if row.name == "bn-stats").cells[-1]
    assert shown.startswith(f"{mean:.1f} ± ")


def test_dimensions_fall_from_all_norm_weights_to_few(tmp_path: Path) -> None:
    result = study("dimensions", setting(seeds=(0,)), tmp_path)
    counts = [int(row.cells[0].replace(",", "")) for row in result.sheets[0].rows]
    direct, small, merging, reduced, chosen = counts
    assert direct == small > merging >= reduced >= chosen > 0  # two experts here


def test_sensitivity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "mergetta.bench.reproduce.sensitivity"
    for name, values in {
        "KEEP": (0.4,),
        "RANK": (1,),
        "TOLERANCE": (1e-2,),
        "DELTA": (1.0,),
        "RATE": (0.0, 5e-3),
    }.items():
        monkeypatch.setattr(f"{module}.{name}", values)
    monkeypatch.setattr(f"{module}.BATCH", (10,))
    monkeypatch.setattr(f"{module}.EXPERTS", (1, 3))
    monkeypatch.setattr(f"{module}.LENGTH", (20, 40))
    result = study("sensitivity", setting(seeds=(0,)), tmp_path)
    assert len(result.sheets) == 8
    by_method = {(r["part"], r["method"]): r["error"] for r in result.records}
    assert by_method["η", "0"] == by_method["length", "merge"]
    assert by_method["k, share kept", "0.4"] == by_method["length", "zo-merge"]


def test_memory_is_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mergetta.bench.reproduce import memory

    few = {("onnx", "imports"): "imports alone", ("onnx", "inference"): "inference", ("onnx", "cola"): "CoLA"}
    monkeypatch.setattr(memory, "VARIANTS", few)
    result = study("memory", setting(seeds=(0,)), tmp_path)
    peaks = [float(row.cells[0]) for row in result.sheets[0].rows]
    assert 20 < peaks[0] < peaks[1]
    monkeypatch.setattr(memory, "peak_memory", lambda *_: pytest.fail("measured again"))
    assert study("memory", setting(seeds=(0,)), tmp_path).sheets == result.sheets


def test_style_table_conditions() -> None:
    parts = parts_of("style-table", setting())
    assert list(parts) == ["10", "20", "30", "40", "50"]
    for count, part in parts.items():
        assert len(part.domains) == int(count)
        bundle = part.suite.methods["zo-merge"].bundle
        assert bundle is not None
        assert bundle.initial == {10: 0.35, 20: 0.15, 30: 0.10, 40: 0.10, 50: 0.05}[int(count)]


def test_style_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergetta.bench.reproduce.style_table.INITIAL", {2: 0.35})
    result = study("style-table", setting(seeds=(0,)), tmp_path)
    assert result.sheets[0].columns == ("domains", "2")
    assert result.sheets[0].rows[0].name == "source"


def test_studies_of_many_variants_take_one_domain_of_each_kind_unless_asked() -> None:
    suite = load_suite("fashion-bn")
    every = Setting(suite, (0,), suite.domains)
    for name in ("ablation", "dimensions"):
        (part,) = parts_of(name, every).values()
        assert part.domains == ("gaussian_noise", "motion_blur", "fog", "pixelate")
        assert part.suite.domains == suite.domains  # experts of all
        (part,) = parts_of(name, dataclasses.replace(every, asked=True)).values()
        assert part.domains == suite.domains


def test_back_propagation_rows_come_with_their_experts(tmp_path: Path) -> None:
    where = dataclasses.replace(setting(seeds=(0,)), domains=THREE)
    todo = missing_of(list(parts_of("corruption-table", where).values()), tmp_path)
    assert {cell.method for _, cell in todo.cells.values()}.isdisjoint({"roid", "deyo"})
    assert {origin.method for origin in todo.experts.values()} == {"roid", "deyo"}


def test_one_of_several_studies_that_cannot_run_stops_no_other() -> None:
    failed: list[str] = []
    for name in ("style-table", "memory"):
        with reported(name, STUDIES, failed):
            raise MergettaError("There are no styles.") if name == "style-table" else RuntimeError("killed")
    assert failed == ["style-table: There are no styles.", "memory: killed"]
    with pytest.raises(MergettaError), reported("memory", ["memory"], failed):
        raise MergettaError("alone")


def test_unknown_study() -> None:
    assert chosen_studies("all") == STUDIES
    with pytest.raises(MergettaError, match="no study 'table-9'"):
        chosen_studies("table-9")


def record(method: str, domain: str, seed: int, error: float) -> dict[str, Any]:
    return {"method": method, "domain": domain, "seed": seed, "error": error, "wrong": [4, 2], "sizes": [10, 10]}


def test_averages_leave_out_what_is_incomplete() -> None:
    found = [record("a", d, s, 10.0 * s + 2 * (d == "y")) for d in "xy" for s in (0, 1)]
    found += [record("b", "x", 0, 1.0), record("b", "y", 0, 1.0), record("b", "x", 1, 1.0)]
    means = averages(found, ("x", "y"))
    assert means.keys() == {"a"}
    assert means["a"].mean == pytest.approx(6.0)
    assert means["a"].spread == pytest.approx(np.std([1.0, 11.0], ddof=1))


def test_error_of_a_shorter_stream() -> None:
    one = record("a", "x", 0, 30.0)
    assert error_upto(one, 10) == 40.0
    assert error_upto(one, 15) == pytest.approx(100 * 5 / 15)  # half of the second batch
    assert error_upto(one, 20) == 30.0
    with pytest.raises(MergettaError, match="20 images"):
        error_upto(one, 21)


def test_a_difference_within_the_spread_is_no_win() -> None:
    close, far, best = Number(10.4, 0.2), Number(12.0, 0.1), Number(10.0, 0.5)
    assert best_rows([[close, far, best]]) == [{0, 2}]
    assert best_rows([[Number(10.4, 0.1), far, Number(10.0, 0.1)]]) == [{2}]
    assert best_rows([[None, far]]) == [{1}]
    assert best_rows([[Number(10.0, 3.0), Number(10.2, 0.1), far]]) == [{0, 1}]  # the second beats the third
    assert rows_of({"a": [far], "b": [None], "c": [best]})[2].best == (0,)


def test_pool_of_any_size_never_has_the_target() -> None:
    suite = setting().suite
    zo = suite.methods["zo-merge"]
    for count in (1, 2, 3, 8):
        sized = suite.model_copy(update={"methods": {"m": zo.model_copy(update={"pool": count})}})
        found = members(sized, Cell("m", "roid", "fog", 0))
        assert len(found) == count
        assert len(set(found)) == count
        assert "fog" not in {domain for domain, _ in found}
        assert [seed for _, seed in found] == sorted(seed for _, seed in found)
    with pytest.raises(MergettaError, match="has 8 experts"):
        members(
            suite.model_copy(update={"methods": {"m": zo.model_copy(update={"pool": 9})}}), Cell("m", "r", "fog", 0)
        )


@pytest.mark.parametrize("name", ["fashion-bn", "fashion-vit"])
def test_int8_cells(name: str, tmp_path: Path) -> None:
    suite = setting(name).suite
    methods = {n: suite.methods[n].model_copy(update={"runtime": "int8"}) for n in ("source", "cola", "zo-merge")}
    suite = suite.model_copy(update={"methods": methods})
    for method in methods:
        found = run_cell(suite, Cell(method, None if method == "source" else "roid", "fog", 0), Store(tmp_path))
        assert 0 <= found["error"] <= 100
    with pytest.raises(ValueError, match="PyTorch's runtime"):
        MethodSettings(adapter="tent", runtime="int8")


def test_recipes_as_bundles(tmp_path: Path) -> None:
    suite = setting().suite
    merged = MethodSettings(adapter="merge", bundle=BundleSettings(recipe="average"))
    suite = suite.model_copy(update={"methods": {"average": merged}})
    plain = suite.model_copy(update={"methods": {"average": setting().merged(initial=0.5, keep=None, **ALL)}})
    cell = Cell("average", "roid", "fog", 0)
    first, second = (run_cell(s, cell, Store(tmp_path)) for s in (suite, plain))  # two experts, each by a half
    assert first["wrong"] == second["wrong"]


def test_paper_numbers_are_whole() -> None:
    assert len(paper.domains()) == 15
    for row in paper.corruptions():
        mean = np.mean([float(row[domain]) for domain in paper.domains()])
        assert abs(mean - float(row["average"])) < 0.11, row
    assert paper.nearest("cifar10-c", "resnet-20") == ("cifar10-c", "wrn-28-10")
    assert paper.nearest("imagenet-c", "vit-b-16") == ("imagenet-c", "vit-b-16")
    assert paper.rows("cifar10-c", "wrn-28-10", ("mosaic",)) == []


def example() -> Study:
    sheet = Sheet("A <caption>.", ("a", "b"), (Row("x", ("1.0",), (0,)), Row("y & z", ("2.0",), paper=True)))
    facts = {"command": "mergetta x", "description": "d", "versions": {"numpy": "2"}, "settings": {}}
    return Study("ablation", "Ablation", "s", facts, (sheet,), (Drawing("c", "<svg></svg>", ""),), ("note",))


def test_report_escapes_and_contains_everything(tmp_path: Path) -> None:
    write_studies(tmp_path / "report.html", [example()])
    text = (tmp_path / "report.html").read_text()
    assert "A &lt;caption&gt;." in text and "y &amp; z" in text and "mergetta x" in text and "note" in text
    assert "http" not in text.replace("http://www.w3.org", "")  # opens offline


def test_the_report_opens_with_one_number_and_marks_our_row(tmp_path: Path) -> None:
    errors = {"source": (50.0, 60.0), "race-merge": (20.0, 24.0), "cola": (30.0, 30.0)}
    records = [
        {**record(method, domain, seed, error), "part": "roid"}
        for method, found in errors.items()
        for seed in (0, 1)
        for domain, error in zip(("fog", "snow"), found, strict=True)
    ]
    study = dataclasses.replace(
        example(),
        name="corruption-table",
        facts={**example().facts, "domains": ["fog", "snow"]},
        sheets=(Sheet("c", ("x", "average"), (Row("race-merge, ROID experts", ("22.0",)), Row("cola", ("30.0",)))),),
        records=tuple(records),
    )
    write_studies(tmp_path / "report.html", [study])
    text = (tmp_path / "report.html").read_text()
    assert "55.0&thinsp;% <span>→</span> <b>22.0&thinsp;%</b>" in text and "2 domains of s that" in text
    assert "<tr class=ours><td>race-merge, ROID experts" in text and "<tr><td>cola" in text
    write_studies(tmp_path / "report.html", [dataclasses.replace(study, records=tuple(records[:-6]))])
    assert "&thinsp;" not in (tmp_path / "report.html").read_text()  # ours lacks a cell


def test_markdown_marks_best_and_paper() -> None:
    text = example().markdown()
    assert "| x | **1.0** |" in text and "| *y & z* | *2.0* |" in text


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": "other"}', '{"format": "mergetta.study/1", "sheets": 3}']
)
def test_a_broken_study_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(MergettaError, match=r"x\.json is not a study"):
        Study.load(tmp_path / "x.json")
