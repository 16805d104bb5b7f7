"""What readers see of a benchmark: tables, figures, pages."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mergetta.bench.cells import Cell
from mergetta.bench.figures import ACCENT, INK, all_figures
from mergetta.bench.fleet import Moment, listed, write_fleet
from mergetta.bench.inputs import target_of
from mergetta.bench.protocol import run_cell
from mergetta.bench.report import write_report
from mergetta.bench.showcase import chosen, outcomes, showcase
from mergetta.bench.store import Store
from mergetta.bench.suite import load_suite
from mergetta.bench.tables import error_table, rich_tables, settings_of, write_json

from .suites import small


def fake_records() -> list[dict]:
    errors = {("a", "x"): [10, 12], ("a", "y"): [30, 30], ("b", "x"): [20, 24], ("b", "y"): [10, 10]}
    return [
        {"method": method, "domain": domain, "seed": seed, "error": float(error), "samples": 4, "seconds": 1.0,
         "forwards": 1.0, "backprop": method == "y", "wrong": [1, 2], "sizes": [2, 2], "passes": [float(error)],
         "family": "f", "expert": "roid"}
        for (domain, method), by_seed in errors.items()
        for seed, error in enumerate(by_seed)
    ]  # fmt: skip


def test_table_means_and_spread() -> None:
    table = error_table(fake_records())
    assert str(table.cells["a", "x"]) == "11.0 ± 1.4"  # standard deviation of 10 and 12: √2
    assert table.average["x"].mean == pytest.approx(16.5)
    assert table.average["x"].spread == pytest.approx(np.std([15, 18], ddof=1))
    assert (str(table.average["x"]), str(table.average["y"])) == ("16.5 ± 2.1", "20.0 ± 0.0")


def test_a_method_with_fewer_seeds_has_its_own_average() -> None:
    table = error_table([record for record in fake_records() if record["method"] == "x" or record["seed"] == 0])
    assert (table.average["x"].mean, str(table.average["y"])) == (pytest.approx(16.5), "20.0")


def test_streams_do_not_share_a_column() -> None:
    records = [r | {"order": "mixed", "batch_size": size} for size in (1, 200) for r in fake_records()]
    table = error_table([r | {"error": 99.0} if r["batch_size"] == 1 else r for r in records])
    assert table.methods[0] == "x, batch 1, mixed order"
    assert (table.average[table.methods[0]].mean, table.average["x, batch 200, mixed order"].mean) == (99.0, 16.5)
    assert error_table(records[:8]).methods == ("x", "y")


def test_json_and_report(tmp_path: Path) -> None:
    suite = small()
    write_json(tmp_path / "r.json", suite, "roid", [0, 1], fake_records())
    content = json.loads((tmp_path / "r.json").read_text())
    assert set(content) == {"suite", "family", "settings", "code", "results"}
    assert {"method", "expert", "domain", "seed", "error", "samples", "seconds"} <= set(content["results"][0])
    write_report(tmp_path / "r.html", "title <&>", "note", fake_records(), settings_of(suite, "roid", [0, 1]))
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") >= 3
    assert "title &lt;&amp;&gt;" in page
    assert "11.0 ± 1.4" in page
    assert "Error by pass" not in page
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )


def test_our_line_is_drawn_even_far_behind() -> None:
    records = [r | {"method": "race-merge", "error": 99.0} if r["method"] == "y" else r for r in fake_records()]
    (svg,) = [svg for caption, svg in all_figures(records).items() if "over the stream" in caption]
    assert ">race-merge</text>" in svg and ">x</text>" in svg


def test_the_page_of_a_long_stream_has_the_table_by_pass(tmp_path: Path) -> None:
    records = [record | {"passes": [record["error"], 5.0]} for record in fake_records()]
    write_report(tmp_path / "r.html", "title", "note", records, {})
    page = (tmp_path / "r.html").read_text()
    _, _, by_pass = page.partition("<h2>Error by pass, percent</h2>")
    assert "<td>pass 1</td>" in by_pass and "<td>pass 2</td>" in by_pass
    assert ">5.0 ± 0.0</td>" in by_pass


def test_no_name_and_no_number_is_cut_in_a_narrow_terminal() -> None:
    """Methods that have no room stand in a table below; bold is of the whole row."""
    names = ["source", "race-merge-without-something", *(f"method-{number}" for number in range(9))]
    records = [{**fake_records()[0], "method": name, "error": 10.0 + place} for place, name in enumerate(names)]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(*rich_tables(error_table(records), console), sep="\n")
    shown = console.export_text()
    assert all(name in shown for name in names) and "…" not in shown
    assert shown.count("error, %") == shown.count("average") == 3
    assert all(shown.count(f" {record['error']:.1f}") == 2 for record in records)
    wide = Console(width=160)
    assert len(list(rich_tables(error_table(records), wide))) == 1


def test_the_page_opens_with_one_number_and_shows_what_was_mended(tmp_path: Path) -> None:
    """By hand: of two images that the source model gets wrong ours gets one right, and it spoils none."""
    suite = load_suite("fashion-bn").restricted(methods=["source", "race-merge"], samples=3)
    records, expected = [], []
    for domain in ("fog", "snow"):
        target = target_of(suite, domain)
        a, b, c = target.labels[target.indices(0, "mixed")].tolist()
        common = {**fake_records()[0], "domain": domain, "samples": 3, "sizes": [3], "wrong": [1]}
        before, after = [a, 9 - b, 9 - c], [a, b, 9 - c]
        records.append({**common, "method": "source", "error": 51.4, "predicted": before})
        records.append({**common, "method": "race-merge", "error": 21.9, "predicted": after})
        expected.append((domain, 9 - b, b))
    fog, snow = outcomes(suite, ["fog", "snow"], records)
    assert (fog.mended.tolist(), fog.broken.any()) == ([False, True, False], False)
    shown = chosen(suite, [fog, snow])
    assert [(one.domain, one.before, one.label) for one in shown] == expected
    np.testing.assert_array_equal(shown[0].pixels, target_of(suite, "fog").images[fog.images[[1]]][0])
    write_report(tmp_path / "r.html", "t", "note", records, {}, showcase(suite, ["fog", "snow"], records))
    page = (tmp_path / "r.html").read_text()
    number = "51.4&thinsp;% <span>→</span> <b>21.9&thinsp;%</b>"
    assert page.index(number) < page.index("note") < page.index("What the model meets") < page.index("became right")
    assert page.index("became right") < page.index("Error, percent") < page.index("<svg")
    assert page.count("<img ") == 2 * 3 + 2  # clean and two domains, two images each; two that were mended
    assert "2 predictions were wrong and became right, 0 were right and became wrong" in page
    assert page.index('<th class="">source</th>') < page.index('<th class=" ours">race-merge</th>')
    assert ACCENT in page and INK not in page
    plain = showcase(suite, ["fog"], [{**record, "predicted": []} for record in records])
    assert "became right" not in plain and plain.count("<img ") == 4


def test_the_last_pass_of_a_long_stream_is_shown(tmp_path: Path) -> None:
    suite = load_suite("fashion-bn").restricted(methods=["source"], samples=300).with_streams(passes=2)
    record = run_cell(suite, Cell("source", None, "gaussian_noise", 0), Store(tmp_path))
    (outcome,) = outcomes(suite, ["gaussian_noise"], [record, {**record, "method": "race-merge"}])
    wrong = np.count_nonzero(outcome.before != outcome.labels)
    assert 100 * wrong / 200 == pytest.approx(record["passes"][1], abs=8)
    assert len(outcome.images) == 200


def test_the_page_of_a_fleet(tmp_path: Path) -> None:
    deployed = {"fog": 60.0, "motion_blur": 40.0}
    moments = [
        Moment(1.0, 2, {}),
        Moment(2.0, 3, {"fog": 50.0, "motion_blur": 30.0}),
        Moment(9.0, 7, {"fog": 30.0, "motion_blur": 20.0}),
    ]
    write_fleet(tmp_path / "f.html", deployed, moments)
    page = (tmp_path / "f.html").read_text()
    assert page.index("50.0&thinsp;% <span>→</span> <b>25.0&thinsp;%</b>") < page.index("<img ") < page.index("<svg")
    assert "<td>motion blur</td><td>40.0</td><td class=ours>20.0</td>" in page and "7 experts" in page
    assert [(row["error"], row["domains"]) for row in listed(moments)] == [
        (None, {}),
        (40.0, moments[1].errors),
        (25.0, moments[2].errors),
    ]
    write_fleet(tmp_path / "none.html", deployed, moments[:1])  # nobody has predicted enough
    assert not (tmp_path / "none.html").exists()
