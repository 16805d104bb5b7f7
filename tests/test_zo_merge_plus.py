"""zo-merge-plus: its parts by hand, its cost, and what it promises on real images, however they come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergetta import Expert, MergettaError, OnnxRuntime, TorchRuntime, load_family
from mergetta.adapters.backprop.expert_training import train_expert
from mergetta.adapters.forward_only.normaliser import Aligner, Normaliser, Plain
from mergetta.adapters.forward_only.source_features import SourceFeatures, measure_source
from mergetta.adapters.forward_only.zo_merge_plus import HELD, ZOMergePlus
from mergetta.bench.inputs import clean_images, load_domain
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.export import to_onnx
from tests.confidence import CLASSES, Confidence, each_in_turn, expert, score


@pytest.fixture
def evenly() -> np.ndarray:
    return each_in_turn()


def assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_scale_by_hand(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(1.2), expert(0.9)], temperature=0.1, mirror=False)
    for _ in range(3):
        adapter.predict(evenly)  # two candidates each
    assert adapter.race.rounds == 1
    # the mean of the experts moves by 0.05; shown: once, twice and four times that, the experts, the source model
    caution = 0.04 * np.sqrt([1, 2, 4, 1, 1, 0])  # the more experts
    values = np.array([score(x) for x in (1.05, 1.1, 1.2, 1.2, 0.9, 1.0)]) - caution
    shares = np.exp(values / 0.1) / np.exp(values / 0.1).sum()
    both = shares @ [0.5, 1, 2, 0, 0, 0]
    np.testing.assert_allclose(adapter.weights, [both + shares[3], both + shares[4], shares[5]], rtol=1e-5)


def test_probe_by_hand(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0), expert(0.5)], temperature=0.1, scale=False, mirror=False)
    for _ in range(2):
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
        np.exp(adapter.predict(evenly)), softmax(scale * evenly[:, 0, 0, :CLASSES]), rtol=1e-5
    )  # one view, one model


def test_without_halving_everything_is_shown_once(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0), expert(0.5)], halving=False, mirror=False)
    for _ in range(4):
        adapter.predict(evenly)
    assert adapter.settled
    assert adapter.trials == len(adapter.candidates) == 6


@pytest.mark.parametrize("size", [128, 48, 16, 1])
def test_candidates_are_compared_in_the_same_way_whatever_the_batch(size: int, evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0), expert(0.5)], temperature=0.1, mirror=False)
    for start in range(0, 20 * len(evenly), size):
        adapter.predict(evenly[(start + np.arange(size)) % len(evenly)])
    assert adapter.settled
    assert adapter.trials == 6 + 3 + 2
    expected = ZOMergePlus(Confidence(), [expert(2.0), expert(0.5)], temperature=0.1, mirror=False)
    for _ in range(20):
        expected.predict(evenly)
    np.testing.assert_allclose(adapter.weights, expected.weights, rtol=1e-6)


def test_one_class_at_a_time_is_shown_to_nobody(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0)], mirror=False)
    for label in range(CLASSES):
        for _ in range(3):
            adapter.predict(np.repeat(evenly[label : label + 1], HELD, axis=0))
    assert adapter.trials == adapter.shown == 0
    assert adapter.held is None
    assert not adapter.tried
    adapter.predict(evenly[:HELD])
    assert adapter.trials == 1


def test_half_of_the_images_of_one_class_are_mixed_enough(evenly: np.ndarray) -> None:
    """Four classes: 1 / (Σ π² − 1/4 + 1/64) ≥ 16 for (28, 12, 12, 12) of 64; not for (40, 8, 8, 8)."""
    for most, shown in ((28, 1), (40, 0)):
        adapter = ZOMergePlus(Confidence(), [expert(2.0)], mirror=False)
        labels = np.append(np.zeros(most, int), 1 + np.arange(HELD - most) % 3)
        adapter.predict(evenly[labels])
        assert adapter.trials == shown


def test_without_signatures_of_all_experts_there_is_no_similarity(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0, np.ones((2, 1))), expert(0.5)], probe=False)
    adapter.predict(evenly)
    np.testing.assert_allclose(adapter.weights, [0.5, 0.5, 0])
    with pytest.raises(MergettaError, match="not of this model"):
        ZOMergePlus(Confidence(), [expert(2.0, np.ones((2, 7)))]).predict(evenly)


def test_similarity_by_hand(evenly: np.ndarray) -> None:
    near, far = np.array([[0.0625], [1.1]]), np.array([[3.0], [1.0]])
    adapter = ZOMergePlus(Confidence(), [expert(2.0, far), expert(0.5, near)], probe=False)
    adapter.predict(evenly)
    assert adapter.tried
    # three quarters by similarity, a quarter the mean; the source model has no signature here
    np.testing.assert_allclose(adapter.weights, [0.125, 0.875, 0], atol=1e-3)


def test_mirrored_images_are_predicted_alike(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0)])
    adapter.predict(evenly)
    flipped = evenly[:, :, :, ::-1].copy()
    np.testing.assert_array_equal(adapter.predict(evenly, adapt=False), adapter.predict(flipped, adapt=False))


class Symmetric(Confidence):
    """To this model, a mirrored image is the same: it looks at rows."""

    def look(self, images: np.ndarray) -> np.ndarray:
        return images.sum(axis=(1, 3))[:, :CLASSES]


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


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("batches", [1, 2, 5, 30])
def test_a_state_goes_on_exactly(batch_norm: bool, batches: int, evenly: np.ndarray) -> None:
    adapter, again = (
        ZOMergePlus(Confidence(batch_norm), [expert(2.0, batch_norm=batch_norm), expert(1.5, batch_norm=batch_norm)])
        for _ in range(2)
    )
    for _ in range(batches):
        adapter.predict(evenly[:48])
    state = adapter.state_dict()
    again.load_state_dict(state)
    assert_same_state(again.state_dict(), state)
    for images in (evenly[:48], evenly[48:], evenly + 5):
        np.testing.assert_array_equal(adapter.predict(images), again.predict(images))
    assert_same_state(again.state_dict(), adapter.state_dict())


def hostile(name: str, value: Any) -> Any:
    return pytest.param({name: value}, id=f"{name}-{np.shape(value) if not isinstance(value, list) else 'ragged'}")


@pytest.mark.parametrize(
    "wrong",
    [
        hostile("changed", 500),
        hostile("shown", 64),
        hostile("shifts", -1),
        hostile("trials", 0.5),
        hostile("trials", 2**70),
        hostile("labels", np.zeros(CLASSES + 1)),
        hostile("labels", -np.ones(CLASSES)),
        hostile("tally", np.zeros(CLASSES)),
        hostile("tally", np.full(1 + CLASSES, np.nan)),
        hostile("race.sums", np.full((5, 2), np.nan)),
        hostile("race.rounds", -1),
        hostile("candidates", np.ones((1, 9))),
        hostile("candidates", np.ones((0, 2))),
        hostile("candidates", -np.ones((5, 2))),
        hostile("candidates", np.full((5, 2), "1")),
        hostile("held", np.zeros((2, 4, 4))),
        hostile("held", np.zeros((64, 1, 4, 0))),
        hostile("held", np.full((2, 1, 4, 4), np.nan)),
        hostile("signature.running", np.zeros((2, 1), complex)),
        hostile("signature.running", np.zeros((3, 1))),
        hostile("signature.classes", np.full(CLASSES, np.inf)),
        hostile("signature.classes", np.zeros(CLASSES + 3)),
        hostile("signature.recent.count", -3.0),
        hostile("signature.recent.sums", np.zeros((2, 9))),
        hostile("signature.recent.sums", [[1], [1, 2]]),
        hostile("domain.sums", np.zeros((2, 9))),
        hostile("domain.count", np.inf),
        hostile("moments.sums", np.zeros((2, CLASSES + 1))),
        hostile("moments.count", np.nan),
        hostile("moments.classes", np.zeros(CLASSES - 1)),
        hostile("moments.classes", -np.ones(CLASSES)),
    ],
)
def test_states_that_are_refused_change_nothing(wrong: dict[str, Any], evenly: np.ndarray) -> None:
    adapter, other = (ZOMergePlus(Confidence(True), [expert(2.0, batch_norm=True)]) for _ in range(2))
    adapter.predict(evenly[:40])
    for images in (evenly[:100], evenly[:20]):
        other.predict(images)
    good, before = other.state_dict(), adapter.state_dict()
    assert set(wrong) - {"held"} <= set(good)
    with pytest.raises(MergettaError, match="does not fit"):
        adapter.load_state_dict({**good, **wrong})
    assert_same_state(adapter.state_dict(), before)
    adapter.load_state_dict(good)


def test_a_state_of_other_experts_is_refused(evenly: np.ndarray) -> None:
    one = ZOMergePlus(Confidence(), [expert(2.0)])
    one.predict(evenly)
    with pytest.raises(MergettaError, match="does not fit"):
        ZOMergePlus(Confidence(), [expert(2.0), expert(3.0)]).load_state_dict(one.state_dict())
    with pytest.raises(MergettaError, match="it has no 'shifts'"):
        one.load_state_dict({"trials": 0, "shown": 0})


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize(
    ("model", "mirror", "last"), [(Confidence, True, 2), (Confidence, False, 1), (Symmetric, True, 1)]
)
@pytest.mark.parametrize("size", [48, 16])
def test_passes(
    batch_norm: bool, model: type[Confidence], mirror: bool, last: int, size: int, evenly: np.ndarray
) -> None:
    runtime, evenly = model(batch_norm), evenly[:size]
    if model is Symmetric:
        evenly = evenly.transpose(0, 1, 3, 2)
    experts = [expert(1 + i / 10, batch_norm=batch_norm) for i in range(4)]
    adapter, counts = ZOMergePlus(runtime, experts, mirror=mirror), []
    for _ in range(25 * HELD // size):
        before = runtime.forwarded
        adapter.predict(evenly)
        counts.append((runtime.forwarded - before) / len(evenly))
    large = batch_norm and 4 * size > 64  # beside what is known: such a batch is seen twice
    assert max(counts[1:]) <= 3 + large
    assert max(counts[4:]) <= 3
    assert adapter.tried
    assert adapter.settled == (last == 1)
    assert counts[-1] == last
    runtime.forwarded = 0
    adapter.predict(evenly, adapt=False)
    assert runtime.forwarded == last * len(evenly)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("size", [128, 64, 16])
def test_a_jump_starts_anew(size: int, batch_norm: bool, evenly: np.ndarray) -> None:
    make = lambda: ZOMergePlus(Confidence(batch_norm), [expert(2.0, batch_norm=batch_norm)])  # noqa: E731
    adapter, batch = make(), evenly[:size]
    for _ in range(15 * 128 // size):
        adapter.predict(batch)
    assert adapter.tried
    for _ in range(max(1, HELD // size) - 1):
        adapter.predict(batch + 5)
    assert adapter.shifts == 0
    jumped = adapter.predict(batch + 5)
    assert adapter.shifts == 1
    assert not adapter.tried
    assert adapter.held is not None
    assert (adapter.held >= 5).all()
    assert adapter.seen.count == size
    np.testing.assert_array_equal(jumped, make().predict(batch + 5))  # as on a new device


@pytest.mark.parametrize("batch_norm", [False, True])
def test_to_predict_only_leaves_no_trace(batch_norm: bool, evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(batch_norm), [expert(2.0, batch_norm=batch_norm)])
    for images in (evenly, evenly[:32]):
        before = adapter.state_dict()
        for other in (evenly, evenly + 5, evenly[:1]):
            adapter.predict(other, adapt=False)
        assert_same_state(adapter.state_dict(), before)
        adapter.predict(images)


def test_alignment_by_hand(evenly: np.ndarray) -> None:
    """One frame of a class, which is worth 1 / (1 − 1/4 + 1) images beside 64 of the expert's features."""
    source = SourceFeatures(np.full(CLASSES, 2.0), np.full(CLASSES, 0.3))
    prior = np.stack([np.full(CLASSES, 0.5), np.full(CLASSES, 0.2)])
    adapter = ZOMergePlus(Confidence(), [expert(1.0, features=prior)], source=source, mirror=False, probe=False)
    assert isinstance(adapter.normalise, Aligner)
    x = evenly[:1, 0, 0, :CLASSES].astype(np.float64)
    share = (1 / 1.75) / (1 / 1.75 + 64)
    mean = share * x + (1 - share) * 0.5
    variance = share * x**2 + (1 - share) * (0.2 + 0.25) - mean**2
    expected = (x - mean) * np.sqrt((0.09 + 1e-6) / (variance + 1e-6)) + 2.0
    np.testing.assert_allclose(np.exp(adapter.predict(evenly[:1])), softmax(expected), rtol=1e-5)
    np.testing.assert_allclose(np.exp(adapter.predict(evenly[:1], adapt=False)), softmax(expected), rtol=1e-5)


def test_what_is_normalised_and_aligned() -> None:
    source, features = SourceFeatures(np.zeros(CLASSES), np.ones(CLASSES)), np.ones((2, CLASSES))
    known, unknown, bn = expert(1.0, features=features), expert(1.0), expert(1.0, batch_norm=True)
    for adapter, kind in (
        (ZOMergePlus(Confidence(True), [bn]), Normaliser),
        (ZOMergePlus(Confidence(True), [bn], moments=False), Plain),
        (ZOMergePlus(Confidence(), [known], source), Aligner),
        (ZOMergePlus(Confidence(), [known], source, align=False), Plain),
        (ZOMergePlus(Confidence(), [known]), Plain),
        (ZOMergePlus(Confidence(), [known, unknown], source), Plain),
    ):
        assert type(adapter.normalise) is kind


def test_caution_is_for_experts_that_gain_little(evenly: np.ndarray) -> None:
    shares = []
    for caution in (0.0, 0.04):
        adapter = ZOMergePlus(Confidence(), [expert(1.05)], caution=caution, scale=False, mirror=False)
        for _ in range(3):
            adapter.predict(evenly)
        shares.append(adapter.weights[-1])
    assert shares[0] < 0.5 < shares[1]  # the source model's


def test_what_is_refused() -> None:
    runtime = Confidence()
    with pytest.raises(MergettaError, match="at least one expert"):
        ZOMergePlus(runtime, [])
    with pytest.raises(MergettaError, match="temperature must be positive"):
        ZOMergePlus(runtime, [expert(1.0)], temperature=0)
    with pytest.raises(MergettaError, match="caution must not be negative"):
        ZOMergePlus(runtime, [expert(1.0)], caution=-0.1)
    with pytest.raises(MergettaError, match="different sizes"):
        ZOMergePlus(runtime, [expert(1.0, np.ones((2, 1))), expert(2.0, np.ones((2, 3)))])


@pytest.mark.parametrize("layers", [(1, 3), (3, 3)])
def test_spreads_of_another_model_are_refused(layers: tuple[int, int]) -> None:
    experts = [expert(1.0, batch_norm=True, spread=np.ones((2, count))) for count in layers]
    with pytest.raises(MergettaError, match="spread"):
        ZOMergePlus(Confidence(True), experts)


@pytest.mark.parametrize("width", [(CLASSES, 3), (3, 3)])
def test_features_of_another_model_are_refused(width: tuple[int, int]) -> None:
    source = SourceFeatures(np.zeros(CLASSES), np.ones(CLASSES))
    with pytest.raises(MergettaError, match="features"):
        ZOMergePlus(Confidence(), [expert(1.0, features=np.ones((2, count))) for count in width], source)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_an_expert_that_breaks_the_model_gets_no_weight(batch_norm: bool, evenly: np.ndarray) -> None:
    """Even where the first mixture, the mean of all, is broken by it."""
    experts = [expert(value, batch_norm=batch_norm) for value in (2.0, 3e38)]
    adapter = ZOMergePlus(Confidence(batch_norm), experts, mirror=False)
    with np.errstate(all="ignore"):
        for _ in range(12):
            logits = adapter.predict(evenly * 10)
            assert np.isfinite(logits).all()
            for value in adapter.state_dict().values():  # a device must be able to read it again
                assert np.isfinite(value).all()
    assert len(adapter.multiples) == 1  # four times the mean would be no number
    assert adapter.settled
    assert adapter.weights[1] == 0


@pytest.mark.parametrize("batch_norm", [False, True])
def test_images_without_numbers_leave_no_trace(batch_norm: bool, evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(batch_norm), [expert(2.0, batch_norm=batch_norm)], mirror=False)
    for images in (evenly[:40], evenly[40:60], evenly):
        adapter.predict(images)
        before = adapter.state_dict()
        with np.errstate(all="ignore"):
            adapter.predict(np.full_like(evenly[:1], np.nan))
        assert_same_state(adapter.state_dict(), before)
    adapter.reset()
    with np.errstate(all="ignore"):
        adapter.predict(np.full_like(evenly, np.nan))
    for _ in range(12):
        assert np.isfinite(adapter.predict(evenly)).all()
    assert adapter.settled


def test_a_candidate_without_numbers_leaves_no_trace(evenly: np.ndarray) -> None:
    """What the stream's moments are does not depend on what candidates make of them."""
    found = []
    for value in (1.5, 3e38):
        adapter = ZOMergePlus(Confidence(True), [expert(v, batch_norm=True) for v in (2.0, value)], mirror=False)
        adapter.mean = np.array([1.0, 0, 0])
        adapter.multiples = []
        adapter.reset()
        with np.errstate(all="ignore"):
            for _ in range(2):
                adapter.predict(evenly * 10)
        assert adapter.trials == 4
        found.append(adapter.normalise.moments.state())  # type: ignore[union-attr]
    assert_same_state(found[1], found[0])


def test_images_of_another_size_start_the_held_ones_anew(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0)], mirror=False)
    adapter.predict(evenly[:40])
    adapter.predict(np.pad(evenly[:40], ((0, 0), (0, 0), (0, 2), (0, 0))))
    assert adapter.held is not None
    assert adapter.held.shape == (40, 1, CLASSES + 2, 2 * CLASSES)
    assert adapter.labels.sum() == 40


def test_held_images_are_counted_once(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence(), [expert(2.0)], mirror=False)
    for _ in range(2):
        adapter.predict(evenly[:50])  # 14 of the second batch
    assert adapter.trials == 0 or adapter.labels.sum() in (0, HELD)
    assert adapter.labels.sum() == HELD


def images_of(name: str, count: int, start: int = 0, severity: int = 5) -> tuple[np.ndarray, np.ndarray]:
    return next(iter(load_domain("fashion", None, name, severity, start, count).stream(0, count)))


def clean(count: int) -> tuple[np.ndarray, np.ndarray]:
    domain = clean_images("fashion", None, count)
    assert domain is not None
    return next(iter(domain.stream(0, count)))


def sorted_by_class(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(labels, kind="stable")
    return images[order], labels[order]


def batches(images: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (images[start : start + size] for start in range(0, len(images), size))


def error(adapter: ZOMergePlus, images: np.ndarray, labels: np.ndarray, size: int) -> float:
    adapter.reset()
    predicted = np.concatenate([adapter.predict(batch) for batch in batches(images, size)]).argmax(axis=1)
    return float(np.mean(predicted != labels))


def source_error(runtime: TorchRuntime, images: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(runtime(images, given=1.0).logits.argmax(axis=1) != labels))


def experts_of(runtime: TorchRuntime) -> list[Expert]:
    """Of three domains, from 400 images that no test shows."""
    return [
        train_expert(runtime, batches(images_of(name, 400, start=1000)[0], 100), domain=name)
        for name in ("fog", "defocus_blur", "impulse_noise")
    ]


@pytest.fixture(scope="module")
def subject() -> ZOMergePlus:
    runtime = TorchRuntime(load_family("fashion-bn"))
    return ZOMergePlus(runtime, experts_of(runtime))


@pytest.fixture(scope="module")
def experts(subject: ZOMergePlus) -> list[Expert]:
    return experts_of(subject.runtime)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def device() -> OnnxRuntime:
    return OnnxRuntime(to_onnx(load_family("fashion-bn")).SerializeToString(), threads=1)


class TestOnRealImages:
    @pytest.mark.parametrize(("size", "count"), [(1, 200), (16, 400), (200, 400)])
    def test_one_class_after_the_other(self, size: int, count: int, subject: ZOMergePlus) -> None:
        images, labels = images_of("gaussian_noise", count)
        source, mixed = source_error(subject.runtime, images, labels), error(subject, images, labels, size)
        in_order = error(subject, *sorted_by_class(images, labels), size)
        assert subject.trials == subject.shifts == 0  # candidates are not shown what is of one class
        assert source > 0.7
        assert in_order < source - 0.3
        assert in_order <= mixed + 0.12

    @pytest.mark.parametrize("size", [1, 16, 200])
    def test_candidates_are_shown_mixed_images(self, size: int, subject: ZOMergePlus) -> None:
        error(subject, *images_of("gaussian_noise", 200), size)
        assert subject.trials > 0

    @pytest.mark.parametrize("size", [8, 100, 200])
    @pytest.mark.parametrize("order", ["mixed", "sorted"])
    def test_clean_images_lose_nothing(self, size: int, order: str, subject: ZOMergePlus) -> None:
        images, labels = clean(600) if order == "mixed" else sorted_by_class(*clean(600))
        assert error(subject, images, labels, size) <= source_error(subject.runtime, images, labels) + 0.015

    def test_clean_single_frames_lose_nothing(self, subject: ZOMergePlus) -> None:
        images, labels = clean(150)
        assert error(subject, images, labels, 1) <= source_error(subject.runtime, images, labels) + 0.015

    @pytest.mark.parametrize("order", ["mixed", "sorted"])
    @pytest.mark.parametrize("size", [16, 200])
    def test_a_source_model_that_sees_one_class_is_adapted(self, size: int, order: str, subject: ZOMergePlus) -> None:
        images, labels = images_of("contrast", 400)
        predicted = subject.runtime(images, given=1.0).logits.argmax(axis=1)
        assert np.bincount(predicted).max() > 0.7 * len(labels)
        assert source_error(subject.runtime, images, labels) > 0.8
        if order == "sorted":
            images, labels = sorted_by_class(images, labels)
        assert error(subject, images, labels, size) < 0.6

    def test_a_change_of_domain_starts_anew_a_change_of_class_does_not(
        self, subject: ZOMergePlus, experts: list[Expert]
    ) -> None:
        subject.reset()
        for batch in batches(sorted_by_class(*images_of("contrast", 320))[0], 64):
            subject.predict(batch)
        assert subject.shifts == 0
        fresh = ZOMergePlus(subject.runtime, experts)
        for batch in batches(images_of("gaussian_noise", 192)[0], 64):
            np.testing.assert_allclose(np.exp(subject.predict(batch)), np.exp(fresh.predict(batch)), atol=1e-4)
        assert subject.shifts == 1
        assert fresh.shifts == 0

    @pytest.mark.parametrize("name", ["fog", "frost"])
    def test_a_change_is_found_although_predictions_collapse_with_it(self, name: str, subject: ZOMergePlus) -> None:
        """What is known of noise makes most of these images one class, as if classes came one by one."""
        subject.reset()
        for start in ("gaussian_noise", name):
            for batch in batches(images_of(start, 192)[0], 64):
                subject.predict(batch)
        assert subject.shifts == 1

    def test_with_frozen_moments_nothing_depends_on_the_batch(self, subject: ZOMergePlus) -> None:
        images, _ = images_of("gaussian_noise", 200)
        error(subject, images, np.zeros(200, int), 50)
        together = subject.predict(images[:20], adapt=False)
        alone = np.concatenate([subject.predict(image[None], adapt=False) for image in images[:20]])
        np.testing.assert_allclose(together, alone, atol=1e-4)

    def test_the_order_of_groups_in_a_file_changes_nothing(
        self, subject: ZOMergePlus, experts: list[Expert], tmp_path: Path
    ) -> None:
        loaded = []
        for i, each in enumerate(experts):
            turned = Expert(
                dict(reversed(each.groups.items())),
                each.family,
                each.domain,
                each.signature,
                each.features,
                each.spread,
                each.provenance,
            )
            (turned if i % 2 else each).save(tmp_path / "e")
            loaded.append(turned if i == 2 else Expert.load(tmp_path / "e"))
        orders = {tuple(each.groups) for each in loaded}
        assert orders != {tuple(subject.runtime.groups)}
        other = ZOMergePlus(subject.runtime, loaded)
        expected = ZOMergePlus(subject.runtime, experts)
        one, two = (each.normalise.moments.variances for each in (other, expected))  # type: ignore[union-attr]
        assert one is not None and two is not None
        np.testing.assert_array_equal(one.domains, two.domains)
        for batch in batches(images_of("gaussian_noise", 192)[0], 64):
            np.testing.assert_allclose(other.predict(batch), expected.predict(batch), atol=1e-4)

    def test_onnx_gives_the_same_numbers(
        self, subject: ZOMergePlus, experts: list[Expert], device: OnnxRuntime
    ) -> None:
        other = ZOMergePlus(device, experts)
        subject.reset()
        images, _ = images_of("gaussian_noise", 150)
        for batch in batches(images, 50):
            np.testing.assert_allclose(np.exp(subject.predict(batch)), np.exp(other.predict(batch)), atol=2e-3)
        together = other.predict(images[:20], adapt=False)
        alone = np.concatenate([other.predict(image[None], adapt=False) for image in images[:20]])
        np.testing.assert_allclose(together, alone, atol=1e-4)

    @pytest.mark.parametrize("size", [1, 50])
    def test_without_batch_norm(self, size: int) -> None:
        """One class after the other, which alignment to all classes would lead astray; and mixed."""
        runtime = TorchRuntime(load_family("fashion-vit"))
        source = measure_source(runtime, batches(clean(500)[0], 100))
        fog = train_expert(runtime, batches(images_of("fog", 200, start=1000)[0], 50), domain="fog")
        adapter = ZOMergePlus(runtime, [fog], source=source)
        assert isinstance(adapter.normalise, Aligner)
        images, labels = images_of("jpeg_compression", 100)
        before = source_error(runtime, images, labels)
        assert error(adapter, images, labels, size) <= before + 0.02
        assert error(adapter, *sorted_by_class(images, labels), size) <= before + 0.02
