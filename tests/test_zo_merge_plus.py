"""zo-merge-plus: its parts by hand, its cost, and what it promises on real images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mergetta import Expert, MergettaError, OnnxRuntime, TorchRuntime, load_family
from mergetta.adapters.forward_only.source_features import SourceFeatures, measure_source
from mergetta.adapters.forward_only.zo_merge_plus import HELD, ZOMergePlus
from mergetta.bench.protocol import clean_images, load_domain
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.export import to_onnx
from tests.confidence import CLASSES, Blended, Confidence, each_in_turn, expert, score, shares_of


@pytest.fixture
def evenly() -> np.ndarray:
    return each_in_turn()


def test_scale_by_hand(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(1.2), expert(0.9)], temperature=0.1, mirror=False)
    for _ in range(4):
        adapter.predict(evenly)
    assert adapter.races[0].rounds == 1
    # the mean of the experts moves by 0.05; shown: once, twice and four times that, the experts, the source model
    caution = 0.04 * np.sqrt([1, 2, 4, 1, 1, 0])  # the more experts
    values = np.array([score(x) for x in (1.05, 1.1, 1.2, 1.2, 0.9, 1.0)]) - caution
    shares = np.exp(values / 0.1) / np.exp(values / 0.1).sum()
    both = shares @ [0.5, 1, 2, 0, 0, 0]
    np.testing.assert_allclose(adapter.weights, [both + shares[3], both + shares[4], shares[5]], rtol=1e-5)


def test_probe_by_hand(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0), expert(0.5)], temperature=0.1, scale=False, mirror=False)
    for _ in range(3):
        adapter.predict(evenly)
    # shown in this order: the uniform mixture of the experts (1.25), then the experts, then the source model (1)
    exponents = (np.array([score(1.25), score(2.0), score(0.5), score(1.0)]) - 0.04 * np.array([1, 1, 1, 0])) / 0.1
    shares = np.exp(exponents) / np.exp(exponents).sum()
    np.testing.assert_allclose(
        adapter.weights, [shares[0] / 2 + shares[1], shares[0] / 2 + shares[2], shares[3]], atol=1e-6
    )
    assert not adapter.settled

    # the better two are shown other images; scores are means of two rounds, and count √2 times as much
    adapter.predict(evenly)
    assert adapter.settled
    assert adapter.held is None  # nobody's images are kept longer than needed
    odds = np.exp(np.sqrt(2) * (score(2.0) - score(1.25)) / 0.1)
    np.testing.assert_allclose(adapter.weights, [(odds + 0.5) / (1 + odds), 0.5 / (1 + odds), 0], atol=1e-6)
    scale = adapter.weights @ [2.0, 0.5, 1.0]
    np.testing.assert_allclose(
        np.exp(adapter.predict(evenly)), softmax(scale * evenly[:, 0, 0]), rtol=1e-5
    )  # one view, one model


def test_without_halving_everything_is_shown_once(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence("batch"), [expert(2.0), expert(0.5)], halving=False, mirror=False, guard=False)
    for _ in range(6):
        adapter.predict(evenly)
    assert adapter.settled
    assert adapter.trials == 4 + len(adapter.candidates)
    small = ZOMergePlus(Blended(1.0), [expert(2.0)], halving=False, mirror=False, guard=False)
    shares_of(small, evenly[:16], 60)
    assert (small.prior, small.trials) == (512, 4 + len(small.candidates))


def test_without_statistics_of_all_experts_there_is_no_similarity(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0, np.ones((2, 1))), expert(0.5)], probe=False)
    adapter.predict(evenly)
    np.testing.assert_allclose(adapter.weights, [0.5, 0.5, 0])
    with pytest.raises(MergettaError, match="not of this model"):
        ZOMergePlus(Confidence(), [expert(2.0, np.ones((2, 7)))]).predict(evenly)


def test_similarity_by_hand(evenly: np.ndarray) -> None:
    runtime = Confidence()
    near, far = np.array([[0.0625], [1.1]]), np.array([[3.0], [1.0]])
    adapter = ZOMergePlus(runtime, [expert(2.0, far), expert(0.5, near)], probe=False)
    adapter.predict(evenly)
    assert adapter.tried
    # half by similarity, half the mean; the source model has no statistics here
    np.testing.assert_allclose(adapter.weights, [0.25, 0.75, 0], atol=1e-3)


def test_mirrored_images_are_predicted_alike(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0)])
    adapter.predict(evenly)
    flipped = evenly[:, :, :, ::-1].copy()
    np.testing.assert_array_equal(adapter.predict(evenly, adapt=False), adapter.predict(flipped, adapt=False))


class Symmetric(Confidence):
    """To this model, a mirrored image is the same: it looks at rows."""

    def look(self, images: np.ndarray) -> np.ndarray:
        return images.sum(axis=(1, 3))


def test_a_view_that_changes_nothing_is_dropped_until_the_domain_changes(evenly: np.ndarray) -> None:
    images, runtime = evenly.transpose(0, 1, 3, 2), Symmetric()
    adapter, again = (ZOMergePlus(runtime, [expert(2.0)]) for _ in range(2))
    while not adapter.tried:
        adapter.predict(images)
    assert adapter.compared <= len(images)  # nothing counts before
    adapter.predict(images)
    again.load_state_dict(adapter.state_dict())
    for each in (adapter, again):
        each.predict(images)
        assert each.compared >= 2 * len(images)
        assert (each.changed, each.settled) == (0, True)
    adapter.predict(images + 5)
    assert (adapter.compared, adapter.settled) == (0, False)


@pytest.mark.parametrize(
    ("changed", "compared", "enough"),
    [(0, 255, False), (0, 256, True), (5, 256, True), (6, 256, False), (25, 1000, True), (30, 1000, False)],
)
def test_how_much_the_mirrored_view_must_change(changed: int, compared: int, enough: bool) -> None:
    """5 + 2√5 = 9.5 < 10.24 = 4 % of 256; 6 + 2√6 = 10.9; 25 + 10 < 40; 30 + 11 > 40."""
    adapter = ZOMergePlus(Confidence(), [expert(2.0)])
    adapter.changed, adapter.compared = changed, compared
    assert adapter.agreed == enough


@pytest.mark.parametrize(
    "wrong",
    [
        {"changed": 5},
        {"shown": 64},
        {"shifts": -1},
        {"recent_images": 3, "recent": np.zeros((2, 0))},
        {"guard.count": np.array([1, 2])},
        {"asked": 0.5},
        {"recent": np.zeros((2, 9)), "running": np.zeros((2, 1))},
        {"race 1.sums": np.full((5, 2), np.nan)},
        {"race 0.rounds": -1},
        {"candidates": np.ones((1, 9))},
        {"candidates": -np.ones((5, 2))},
        {"guard.window": np.zeros(3)},
        {"priors": np.array([0])},
        {"priors": np.array(0)},
        {"priors": np.array([0.0, 64.0, 192.0, 512.0])},
        {"priors": np.array([64, 64, 192, 512])},
        {"held": np.zeros((2, 4, 4))},
        {"held": np.zeros((64, 1, 4, 0))},
        {"candidates": np.full((5, 2), "1")},
        {"recent": [[1], [1, 2]]},
    ],
)
def test_states_that_are_refused_change_nothing(wrong: dict[str, Any], evenly: np.ndarray) -> None:
    adapter, other = (ZOMergePlus(Confidence("batch"), [expert(2.0)]) for _ in range(2))
    for _ in range(2):
        other.predict(evenly)
    before = adapter.state_dict()
    with pytest.raises(MergettaError, match="does not fit"):
        adapter.load_state_dict({**other.state_dict(), **wrong})
    after = adapter.state_dict()
    assert after.keys() == before.keys()
    assert all(np.array_equal(after[name], value) for name, value in before.items())


def test_after_a_jump_the_source_model_is_asked_again(evenly: np.ndarray) -> None:
    runtime = Confidence("batch")
    adapter = ZOMergePlus(runtime, [expert(2.0)], mirror=False)
    for images in (evenly, evenly, evenly + 5, evenly + 5):
        runtime.shares.clear()
        adapter.predict(images)
    assert runtime.shares[0] == 1.0  # the source model with its stored statistics
    assert adapter.shifts == 1
    assert adapter.guard.looks[0, 0] <= 2 * len(evenly)  # what was before is not compared with
    assert adapter.guard.told[0] == len(evenly)


class Counted(Confidence):
    def __init__(self) -> None:
        super().__init__("batch")
        self.sizes: list[int] = []

    def look(self, images: np.ndarray) -> np.ndarray:
        self.sizes.append(len(images))
        return super().look(images)


@pytest.mark.parametrize("size", [127, 100, 48, 33, 7])
def test_candidates_are_shown_equal_portions(size: int, evenly: np.ndarray) -> None:
    runtime = Counted()
    adapter = ZOMergePlus(runtime, [expert(2.0)], mirror=False)
    for _ in range(20):
        adapter.predict(evenly[:size])
    assert len({portion for portion in runtime.sizes if portion != size}) == 1


@pytest.mark.parametrize("kind", ["layer", "batch"])
@pytest.mark.parametrize(
    ("model", "mirror", "last"), [(Confidence, True, 2), (Confidence, False, 1), (Symmetric, True, 1)]
)
@pytest.mark.parametrize("size", [128, 100, 48, 16, 4])
def test_passes(kind: str, model: type[Confidence], mirror: bool, last: int, size: int, evenly: np.ndarray) -> None:
    runtime, evenly = model(kind), evenly[:size]
    if model is Symmetric:
        evenly = evenly.transpose(0, 1, 3, 2)
    adapter = ZOMergePlus(runtime, [expert(1 + i / 10) for i in range(9)], mirror=mirror)
    counts = []
    for _ in range(80 * HELD // min(size, HELD)):
        before = runtime.forwarded
        adapter.predict(evenly)
        counts.append((runtime.forwarded - before) / len(evenly))
    assert max(counts) <= 3
    assert adapter.tried
    assert adapter.settled == (last == 1)
    assert counts[-1] == last
    runtime.forwarded = 0
    adapter.predict(evenly, adapt=False)
    assert runtime.forwarded == last * len(evenly)


def test_one_class_at_a_time_is_left_to_the_source_model(evenly: np.ndarray) -> None:
    runtime = Confidence("batch")
    adapter = ZOMergePlus(runtime, [expert(0.9)], mirror=False)
    alone = 6 * np.repeat(evenly[:1], 100, axis=0)
    for _ in range(3):
        runtime.shares.clear()
        assert np.exp(adapter.predict(alone)) == pytest.approx(softmax(alone[:, 0, 0]), rel=1e-5)
        assert runtime.shares == [1.0, 0.0]  # the source model as it was, and what the batch's own statistics give
    assert adapter.held is None
    assert adapter.guard.doubt
    assert adapter.guard.count == 3
    assert not adapter.settled


def in_doubt() -> ZOMergePlus:
    adapter = ZOMergePlus(Confidence("batch"), [expert(2.0)], mirror=False)
    adapter.guard = replace(adapter.guard, doubt=True)
    return adapter


def test_doubt_ends_with_the_guard(evenly: np.ndarray) -> None:
    """A device that goes on with its state, but without the guard."""
    adapter = ZOMergePlus(Confidence("batch"), [expert(2.0)], guard=False, mirror=False)
    adapter.load_state_dict(in_doubt().state_dict())
    for _ in range(12):
        adapter.predict(evenly)
    assert adapter.settled


def test_doubt_ends_where_nothing_can_be_judged(evenly: np.ndarray) -> None:
    """Or candidates that are numbers would never be tried."""
    adapter = in_doubt()
    merged = adapter._merged
    adapter._merged = lambda w: merged(w) if w[-1] == 1 else {"g": np.array([np.nan], np.float32)}  # type: ignore[method-assign]
    with np.errstate(all="ignore"):
        adapter.predict(evenly)
    assert not adapter.guard.doubt


@pytest.mark.parametrize("size", [128, 64, 16])
def test_a_jump_starts_anew(size: int, evenly: np.ndarray) -> None:
    adapter, batch = ZOMergePlus(Confidence(), [expert(2.0)]), evenly[:size]
    for _ in range(15 * 128 // size):
        adapter.predict(batch)
    assert adapter.tried
    for _ in range(max(1, HELD // size)):
        adapter.predict(batch + 5)
    assert not adapter.tried
    assert not adapter.begun
    assert adapter.held is not None
    assert (adapter.held >= 5).all()


def test_alignment_by_hand(evenly: np.ndarray) -> None:
    source = SourceFeatures(np.full(CLASSES, 2.0), np.full(CLASSES, 0.3))
    adapter = ZOMergePlus(Confidence(), [expert(1.0)], source=source, mirror=False, probe=False)
    x = evenly[:, 0, 0].astype(np.float64)
    trust = len(x) / (len(x) + 16)
    scale = (0.301 / (x.std(axis=0) + 1e-3)) ** trust
    expected = (x - x.mean(axis=0)) * scale + x.mean(axis=0) + trust * (2.0 - x.mean(axis=0))
    np.testing.assert_allclose(np.exp(adapter.predict(evenly)), softmax(expected), rtol=1e-5)


@pytest.mark.parametrize("size", [100, 32])
def test_a_few_classes_are_not_aligned(size: int, evenly: np.ndarray) -> None:
    source = SourceFeatures(np.full(CLASSES, 2.0), np.full(CLASSES, 0.3))
    adapter = ZOMergePlus(Confidence(), [expert(1.0)], source=source, mirror=False, probe=False)
    alone = 6 * np.repeat(evenly[:1], size, axis=0)
    np.testing.assert_allclose(np.exp(adapter.predict(alone)), softmax(alone[:, 0, 0]), rtol=1e-5)


def test_caution_is_for_experts_that_gain_little(evenly: np.ndarray) -> None:
    shares = []
    for caution in (0.0, 0.04):
        adapter = ZOMergePlus(Confidence(), [expert(1.05)], caution=caution, scale=False, mirror=False)
        for _ in range(3):
            adapter.predict(evenly)
        shares.append(adapter.weights[-1])
    assert shares[0] < 0.5 < shares[1]  # the source model's


def test_what_is_refused(evenly: np.ndarray) -> None:
    runtime = Confidence()
    with pytest.raises(MergettaError, match="at least one expert"):
        ZOMergePlus(runtime, [])
    with pytest.raises(MergettaError, match="temperature must be positive"):
        ZOMergePlus(runtime, [expert(1.0)], temperature=0)
    with pytest.raises(MergettaError, match="caution must not be negative"):
        ZOMergePlus(runtime, [expert(1.0)], caution=-0.1)
    with pytest.raises(MergettaError, match="different sizes"):
        ZOMergePlus(runtime, [expert(1.0, np.ones((2, 1))), expert(2.0, np.ones((2, 3)))])


def test_an_expert_that_breaks_the_model_gets_no_weight(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0), expert(3e38)], mirror=False)
    with np.errstate(all="ignore"):
        for _ in range(12):
            logits = adapter.predict(evenly * 10)
            assert np.isfinite(logits).all()
            for value in adapter.state_dict().values():  # a device must be able to read it again
                assert np.isfinite(value).all()
    assert adapter.settled
    assert adapter.weights[1] == 0
    assert len(adapter.multiples) == 1  # four times the mean would be no number


def test_nothing_is_taken_for_granted_where_nothing_was_asked(evenly: np.ndarray) -> None:
    """After a large batch, of which the source model was asked, small ones: the first four trials are left out."""
    adapter = ZOMergePlus(Blended(0.0), [expert(1.5)], mirror=False, guard=False)
    adapter.predict(evenly[:40])
    shares = shares_of(adapter, evenly[:16], 10)
    assert {share for batch in shares[1:] for share in batch} == {0.5}  # 16 images beside 16
    assert adapter.prior == 0


@pytest.mark.parametrize("kind", ["layer", "batch"])
def test_images_without_numbers_leave_no_trace(kind: str, evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(kind), [expert(2.0, np.ones((2, 1)))], mirror=False)
    with np.errstate(all="ignore"):
        adapter.predict(np.full_like(evenly, np.nan))
        for _ in range(12):
            assert np.isfinite(adapter.predict(evenly)).all()
    adapter.load_state_dict(adapter.state_dict())
    assert adapter.settled


def test_images_of_another_size_start_the_held_ones_anew(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0)], mirror=False)
    adapter.predict(evenly[:40])
    adapter.predict(np.pad(evenly[:40], ((0, 0), (0, 0), (0, 2), (0, 0))))
    assert adapter.held is not None
    assert adapter.held.shape == (40, 1, CLASSES + 2, CLASSES)


def test_a_source_model_without_numbers_tells_the_guard_nothing(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence("batch"), [expert(2.0)], mirror=False)
    adapter._merged = lambda weights: {"g": np.array([2.0 if weights[0] else np.nan], np.float32)}  # type: ignore[method-assign]
    with np.errstate(all="ignore"):
        adapter.predict(evenly)
    assert adapter.guard.window[0] == len(evenly)
    assert not adapter.guard.told.any()
    assert adapter.runtime.forwarded == 2 * len(evenly)  # it is asked once


def moved(runtime: TorchRuntime) -> list[Expert]:
    """Three experts a little away from the source model."""
    rng = np.random.default_rng(0)
    return [
        Expert(
            {n: v + 0.02 * rng.normal(size=v.shape) for n, v in runtime.groups.items()},
            runtime.family,
            f"{i}",
            runtime.statistics,
        )
        for i in range(3)
    ]


@pytest.fixture(scope="module")
def subject() -> ZOMergePlus:
    runtime = TorchRuntime(load_family("fashion-bn"))
    return ZOMergePlus(runtime, moved(runtime))


class TestOnRealImages:
    def errors(self, adapter: ZOMergePlus, images: np.ndarray, labels: np.ndarray, size: int) -> tuple[float, float]:
        """Of the adapter, and of the source model."""
        adapter.reset()
        wrong = source = 0
        for i in range(0, len(images), size):
            x, y = images[i : i + size], labels[i : i + size]
            wrong += np.count_nonzero(adapter.predict(x).argmax(axis=1) != y)
            adapter.runtime.load(adapter.runtime.groups)
            source += np.count_nonzero(adapter.runtime(x, source_statistics=1.0).logits.argmax(axis=1) != y)
        return wrong / len(images), source / len(images)

    @pytest.mark.parametrize(
        ("name", "severity", "order", "size"),
        [
            ("jpeg_compression", 5, "sorted", 100),
            ("jpeg_compression", 5, "sorted", 32),
            ("snow", 4, "sorted", 32),  # predictions are even there: only images and the source model's classes turn
            ("jpeg_compression", 5, "stream", 8),
            ("jpeg_compression", 5, "stream", 1),
        ],
    )
    def test_no_worse_than_source(self, name: str, severity: int, order: str, size: int, subject: ZOMergePlus) -> None:
        domain = load_domain("fashion", None, name, severity, 0, 400)
        images, labels = next(iter(domain.stream(0, 400)))
        chosen = np.argsort(labels, kind="stable") if order == "sorted" else np.arange(400)
        mine, source = self.errors(subject, images[chosen], labels[chosen], size)
        assert mine <= source + 0.01

    @pytest.mark.parametrize("size", [100, 64])
    def test_a_domain_that_makes_the_source_model_sure_of_one_class_is_not_left_to_it(
        self, size: int, subject: ZOMergePlus
    ) -> None:
        images, labels = next(iter(load_domain("fashion", None, "contrast", 5, 0, 600).stream(0, 600)))
        mine, source = self.errors(subject, images, labels, size)
        assert source > 0.8
        assert mine < 0.4
        assert not subject.guard.count

    def test_a_change_of_domain_is_no_change_of_classes(self, subject: ZOMergePlus) -> None:
        """Images and what the source model sees in them change with it too, here without a jump after the stem."""
        first, second = (
            next(iter(load_domain("fashion", None, name, 4, start, 400).stream(0, 400)))
            for name, start in (("jpeg_compression", 0), ("frost", 400))
        )
        images, labels = (np.concatenate(pair) for pair in zip(first, second, strict=True))
        mine, source = self.errors(subject, images, labels, 100)
        assert subject.shifts == 0
        assert source > 0.35
        assert mine < 0.2
        assert not subject.guard.count

    def test_no_worse_than_source_without_batch_norm(self) -> None:
        """One class after the other, which alignment to all classes would lead astray."""
        runtime = TorchRuntime(load_family("fashion-vit"))
        clean = clean_images("fashion", None, 500)
        assert clean is not None
        adapter = ZOMergePlus(
            runtime, moved(runtime), source=measure_source(runtime, (x for x, _ in clean.stream(0, 100)))
        )
        images, labels = next(iter(load_domain("fashion", None, "jpeg_compression", 5, 0, 400).stream(0, 400)))
        chosen = np.argsort(labels, kind="stable")
        mine, source = self.errors(adapter, images[chosen], labels[chosen], 100)
        assert mine <= source + 0.01

    def test_onnx_gives_the_same_numbers(self, subject: ZOMergePlus) -> None:
        family = load_family("fashion-bn")
        device = OnnxRuntime(to_onnx(family).SerializeToString(), threads=1)
        experts = [
            Expert(
                {n: subject.runtime.groups[n] + t[i] for n, t in subject.tasks.items()},
                family.fingerprint,
                str(i),
                family.statistics,
            )
            for i in range(3)
        ]
        other = ZOMergePlus(device, experts)
        subject.reset()
        images, _ = next(iter(load_domain("fashion", None, "fog", 5, 0, 100).stream(0, 100)))
        for _ in range(3):
            np.testing.assert_allclose(
                np.exp(subject.predict(images)), np.exp(other.predict(np.asarray(images))), atol=2e-3
            )
