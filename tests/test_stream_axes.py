"""The axes of a stream: batch size, order of the classes, with or without a reset between domains."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from mergetta import MergettaError, TorchRuntime, create_adapter
from mergetta.adapters.forward_only.source import Source
from mergetta.arrays import Array
from mergetta.bench import protocol
from mergetta.bench.cells import Cell, members, same_run
from mergetta.bench.inputs import family_of, target_of
from mergetta.bench.keys import cell_key, expert_key
from mergetta.bench.online import online
from mergetta.bench.plan import missing_of
from mergetta.bench.pools import make_expert
from mergetta.bench.protocol import create, run_cell
from mergetta.bench.reproduce import facts_of
from mergetta.bench.reproduce.setting import Setting
from mergetta.bench.runner import Part, cells_of
from mergetta.bench.store import Store
from mergetta.bench.suite import Suite, load_suite
from mergetta.bench.tables import error_table, pass_table
from mergetta.data.streams import ORDERS, Domain, Order, in_slots
from mergetta.seeds import generator

from . import suites
from .test_cli import mergetta

FOUR = ("fog", "contrast", "gaussian_noise", "pixelate")
small = partial(suites.small, domains=FOUR)


def domain(images: int = 600, classes: int = 10) -> Domain:
    """Whose images tell their index."""
    index = np.arange(images)
    pixels = np.stack([index // 256, index % 256], axis=-1).astype(np.uint8)
    return Domain("d", pixels.reshape(images, 1, 1, 2), index % classes)


def runs(labels: np.ndarray) -> int:
    """How often a class begins."""
    return 1 + int(np.count_nonzero(labels[1:] != labels[:-1]))


class TestOrders:
    @pytest.mark.parametrize("order", ORDERS)
    def test_every_image_comes_once_with_its_label(self, order: Order) -> None:
        found = []
        for images, labels in domain().stream(3, 7, order):
            index = np.rint(images[:, :, 0, 0] * 255).astype(int) @ [256, 1]
            assert np.array_equal(index % 10, labels)
            found += index.tolist()
        assert sorted(found) == list(range(600))

    @pytest.mark.parametrize("order", ORDERS)
    def test_an_order_is_fixed_by_the_seed_whatever_the_batch_size(self, order: Order) -> None:
        def labels(seed: int, batch_size: int) -> np.ndarray:
            return np.concatenate([labels for _, labels in domain().stream(seed, batch_size, order)])

        assert np.array_equal(labels(0, 1), labels(0, 64))
        assert not np.array_equal(labels(0, 64), labels(1, 64))

    def test_mixed_is_what_it_always_was(self) -> None:
        assert np.array_equal(domain().indices(5), generator(5, 0, "stream/d").permutation(600))

    def test_sorted_shows_each_class_once_in_the_seed_s_order(self) -> None:
        labels, mixed, found = domain().labels, domain().indices(0), domain().indices(0, "sorted")
        assert runs(labels[found]) == 10
        for label in range(10):
            assert np.array_equal(found[labels[found] == label], mixed[labels[mixed] == label])
        first = {int(labels[domain().indices(seed, "sorted")[0]]) for seed in range(10)}
        assert len(first) > 1

    @pytest.mark.parametrize("seed", range(5))
    def test_correlated_is_between_the_other_two(self, seed: int) -> None:
        of = {order: runs(domain().labels[domain().indices(seed, order)]) for order in ORDERS}
        assert of["sorted"] < of["correlated"] < of["mixed"] / 5
        assert of["correlated"] <= 10 * 10  # classes × slots

    def test_correlated_by_hand(self) -> None:
        """Two classes of four images each, two slots: a quarter and three quarters, then a half and a half."""
        shares = iter([[0.25, 0.75], [0.5, 0.5]])

        class Drawn:
            def dirichlet(self, concentration: list[float]) -> list[float]:
                assert concentration == [0.1, 0.1]
                return next(shares)

            def permutation(self, count: int) -> list[int]:
                return list(range(count))[::-1]

        found = in_slots(np.arange(8), np.array([4, 4, 4, 4, 9, 9, 9, 9]), Drawn())  # type: ignore[arg-type]
        assert found.tolist() == [4, 5, 0, 6, 7, 1, 2, 3]

    def test_slots_are_a_hundred_at_most_and_missing_classes_are_not_missed(self) -> None:
        many = Domain("d", np.zeros((400, 1, 1, 1), np.uint8), np.arange(400) % 200 * 3)
        assert sorted(many.indices(0, "correlated").tolist()) == list(range(400))

    def test_no_such_order(self) -> None:
        with pytest.raises(MergettaError, match="no order 'random'; choose from mixed, sorted, correlated"):
            domain().indices(0, "random")  # type: ignore[arg-type]


class TestKeys:
    cell = Cell("zo-merge", "roid", "fog", 0)

    def test_every_axis_is_in_the_key_of_a_result(self) -> None:
        suite = small()
        keys = [
            cell_key(suite, self.cell),
            cell_key(suite.with_streams(batch_size=1), self.cell),
            cell_key(suite.with_streams(order="sorted"), self.cell),
            cell_key(suite.with_streams(order="correlated"), self.cell),
            cell_key(suite.with_streams(folds=2), self.cell),
            cell_key(suite.with_streams(passes=2), self.cell),
            cell_key(suite.with_streams(continual=True), Cell("zo-merge", "roid", "fog", 0, ())),
            cell_key(suite.with_streams(continual=True), Cell("zo-merge", "roid", "fog", 0, ("gaussian_noise",))),
        ]
        assert len(set(keys)) == len(keys)

    def test_none_is_in_the_key_of_an_expert(self) -> None:
        suite = small()
        for other in (
            suite.with_streams(batch_size=1),
            suite.with_streams(order="sorted"),
            suite.with_streams(passes=2),
            suite.with_streams(continual=True, folds=2),
            suite.with_streams(batch_size=8).with_streams(batch_size=1),
        ):
            assert expert_key(other, "roid", "fog", 0) == expert_key(suite, "roid", "fog", 0)

    def test_only_the_experts_own_stream_measures_their_method_on_the_way(self) -> None:
        suite = small("roid")
        assert same_run(suite, "roid", "fog", 0) == Cell("roid", None, "fog", 0)
        assert same_run(suite.with_streams(batch_size=20), "roid", "fog", 0) == Cell("roid", None, "fog", 0)
        assert same_run(suite.with_streams(batch_size=1), "roid", "fog", 0) is None
        assert same_run(suite.with_streams(order="sorted"), "roid", "fog", 0) is None
        assert same_run(suite.with_streams(passes=2), "roid", "fog", 0) is None

    def test_clean_images_are_measured_in_the_suite_s_own_batches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []
        measured = protocol.measured
        monkeypatch.setattr(protocol, "measured", lambda *facts: seen.append(facts[-2]) or measured(*facts))
        suite, cell = small("zoa").with_streams(batch_size=1), Cell("zoa", None, "fog", 0)
        create(suite, cell, TorchRuntime(family_of(suite)), Store(tmp_path))
        assert seen == [20]
        single = suite.model_copy(update={"expert_batch_size": 1})
        assert cell_key(suite, cell) != cell_key(single, cell)


@pytest.mark.parametrize("order", ORDERS)
def test_a_method_meets_the_stream_that_the_suite_says(order: str) -> None:
    suite = small("source").with_streams(8, order)
    runtime, met = TorchRuntime(family_of(suite)), []
    online(suite, Cell("source", None, "fog", 1), create_adapter("source", runtime), runtime, met.append)
    expected = [images for images, _ in target_of(suite, "fog").stream(1, 8, suite.order)]
    assert len(met) == len(expected) == 8
    assert all(np.array_equal(one, other) for one, other in zip(met, expected, strict=True))


def test_every_pass_has_corruptions_and_an_order_of_its_own() -> None:
    suite, cell = small("source").with_streams(passes=2), Cell("source", None, "gaussian_noise", 1)
    runtime, met = TorchRuntime(family_of(suite)), []
    record = online(suite, cell, create_adapter("source", runtime), runtime, met.append)
    first, second = (np.concatenate(part) for part in (met[:3], met[3:]))
    assert np.array_equal(first, np.concatenate([x for x, _ in target_of(suite, "gaussian_noise").stream(1, 20)]))
    near = np.abs(first[:, None] - second[None]).mean(axis=(2, 3, 4))
    assert near.min() > 0.05  # no image comes again as it was
    assert not np.array_equal(near.argmin(axis=1), np.arange(60))
    assert sorted(near.argmin(axis=1)) == list(range(60))  # but all do, under other noise
    assert record["samples"] == 120
    assert np.mean(record["passes"]) == pytest.approx(record["error"])
    table = pass_table([record, {**record, "domain": "fog", "passes": [0.0, 0.0]}])
    assert [table.cells[f"pass {turn}", "source"].mean for turn in (1, 2)] == [each / 2 for each in record["passes"]]


def test_published_files_and_styles_cannot_be_drawn_again() -> None:
    suite = load_suite("fashion-styles").restricted(["source"], samples=20).with_streams(passes=2)
    assert target_of(suite, suite.domains[0]).labels.size == 20
    with pytest.raises(MergettaError, match="is not drawn at random: a second pass would show the same images"):
        target_of(suite, suite.domains[0], 1)


def test_experts_are_made_from_the_same_stream_whatever_the_target_s(tmp_path: Path) -> None:
    suite = small("roid")
    one = make_expert(suite, "roid", "fog", 0, Store(tmp_path / "one"))
    other = make_expert(suite.with_streams(1, "sorted", continual=True), "roid", "fog", 0, Store(tmp_path / "other"))
    assert all(np.array_equal(other.groups[name], values) for name, values in one.groups.items())
    assert not (tmp_path / "other" / "results").exists()


def test_streams_in_the_suite_are_checked(tmp_path: Path) -> None:
    for wrong, sentence in (
        ({"order": "random"}, "order: Input should be 'mixed', 'sorted' or 'correlated'"),
        ({"batch_size": 0}, "batch_size: Input should be greater than 0"),
        ({"folds": 0}, "folds: Input should be greater than 0"),
        ({"passes": 0}, "passes: Input should be greater than 0"),
    ):
        with pytest.raises(MergettaError, match=sentence):
            small().with_streams(**wrong)  # type: ignore[arg-type]
    text = "family: f\ndata: fashion\nsamples: 1\nbatch_size: 1\nexperts: {}\nmethods: {x: {adapter: source}}\norder: "
    for order, fits in (("random", False), ("sorted", True)):
        (tmp_path / "s.yaml").write_text(text + order)
        if fits:
            assert load_suite(str(tmp_path / "s.yaml")).order == "sorted"
        else:
            with pytest.raises(MergettaError, match=r"is not a valid suite: .*order"):
                load_suite(str(tmp_path / "s.yaml"))


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [32, 28]), (20, [40, 20]), (40, [40, 20])])
def test_records_of_small_batches_are_small(batch_size: int, sizes: list[int]) -> None:
    suite = small("source").with_streams(batch_size=batch_size, order="correlated")
    runtime = TorchRuntime(family_of(suite))
    record = online(suite, Cell("source", None, "fog", 0), create_adapter("source", runtime), runtime)
    assert (record["sizes"], record["samples"]) == (sizes, 60)
    assert record["error"] == pytest.approx(100 * sum(record["wrong"]) / 60)
    assert (record["batch_size"], record["order"], record["visit"]) == (batch_size, "correlated", None)


class Counting(Source):
    """Remembers how many images it had predicted before each batch, of all adapters of its kind."""

    seen: ClassVar[list[int]] = []

    def __init__(self, runtime: TorchRuntime) -> None:
        super().__init__(runtime)
        self.images = 0

    def predict(self, images: Array) -> Array:
        self.seen.append(self.images)
        self.images += len(images)
        return super().predict(images)

    def reset(self) -> None:
        self.images = 0


class TestContinual:
    @pytest.fixture
    def counting(self, monkeypatch: pytest.MonkeyPatch) -> Suite:
        monkeypatch.setattr(protocol, "create", lambda suite, cell, runtime, store: Counting(runtime))
        monkeypatch.setattr(Counting, "seen", [])
        return small("source")

    def test_an_adapter_is_not_reset_within_a_fold(self, counting: Suite, tmp_path: Path) -> None:
        suite = counting.with_streams(continual=True)
        cells = cells_of(suite, "roid", suite.domains, [0])
        assert [(cell.domain, cell.before) for cell in cells] == [
            ("fog", ()),
            ("gaussian_noise", ("fog",)),
            ("contrast", ()),
            ("pixelate", ("contrast",)),
        ]
        records = [run_cell(suite, cell, Store(tmp_path)) for cell in cells[1::2]]
        assert Counting.seen == [0, 20, 40, 60, 80, 100] * 2
        assert [record["visit"] for record in records] == [2, 2]
        first = run_cell(suite, cells[0], Store(tmp_path))  # has been measured on the way
        assert (first["visit"], first["domain"]) == (1, "fog")
        assert len(Counting.seen) == 12

    def test_otherwise_it_starts_anew_on_each_domain(self, counting: Suite, tmp_path: Path) -> None:
        suite = counting.with_streams(folds=2)
        for cell in cells_of(suite, "roid", suite.domains, [0]):
            run_cell(suite, cell, Store(tmp_path))
        assert Counting.seen == [0, 20, 40] * 4

    def test_a_target_has_the_experts_of_the_other_folds(self) -> None:
        reset, continual = small().with_streams(folds=2), small().with_streams(continual=True)
        pools = {d: [name for name, _ in members(reset, Cell("zo-merge", "roid", d, 0))] for d in FOUR}
        assert pools["fog"] == pools["gaussian_noise"] == ["contrast", "pixelate"]
        assert pools["contrast"] == pools["pixelate"] == ["fog", "gaussian_noise"]
        for cell in cells_of(continual.restricted(["zo-merge"]), "roid", FOUR, [0]):
            assert [name for name, _ in members(continual, cell)] == pools[cell.domain]
        assert len(members(small(), Cell("zo-merge", "roid", "fog", 0))) == 3

    def test_the_experts_are_the_same_in_all_visits_however_few(self) -> None:
        suite = small("zo-merge").with_streams(continual=True)
        few = suite.methods["zo-merge"].model_copy(update={"pool": 1})
        suite = suite.model_copy(update={"methods": {"zo-merge": few}, "domains": load_suite("fashion-bn").domains})
        for seed in range(3):
            sequence = cells_of(suite, "roid", suite.domains, [seed])[:8]
            assert len({tuple(members(suite, cell)) for cell in sequence}) == 1

    def test_one_fold_leaves_no_experts(self) -> None:
        suite = small("source", "zo-merge").with_streams(continual=True, folds=1)
        assert len(cells_of(suite.restricted(["source"]), "roid", FOUR, [0])[-1].visits()) == 4
        with pytest.raises(MergettaError, match="zo-merge needs experts, and in one fold"):
            members(suite, Cell("zo-merge", "roid", "fog", 0))

    def test_a_sweep_runs_each_sequence_once_and_resumes(self, tmp_path: Path) -> None:
        suite = small("tent", "merge").with_streams(continual=True)
        seen: list[tuple[str, int, int]] = []
        records = suites.swept(suite, FOUR, [0], tmp_path, 1, lambda *step: seen.append(step))
        assert seen[-1] == ("results", 4, 4)  # two methods, two folds
        assert [r["visit"] for r in records if r["method"] == "tent"] == [1, 2, 1, 2]
        table = error_table(records)
        assert table.domains == ("1 fog", "2 gaussian_noise", "1 contrast", "2 pixelate")
        part = Part(suite, "roid", FOUR, [0])
        assert not missing_of([part], tmp_path).cells
        lost = cell_key(suite, Cell("tent", None, "gaussian_noise", 0, ("fog",)))
        (tmp_path / "results" / f"{lost}.json").unlink()
        again = suites.swept(suite, FOUR, [0], tmp_path, 1, lambda *step: seen.append(step))
        assert seen[-1] == ("results", 1, 1)
        assert [r["wrong"] for r in again] == [r["wrong"] for r in records]

    def test_the_first_visit_is_what_a_reset_gives_and_later_ones_are_not(self, tmp_path: Path) -> None:
        suite, store = small("t3a"), Store(tmp_path)
        continual = suite.with_streams(continual=True)
        for cell in cells_of(continual, "roid", FOUR, [0]):
            one = run_cell(continual, cell, store)
            other = run_cell(suite, Cell("t3a", None, cell.domain, 0), store)
            assert (one["wrong"] == other["wrong"]) == (one["visit"] == 1), cell.domain

    def test_a_domain_may_be_met_again(self, tmp_path: Path) -> None:
        suite = small("tent").with_streams(continual=True)
        records = suites.swept(suite, ["fog", "gaussian_noise", "fog"], [0], tmp_path)
        assert error_table(records).domains == ("1 fog", "2 gaussian_noise", "3 fog")


class TestCaptions:
    def test_the_words(self) -> None:
        suite = load_suite("fashion-bn")
        assert suite.streams == "batch 200, mixed order"
        assert suite.with_streams(1, "sorted").streams == "batch 1, sorted order"
        folds = "2 folds (experts of the other folds only)"
        assert suite.with_streams(folds=2).streams == f"batch 200, mixed order, {folds}"
        expected = f"batch 200, mixed order, continual (no reset within a fold), {folds}"
        assert suite.with_streams(continual=True).streams == expected
        assert suite.with_streams(continual=True, folds=1).streams.endswith("no reset within a fold), 1 fold")

    def test_studies(self) -> None:
        suite = small().with_streams(8, "correlated")
        setting = Setting(suite, (0,), FOUR)
        assert "batch 8, correlated order" in facts_of(setting, [], "")["description"]

    def test_the_command_line(self, tmp_path: Path) -> None:
        command = ["bench", "fashion-bn", "--methods", "source,bn-stats", "--domains", "fog,snow", "--samples", 40]
        command += ["--seeds", 1, "--jobs", 1, "--cache", "cache"]
        streams = ["--batch-size", 8, "--order", "sorted", "--continual"]
        result = mergetta(*command, *streams, "--json", "r.json", "--html", "r.html", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        caption = "batch 8, sorted order, continual (no reset within a fold), 2 folds"
        assert caption in " ".join(result.stdout.split())
        assert caption in (tmp_path / "r.html").read_text()
        content = json.loads((tmp_path / "r.json").read_text())
        assert {key: content["settings"][key] for key in ("batch_size", "order", "continual", "folds")} == {
            "batch_size": 8,
            "order": "sorted",
            "continual": True,
            "folds": 2,
        }
        assert {(r["batch_size"], r["order"]) for r in content["results"]} == {(8, "sorted")}
        assert [r["visit"] for r in content["results"]] == [1, 1, 2, 2]
        plan = mergetta(*command, *streams, "--dry-run", cwd=tmp_path)
        assert caption in " ".join(plan.stdout.split())
        assert "4 are in cache, 0 are to be measured" in " ".join(plan.stdout.split())
        again = mergetta(*command, "--batch-size", 8, "--dry-run", cwd=tmp_path)
        assert "0 are in cache, 4 are to be measured" in " ".join(again.stdout.split())

    def test_studies_of_long_streams(self, tmp_path: Path) -> None:
        command = ["reproduce", "dimensions", "--passes", 2, "--batch-size", 20, "--samples", 40, "--domains", "fog"]
        assert mergetta(*command, "--seeds", 1, "--jobs", 1, "--cache", "cache", cwd=tmp_path).returncode == 0
        content = json.loads((tmp_path / "results" / "dimensions-fashion-bn.json").read_text())
        assert "batch 20, mixed order, 2 passes drawn anew" in content["facts"]["description"]
        assert {(record["samples"], len(record["passes"])) for record in content["records"]} == {(80, 2)}

    def test_a_wrong_order_is_one_sentence(self) -> None:
        result = mergetta("bench", "fashion-bn", "--order", "random")
        assert result.returncode == 2
        assert "order: Input should be 'mixed', 'sorted' or 'correlated'." in " ".join(result.stderr.split())
        assert "Traceback" not in result.stderr

    def test_cost_has_no_streams(self) -> None:
        assert mergetta("bench", "cost", "--order", "sorted").returncode == 2

    def test_help_has_examples(self) -> None:
        text = " ".join(mergetta("bench", "--help").stdout.split())
        assert "Example: mergetta bench fashion-bn --batch-size 1 --order sorted" in text
        assert "Example: mergetta bench fashion-bn --continual" in text
