"""The protocol end to end on a few images: fair streams, left-out experts, every method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mergetta import MergettaError, TorchRuntime, create_adapter
from mergetta.adapters.wrappers.mirrored import Mirrored
from mergetta.bench.cells import Cell, same_run
from mergetta.bench.inputs import clean_images, family_of, place_of, target_of
from mergetta.bench.online import labels_of, online
from mergetta.bench.pools import pool
from mergetta.bench.protocol import create, run_cell
from mergetta.bench.runner import cells_of
from mergetta.bench.store import Store
from mergetta.bench.suite import MethodSettings, load_suite
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import Domain
from mergetta.groups import learnable
from mergetta.losses.probabilities import softmax

from .suites import small, swept


@pytest.mark.parametrize("name", ["fashion-bn", "fashion-vit"])
@pytest.mark.parametrize("expert", ["roid", "deyo"])
def test_every_method_of_every_suite(name: str, expert: str, tmp_path: Path) -> None:
    suite, store = small(name=name), Store(tmp_path)
    for cell in cells_of(suite, expert, ["fog"], [0]):
        record = run_cell(suite, cell, store)
        assert 0 <= record["error"] <= 100
        assert record["samples"] == sum(record["sizes"]) == 60
        assert record["forwards"] >= 1


def test_peers_are_given_what_is_measured_on_clean_images(tmp_path: Path) -> None:
    suite = small("eata", "rmt", "zoa")
    made = {}
    for cell in cells_of(suite, "roid", ["fog"], [0]):
        made[cell.method] = create(suite, cell, TorchRuntime(family_of(suite)), Store(tmp_path))
    groups = TorchRuntime(family_of(suite)).groups
    fisher = made["eata"].fisher  # type: ignore[attr-defined]
    assert {name: len(values) for name, values in fisher.items()} == {n: len(groups[n]) for n in learnable(groups)}
    assert made["rmt"].loss.prototypes.shape[0] == 10  # type: ignore[attr-defined]
    assert made["zoa"].back.source.mean.ndim == 1  # type: ignore[attr-defined]


def test_a_shorter_stream_has_the_same_experts_and_the_same_start(tmp_path: Path) -> None:
    whole, store = small("bn-stats", "merge", "roid"), Store(tmp_path)
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


PEERS = (
    *("lame", "bn-alpha", "adabn", "dua", "unmix-tns", "entropy-merge", "zoa"),
    *("eata", "sar", "cotta", "rmt", "adamerging"),
)

PROMPTED = ("foa", "fozo")


@pytest.mark.parametrize(
    ("adapter", "name"), [*((p, "fashion-bn") for p in PEERS), *((p, "fashion-vit") for p in PROMPTED)]
)
def test_peers_run_by_the_protocol(adapter: str, name: str, tmp_path: Path) -> None:
    settings = MethodSettings(adapter=adapter, options={"views": 2} if adapter == "cotta" else {})
    suite = small(name=name).model_copy(update={"methods": {"peer": settings}})
    (cell,) = cells_of(suite, "roid", ["fog"], [0])
    assert (cell.expert is None) == (adapter not in ("adamerging", "entropy-merge"))
    record = run_cell(suite, cell, Store(tmp_path))
    assert 0 <= record["error"] <= 100


def test_the_target_s_own_expert_is_left_out(tmp_path: Path) -> None:
    experts = pool(small(), Cell("zo-merge", "roid", "fog", 0), Store(tmp_path))
    assert [expert.domain for expert in experts] == ["contrast", "gaussian_noise"]


def test_pool_of_processes_gives_the_same_as_one(tmp_path: Path) -> None:
    suite = small("bn-stats", "zo-merge")
    seen: list[tuple[str, int, int]] = []
    records = swept(suite, ["fog", "contrast"], [0, 1], tmp_path, 2, lambda *step: seen.append(step))
    assert len(records) == 8
    assert seen[-1] == ("results", 8, 8)
    assert ("roid experts", 6, 6) in seen
    single = run_cell(suite, Cell("zo-merge", "roid", "fog", 1), Store(tmp_path / "other"))
    documented = (Path(__file__).parents[1] / "docs/reference/formats.md").read_text()
    assert not {field for field in single if f"`{field}`" not in documented}
    (same,) = [r for r in records if (r["method"], r["domain"], r["seed"]) == ("zo-merge", "fog", 1)]
    assert same["wrong"] == single["wrong"]


def test_methods_without_experts_need_none(tmp_path: Path) -> None:
    swept(small("source"), ["fog"], [0], tmp_path)
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


def test_a_record_keeps_the_last_predictions(tmp_path: Path) -> None:
    suite = load_suite("fashion-bn").restricted(methods=["source"], samples=300)
    record = run_cell(suite, Cell("source", None, "fog", 0), Store(tmp_path))
    truth = target_of(suite, "fog").labels[target_of(suite, "fog").indices(0, "mixed")]
    wrong = np.count_nonzero(np.array(record["predicted"]) != truth[-200:])
    assert len(record["predicted"]) == 200 and record["wrong"][-1] <= wrong <= sum(record["wrong"])


def test_logits_that_are_none(tmp_path: Path) -> None:
    assert labels_of(np.array([[0.0, 1.0], [np.nan, 1.0]]), (2, 2), "m").tolist() == [1, -1]
    with pytest.raises(MergettaError, match=r"m must give a logit per image and class, \(3, 2\), not \(2, 2\)"):
        labels_of(np.zeros((2, 2)), (3, 2), "m")


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
