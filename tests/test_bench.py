"""The protocol end to end on a few images: fair streams, left-out experts, a cache that resumes and forgets nothing."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from mergetta import MergettaError, TorchRuntime, create_adapter
from mergetta.adapters.wrappers.mirrored import Mirrored
from mergetta.bench import protocol
from mergetta.bench.cells import Cell, same_run
from mergetta.bench.figures import ACCENT, INK, all_figures
from mergetta.bench.fleet import Moment, listed, write_fleet
from mergetta.bench.inputs import clean_images, family_of, place_of, target_of
from mergetta.bench.keys import cell_key, expert_key
from mergetta.bench.online import labels_of, online
from mergetta.bench.pools import make_expert, pool
from mergetta.bench.protocol import create, run_cell, stored
from mergetta.bench.report import write_report
from mergetta.bench.runner import cells_of, run_suite
from mergetta.bench.showcase import chosen, outcomes, showcase
from mergetta.bench.store import Store, address, code_digest, home_of, parsed
from mergetta.bench.suite import MethodSettings, Suite, load_suite
from mergetta.bench.tables import error_table, rich_tables, settings_of, write_json
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import Domain
from mergetta.groups import learnable
from mergetta.losses.probabilities import softmax

THREE = ("fog", "contrast", "gaussian_noise")


def small(name: str = "fashion-bn", methods: list[str] | None = None) -> Suite:
    suite = load_suite(name).restricted(methods=methods, samples=60)
    return suite.model_copy(update={"domains": THREE, "batch_size": 20})


@pytest.mark.parametrize("name", ["fashion-bn", "fashion-vit"])
@pytest.mark.parametrize("expert", ["roid", "deyo"])
def test_every_method_of_every_suite(name: str, expert: str, tmp_path: Path) -> None:
    suite, store = small(name), Store(tmp_path)
    for cell in cells_of(suite, expert, ["fog"], [0]):
        record = run_cell(suite, cell, store)
        assert 0 <= record["error"] <= 100
        assert record["samples"] == sum(record["sizes"]) == 60
        assert record["forwards"] >= 1


def test_peers_are_given_what_is_measured_on_clean_images(tmp_path: Path) -> None:
    suite = small(methods=["eata", "rmt", "zoa"])
    made = {}
    for cell in cells_of(suite, "roid", ["fog"], [0]):
        made[cell.method] = create(suite, cell, TorchRuntime(family_of(suite)), Store(tmp_path))
    groups = TorchRuntime(family_of(suite)).groups
    fisher = made["eata"].fisher  # type: ignore[attr-defined]
    assert {name: len(values) for name, values in fisher.items()} == {n: len(groups[n]) for n in learnable(groups)}
    assert made["rmt"].loss.prototypes.shape[0] == 10  # type: ignore[attr-defined]
    assert made["zoa"].back.source.mean.ndim == 1  # type: ignore[attr-defined]


def test_a_shorter_stream_has_the_same_experts_and_the_same_start(tmp_path: Path) -> None:
    whole, store = small(methods=["bn-stats", "merge", "roid"]), Store(tmp_path)
    short = whole.model_copy(update={"first": 40})
    for cell in cells_of(whole, "roid", ["fog"], [0]):
        one, two = run_cell(whole, cell, store), run_cell(short, cell, store)
        assert (one["sizes"], two["sizes"], two["samples"]) == ([40, 20], [40], 40)
        assert one["wrong"][:1] == two["wrong"]
    assert len(list((tmp_path / "experts").iterdir())) == 2
    assert same_run(short, "roid", "fog", 0) is None


def test_clean_images_are_not_the_targets() -> None:
    suite = load_suite("fashion-bn")
    clean = clean_images(place_of(suite), 2000)
    assert clean is not None
    targets = {image.tobytes() for image in np.asarray(load_fashion()[0])}
    assert not any(image.tobytes() in targets for image in np.asarray(clean.images))


PEERS = ("lame", "bn-alpha", "adabn", "zoa", "eata", "sar", "cotta", "rmt", "adamerging")
PROMPTED = ("foa", "fozo")


@pytest.mark.parametrize(
    ("adapter", "name"), [*((p, "fashion-bn") for p in PEERS), *((p, "fashion-vit") for p in PROMPTED)]
)
def test_peers_run_by_the_protocol(adapter: str, name: str, tmp_path: Path) -> None:
    settings = MethodSettings(adapter=adapter, options={"views": 2} if adapter == "cotta" else {})
    suite = small(name).model_copy(update={"methods": {"peer": settings}})
    (cell,) = cells_of(suite, "roid", ["fog"], [0])
    assert (cell.expert is None) == (adapter != "adamerging")
    record = run_cell(suite, cell, Store(tmp_path))
    assert 0 <= record["error"] <= 100


def test_the_target_s_own_expert_is_left_out(tmp_path: Path) -> None:
    experts = pool(small(), Cell("zo-merge", "roid", "fog", 0), Store(tmp_path))
    assert [expert.domain for expert in experts] == ["contrast", "gaussian_noise"]


def test_records_are_cached_and_results_do_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite, store = small(), Store(tmp_path)
    cell = Cell("zo-merge", "roid", "fog", 0)
    first = run_cell(suite, cell, store)
    monkeypatch.setattr(protocol, "online", lambda *_: pytest.fail("measured again"))
    assert run_cell(suite, cell, store) == first
    monkeypatch.undo()
    again = run_cell(suite, cell, Store(tmp_path / "other"))
    assert again["wrong"] == first["wrong"]  # the same numbers from an empty cache


def test_a_damaged_cache_is_measured_again(tmp_path: Path) -> None:
    suite, store = small(), Store(tmp_path)
    cell = Cell("merge", "roid", "fog", 0)
    first = run_cell(suite, cell, store)
    (tmp_path / "results" / f"{cell_key(suite, cell)}.json").write_text("{")
    store.expert_path(expert_key(suite, "roid", "contrast", 0)).write_bytes(b"cut")
    assert run_cell(suite, cell, store)["wrong"] == first["wrong"]


def test_keys_depend_on_everything_that_matters() -> None:
    suite = small()
    cell = Cell("zo-merge", "roid", "fog", 0)
    changed = [
        cell_key(suite, cell),
        cell_key(suite, Cell("zo-merge", "roid", "fog", 1)),
        cell_key(suite, Cell("zo-merge", "deyo", "fog", 0)),
        cell_key(suite, Cell("zo-merge", "roid", "contrast", 0)),
        cell_key(suite, Cell("merge", "roid", "fog", 0)),
        cell_key(suite.restricted(severity=4), cell),
        cell_key(suite.restricted(samples=40), cell),
        cell_key(suite.model_copy(update={"batch_size": 10}), cell),
        cell_key(suite.model_copy(update={"domains": THREE[:2]}), cell),
        cell_key(small("fashion-vit"), cell),
    ]
    assert len(set(changed)) == len(changed)
    assert address({"a": 1, "b": 2}) == address({"b": 2, "a": 1})


def forget() -> None:
    for cached in (code_digest, home_of, parsed):
        cached.cache_clear()


def test_code_digest_ignores_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergetta.bench.store.PACKAGE", tmp_path)

    def digest(text: str) -> str:
        (tmp_path / "m.py").write_text(text)
        forget()
        return code_digest("m")

    plain = digest("def f():\n    return 1\n")
    assert digest('"""Doc."""\n\ndef f():\n    """Doc."""\n    # why\n    return 1\n') == plain
    assert digest("def f():\n    return 2\n") != plain
    forget()


def test_code_digest_follows_imports_and_not_registries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergetta.bench.store.PACKAGE", tmp_path)
    files = {
        "m.py": "from mergetta.package import f\nfrom mergetta.adapters import create_adapter\n",
        "package/__init__.py": "from mergetta.package.home import f\nfrom mergetta.package.other import g\n",
        "package/home.py": "f = 1\n",
        "package/other.py": "g = 1\n",
        "adapters/__init__.py": "create_adapter = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    def digest(name: str = "", text: str = "") -> str:
        if name:
            (tmp_path / name).write_text(text)
        forget()
        return code_digest("m")

    before = digest()
    assert digest("package/other.py", "g = 2\n") == before
    assert digest("adapters/__init__.py", "create_adapter = 2\n") == before
    assert digest("package/home.py", "f = 2\n") != before
    forget()


def test_making_an_expert_measures_its_method_on_the_way(tmp_path: Path) -> None:
    suite, store = small(methods=["roid", "tent"]), Store(tmp_path)
    cell = Cell("roid", None, THREE[0], 1)
    assert stored(suite, cell, store) is None
    expert = make_expert(suite, "roid", THREE[0], 1, store)
    on_the_way = stored(suite, cell, store)
    alone = run_cell(suite, cell, Store(tmp_path / "other"))
    assert on_the_way is not None
    assert {**on_the_way, "seconds": 0} == {**alone, "seconds": 0}
    other = suite.restricted(methods=["tent"])
    again = make_expert(other, "roid", THREE[0], 1, Store(tmp_path / "third"))
    assert again.groups.keys() == expert.groups.keys()
    assert all(np.array_equal(again.groups[name], expert.groups[name]) for name in expert.groups)
    assert np.array_equal(again.signature, expert.signature)


def test_pool_of_processes_gives_the_same_as_one(tmp_path: Path) -> None:
    suite = small(methods=["bn-stats", "zo-merge"])
    seen: list[tuple[str, int, int]] = []
    records = run_suite(suite, "roid", ["fog", "contrast"], [0, 1], tmp_path, 2, lambda *step: seen.append(step))
    assert len(records) == 8
    assert seen[-1] == ("results", 8, 8)
    assert ("roid experts", 6, 6) in seen
    single = run_cell(suite, Cell("zo-merge", "roid", "fog", 1), Store(tmp_path / "other"))
    documented = (Path(__file__).parents[1] / "docs/reference/formats.md").read_text()
    assert not {field for field in single if f"`{field}`" not in documented}
    (same,) = [r for r in records if (r["method"], r["domain"], r["seed"]) == ("zo-merge", "fog", 1)]
    assert same["wrong"] == single["wrong"]


def test_methods_without_experts_need_none(tmp_path: Path) -> None:
    run_suite(small(methods=["source"]), "roid", ["fog"], [0], tmp_path, 1)
    assert not (tmp_path / "experts").exists()


def test_streams_are_fixed_by_the_seed_and_complete() -> None:
    domain = Domain("d", np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1), np.arange(10))

    def labels(seed: int) -> list[int]:
        return [int(y) for _, batch in domain.stream(seed, 4) for y in batch]

    assert labels(0) == labels(0)
    assert labels(0) != labels(1)
    assert sorted(labels(0)) == list(range(10))
    for images, truth in domain.stream(0, 4):
        np.testing.assert_allclose(images.ravel() * 255, truth, rtol=1e-6)


VALID = "family: f\ndata: fashion\nsamples: 1\nbatch_size: 1\nexperts: {}\nmethods: {x: {adapter: source}}\n"


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
    assert set(content) == {"suite", "family", "settings", "results"}
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


def test_a_record_keeps_the_last_predictions(tmp_path: Path) -> None:
    suite = load_suite("fashion-bn").restricted(methods=["source"], samples=300)
    record = run_cell(suite, Cell("source", None, "fog", 0), Store(tmp_path))
    truth = target_of(suite, "fog").labels[target_of(suite, "fog").indices(0, "mixed")]
    wrong = np.count_nonzero(np.array(record["predicted"]) != truth[-200:])
    assert len(record["predicted"]) == 200 and record["wrong"][-1] <= wrong <= sum(record["wrong"])


def test_the_last_pass_of_a_long_stream_is_shown(tmp_path: Path) -> None:
    suite = load_suite("fashion-bn").restricted(methods=["source"], samples=300).with_streams(passes=2)
    record = run_cell(suite, Cell("source", None, "gaussian_noise", 0), Store(tmp_path))
    (outcome,) = outcomes(suite, ["gaussian_noise"], [record, {**record, "method": "race-merge"}])
    wrong = np.count_nonzero(outcome.before != outcome.labels)
    assert 100 * wrong / 200 == pytest.approx(record["passes"][1], abs=8)
    assert len(outcome.images) == 200


def test_logits_that_are_none(tmp_path: Path) -> None:
    assert labels_of(np.array([[0.0, 1.0], [np.nan, 1.0]]), (2, 2), "m").tolist() == [1, -1]
    with pytest.raises(MergettaError, match=r"m must give a logit per image and class, \(3, 2\), not \(2, 2\)"):
        labels_of(np.zeros((2, 2)), (3, 2), "m")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("family: fashion-bn", "is not a valid suite"),
        ("family: [", "is not a valid suite"),
        ("- 1", "is not a valid suite"),
        (
            "family: f\ndata: fashion\nsamples: 1\nbatch_size: 1\nexperts: {}\nmethods: {x: {adapter: magic}}",
            "no adapter",
        ),
        (VALID + "speed: 3", r"is not a valid suite: speed: Extra inputs are not permitted\.$"),
        ("family: f\nsamples: 0", r"data: Field required; samples: Input should be greater than 0; .* more\)\.$"),
        (VALID.replace("experts: {}", "experts: {cola: {}}"), "forward-only"),
        (VALID.replace("experts: {}", "experts: {magic: {}}"), "no adapter 'magic'"),
        (VALID.replace("{adapter: source}", "{adapter: source, options: {lr: 1}}"), "no option 'lr'"),
        (VALID.replace("{adapter: source}", "{adapter: merge}"), "needs its bundle settings"),
        (VALID + "domains: [rain]", "no domain 'rain'"),
    ],
)
def test_bad_suites(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(MergettaError, match=sentence):
        load_suite(str(tmp_path / "s.yaml"))


def test_mirrored_predictions_by_hand() -> None:
    suite = load_suite("fashion-bn").restricted(methods=["bn-stats+mirror"], samples=40)
    cell = Cell("bn-stats+mirror", None, "fog", 0)
    (images, labels), runtime = next(iter(target_of(suite, "fog").stream(0, 200))), TorchRuntime(family_of(suite))
    views = [runtime(view).logits for view in (images, images[:, :, :, ::-1])]
    p = sum(np.exp(v) / np.exp(v).sum(axis=1, keepdims=True) for v in views)
    adapter = create_adapter("bn-stats", runtime)
    record = online(suite, cell, adapter, runtime, wrapped=Mirrored(adapter))
    assert record["wrong"] == [np.count_nonzero(p.argmax(axis=1) != labels)]
    assert record["forwards"] == 2


def test_both_views_of_back_propagation_are_returned_alike() -> None:
    suite = load_suite("fashion-bn").restricted(methods=["roid+mirror"], samples=40)
    runtime = TorchRuntime(family_of(suite))
    images, _ = next(iter(target_of(suite, "fog").stream(0, 40)))
    adapter = create_adapter("roid", runtime, lr=0.0)
    np.testing.assert_allclose(softmax(adapter.look(images)), softmax(adapter.predict(images)), rtol=1e-4)


def test_a_mirrored_method_is_not_what_makes_an_expert() -> None:
    suite = load_suite("fashion-bn").restricted(methods=["roid+mirror"])
    assert same_run(suite, "roid", "fog", 0) is None


@pytest.mark.parametrize("name", ["fashion-bn", "fashion-vit", "cifar10-c", "cifar100-c", "imagenet-c"])
def test_peers_are_compared_only_when_asked_for(name: str) -> None:
    suite = load_suite(name)
    assert "eata" in suite.peers
    assert "eata" not in suite.restricted().methods
    assert list(suite.restricted(methods=["source", "eata"]).methods) == ["source", "eata"]
    assert suite.restricted(methods=["all"]).methods == {**suite.methods, **suite.peers}


def test_bad_choices() -> None:
    with pytest.raises(MergettaError, match="no suite 'mnist'"):
        load_suite("mnist")
    with pytest.raises(MergettaError, match="no method 'magic'"):
        small().restricted(methods=["magic"])
    with pytest.raises(MergettaError, match="no domain 'rain'"):
        small().restricted(domains=["rain"])
    with pytest.raises(MergettaError, match="no experts by 'tent'"):
        expert_key(small(), "tent", "fog", 0)


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
