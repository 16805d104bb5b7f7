"""race-merge: its parts by hand, its state and its cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta import Expert, MergettaError, build_bundle, create_adapter
from mergetta.adapters.base import ADAPTING, SETTLED
from mergetta.adapters.forward_only.normaliser import Aligner, Normaliser, Plain
from mergetta.adapters.forward_only.race_merge import RaceMerge, RaceSettings
from mergetta.adapters.forward_only.source_features import SourceFeatures
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.base import Output
from tests.confidence import CAUTION, CLASSES, HELD, Confidence, assert_same_state, expert, passes_of, race_merge, score


def test_scale_by_hand(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(1.2), expert(0.9)], temperature=0.1)
    for _ in range(3):
        adapter.predict(evenly)  # two candidates each
    assert adapter.race.over
    # the mean of the experts moves by 0.05; shown: once, twice and four times that, the experts, the source model
    ends = np.array([1.05, 1.1, 1.2, 1.2, 0.9, 1.0])
    values = np.array([score(x) for x in ends]) - CAUTION * np.abs(ends - 1)
    shares = np.exp(values / 0.1) / np.exp(values / 0.1).sum()
    both = shares @ [0.5, 1, 2, 0, 0, 0]
    np.testing.assert_allclose(adapter.weights, [both + shares[3], both + shares[4], shares[5]], rtol=1e-5)


def test_probe_by_hand(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(2.0), expert(0.5)], temperature=0.1, scale=False)
    adapter.predict(evenly)
    odds = np.exp((score(1.25) - CAUTION * 0.25 - score(1.0)) / 0.1)  # two have been tried
    np.testing.assert_allclose(adapter.weights, np.array([odds / 2, odds / 2, 1]) / (1 + odds), atol=1e-6)
    assert not adapter.settled
    adapter.predict(evenly)
    # shown in this order: the uniform mixture of the experts (1.25), then the source model (1), then the experts
    ends = np.array([1.25, 2.0, 0.5, 1.0])
    exponents = (np.array([score(x) for x in ends]) - CAUTION * np.abs(ends - 1)) / 0.1
    shares = np.exp(exponents) / np.exp(exponents).sum()
    np.testing.assert_allclose(
        adapter.weights, [shares[0] / 2 + shares[1], shares[0] / 2 + shares[2], shares[3]], atol=1e-6
    )
    assert adapter.race.over
    assert adapter.settled
    assert adapter.race.trials.held is None  # nobody's images are kept longer than needed
    scale = adapter.weights @ [2.0, 0.5, 1.0]
    np.testing.assert_allclose(softmax(adapter.predict(evenly)), softmax(scale * evenly[:, 0, 0, :CLASSES]), rtol=1e-5)


def test_everything_is_shown_once(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(2.0), expert(0.5)])
    for tried in (2, 4, 6, 6):
        adapter.predict(evenly)
        assert adapter.race.trials.count == len(adapter.race.scores) == tried
        assert adapter.race.over == (tried == 6)
    assert len(adapter.race.candidates) == 6
    expected = [score(value) for value in (1.25, 1.0, 1.5, 2.0, 2.0, 0.5)]
    np.testing.assert_allclose(adapter.race.scores, expected, rtol=1e-5)


@pytest.mark.parametrize("size", [128, 48, 16, 1])
def test_candidates_are_compared_in_the_same_way_whatever_the_batch(size: int, evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(2.0), expert(0.5)], temperature=0.1)
    for start in range(0, 20 * len(evenly), size):
        adapter.predict(evenly[(start + np.arange(size)) % len(evenly)])
    assert adapter.settled
    assert adapter.race.trials.count == 6
    expected = race_merge(Confidence(), [expert(2.0), expert(0.5)], temperature=0.1)
    for _ in range(20):
        expected.predict(evenly)
    np.testing.assert_allclose(adapter.race.scores, expected.race.scores, rtol=1e-6)
    np.testing.assert_allclose(adapter.weights, expected.weights, rtol=1e-6)


def test_one_class_at_a_time_is_shown_to_nobody(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(2.0)])
    for label in range(CLASSES):
        for _ in range(3):
            adapter.predict(np.repeat(evenly[label : label + 1], HELD, axis=0))
    assert adapter.race.trials.count == 0
    assert adapter.race.trials.held is None
    assert not adapter.settled
    adapter.predict(evenly[:HELD])
    assert adapter.race.trials.count == 1


def test_half_of_the_images_of_one_class_are_mixed_enough(evenly: np.ndarray) -> None:
    """Four classes: 1 / (Σ π² − 1/4 + 1/64) ≥ 16 for (28, 12, 12, 12) of 64; for (56, 3, 3, 2) not even a third of it,
    which would do if the source model said so.
    """
    for most, shown in ((28, 1), (56, 0)):
        adapter = race_merge(Confidence(), [expert(2.0)])
        labels = np.append(np.zeros(most, int), 1 + np.arange(HELD - most) % 3)
        adapter.predict(evenly[labels])
        assert adapter.race.trials.count == shown


def test_without_signatures_of_all_experts_there_is_no_similarity(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(2.0, np.ones((2, 1))), expert(0.5)], probe=False)
    adapter.predict(evenly)
    np.testing.assert_allclose(adapter.weights, [0.5, 0.5, 0])
    with pytest.raises(MergettaError, match="not of this model"):
        race_merge(Confidence(), [expert(2.0, np.ones((2, 7)))]).predict(evenly)


def test_signatures_of_different_sizes_are_as_good_as_none(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(1.0, np.ones((2, 1))), expert(2.0, np.ones((2, 3)))])
    assert adapter.candidates.signatures is None
    adapter.predict(evenly[:8])
    np.testing.assert_allclose(adapter.weights, [0.5, 0.5, 0])


def test_signatures_beside_those_of_another_source_model_are_refused() -> None:
    runtime = Confidence()
    runtime.signature = np.ones((2, 3))
    with pytest.raises(MergettaError, match="not of this model"):
        race_merge(runtime, [expert(2.0, np.ones((2, 1)))])


def test_similarity_by_hand(evenly: np.ndarray) -> None:
    near, far = np.array([[0.0625], [1.1]]), np.array([[3.0], [1.0]])
    adapter = race_merge(Confidence(), [expert(2.0, far), expert(0.5, near)], probe=False)
    adapter.predict(evenly)
    assert adapter.settled
    # three quarters by similarity, a quarter the mean; the source model has no signature here
    np.testing.assert_allclose(adapter.weights, [0.125, 0.875, 0], atol=1e-3)


def test_the_first_mixture_is_tested_at_once(evenly: np.ndarray) -> None:
    """Five of ten candidates are, and the source model; one after every eighth of single frames meanwhile."""
    runtime, experts = Confidence(), [expert(1 + i / 10) for i in range(6)]
    adapter = race_merge(runtime, experts, eager=True)
    assert passes_of(adapter, runtime, evenly[:HELD], 3) == [8, 2, 2]  # two of its own for a new domain
    assert adapter.race.trials.count == 8
    adapter = race_merge(runtime, experts, eager=True)
    counts = [n for i in range(2 * HELD) for n in passes_of(adapter, runtime, evenly[i : i + 1], 1)]
    assert max(counts) == 1 + HELD and [i for i, n in enumerate(counts) if n > 2] == [70, 78, 86, 94, 102, 110]
    assert adapter.race.trials.count == 6


class Piling(Confidence):
    """With a weight below zero it says the last class of everything."""

    def __call__(self, images: np.ndarray, groups: Any = None, given: Any = 0.0, moments: bool = False) -> Output:
        output = super().__call__(images, groups, given, moments)
        weight = (self.groups if groups is None else groups)["n.weight"]
        logits = output.logits if weight > 0 else 0 * output.logits + 9 * np.eye(CLASSES, dtype=np.float32)[-1]
        return output._replace(logits=logits)


def test_a_mixture_that_says_one_class_of_everything_is_tested(evenly: np.ndarray) -> None:
    """Crafted experts can make of the first mixture one that finds no images mixed, and so is never compared. To the
    source model they look mixed; and the first batch gets the answer of who has won by then.
    """
    adapter = race_merge(Piling(), [expert(2.0), expert(-9.0)], eager=True)
    first = adapter.predict(evenly)
    assert adapter.race.begun and (first.argmax(axis=1) == evenly[:, 0, 0, :CLASSES].argmax(axis=1)).all()
    for _ in range(3):
        adapter.predict(evenly)
    assert adapter.race.over and adapter.weights[1] == 0


def test_where_classes_come_one_by_one_nobody_is_tested(evenly: np.ndarray) -> None:
    """To the source model they do not look mixed either."""
    adapter = race_merge(Piling(), [expert(2.0), expert(-9.0)], eager=True)
    for _ in range(3):
        adapter.predict(np.repeat(evenly[:1], HELD, axis=0))
        assert not adapter.race.begun and adapter.race.trials.held is None


def test_a_contributor_gains_nothing_by_many_uploads(evenly: np.ndarray) -> None:
    """Neither in the members' mean and its multiples, nor by claiming the stream's own signature several times."""
    runtime, claimed = Confidence(), np.array([[0.0], [1.0]])
    experts = [expert(value, claimed) for value in (1.2, 1.5, 2.0, 2.5)]
    for names, share in (["a", "b", "b", "b"], 1 / 2), (["a", "b", "c", "d"], 3 / 4):
        bundle = build_bundle(runtime.groups, experts, contributors=names)
        adapter = RaceMerge(runtime, bundle, held=2 * len(evenly))
        for candidate in (adapter.candidates.mean, *adapter.candidates.multiples):
            assert candidate[1:4].sum() == pytest.approx(share * candidate.sum())
        adapter.predict(evenly)
        assert adapter.weights[1:4].sum() / adapter.weights[:4].sum() == pytest.approx(share)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("size", [48, 16])
def test_passes(batch_norm: bool, size: int, evenly: np.ndarray) -> None:
    """With two views: `test_mirrored.py`."""
    runtime, evenly = Confidence(batch_norm), evenly[:size]
    adapter = race_merge(runtime, [expert(1 + i / 10, batch_norm=batch_norm) for i in range(4)])
    counts = passes_of(adapter, runtime, evenly, 25 * HELD // size)
    assert sum(counts[:4]) <= 4 * 3  # a large batch beside what is known is seen twice
    # whenever who wins is another, moments begin anew: by the images that are held, and a large batch is seen twice
    changes = 6 if batch_norm else 0
    assert (np.cumsum(counts[4:]) <= 2 * np.arange(1, len(counts) - 3) + (1 + changes) * HELD / size).all()
    assert adapter.settled
    assert counts[-1] == 1
    runtime.forwarded = 0
    adapter.look(evenly)
    assert runtime.forwarded == len(evenly)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("size", [128, 64, 16])
def test_a_jump_starts_anew(size: int, batch_norm: bool, evenly: np.ndarray) -> None:
    experts, batch = [expert(2.0, batch_norm=batch_norm)], evenly[:size]
    adapter, fresh = (race_merge(Confidence(batch_norm), experts) for _ in range(2))
    for _ in range(15 * 128 // size):
        adapter.predict(batch)
    assert adapter.settled
    for _ in range(max(1, HELD // size) - 1):
        adapter.predict(batch + 5)
    assert adapter.visit.shifts == 0
    jumped = adapter.predict(batch + 5)
    assert adapter.visit.shifts == 1
    assert not adapter.settled
    assert adapter.race.trials.held is not None
    assert (adapter.race.trials.held >= 5).all()
    assert adapter.visit.count == size
    np.testing.assert_array_equal(jumped, fresh.predict(batch + 5))  # as on a new device


@pytest.mark.parametrize("batch_norm", [False, True])
def test_to_predict_only_leaves_no_trace(batch_norm: bool, evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(batch_norm), [expert(2.0, batch_norm=batch_norm)])
    for images in (evenly, evenly[:32]):
        before = adapter.state_dict()
        for other in (evenly, evenly + 5, evenly[:1]):
            adapter.look(other)
        assert_same_state(adapter.state_dict(), before)
        adapter.predict(images)


def test_alignment_by_hand(evenly: np.ndarray) -> None:
    """One frame of a class, which is worth 1 / (1 − 1/4 − 0.005 + 1) images beside 64 of the expert's features."""
    source = SourceFeatures(np.full(CLASSES, 2.0), np.full(CLASSES, 0.3))
    prior = np.stack([np.full(CLASSES, 0.5), np.full(CLASSES, 0.2)])
    adapter = race_merge(Confidence(), [expert(1.0, features=prior)], source=source, probe=False)
    assert isinstance(adapter.normalise, Aligner)
    x = evenly[:1, 0, 0, :CLASSES].astype(np.float64)
    share = (1 / 1.745) / (1 / 1.745 + 64)
    mean = share * x + (1 - share) * 0.5
    variance = share * x**2 + (1 - share) * (0.2 + 0.25) - mean**2
    expected = (x - mean) * np.sqrt((0.09 + 1e-6) / (variance + 1e-6)) + 2.0
    np.testing.assert_allclose(softmax(adapter.predict(evenly[:1])), softmax(expected), rtol=1e-5)
    np.testing.assert_allclose(softmax(adapter.look(evenly[:1])), softmax(expected), rtol=1e-5)


def test_what_is_normalised_and_aligned() -> None:
    source, features = SourceFeatures(np.zeros(CLASSES), np.ones(CLASSES)), np.ones((2, CLASSES))
    known, unknown, bn = expert(1.0, features=features), expert(1.0), expert(1.0, batch_norm=True)
    for adapter, kind in (
        (race_merge(Confidence(True), [bn]), Normaliser),
        (race_merge(Confidence(True), [bn], moments=False), Plain),
        (race_merge(Confidence(), [known], source), Aligner),
        (race_merge(Confidence(), [known], source, align=False), Plain),
        (race_merge(Confidence(), [known]), Plain),
        (race_merge(Confidence(), [known, unknown], source), Plain),
    ):
        assert type(adapter.normalise) is kind


def test_caution_is_for_experts_that_gain_little(evenly: np.ndarray) -> None:
    shares = []
    for caution in (0.0, 0.8):
        adapter = race_merge(Confidence(), [expert(1.05)], caution=caution, scale=False)
        for _ in range(3):
            adapter.predict(evenly)
        shares.append(adapter.weights[-1])
    assert shares[0] < 0.5 < shares[1]  # the source model's


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        *[("temperature", value, "temperature must be at least") for value in (0, -1.0, np.nan, np.inf)],
        *[("caution", value, "caution must not be negative") for value in (-0.1, np.nan, np.inf)],
        *[(name, value, "between 0 and 1") for name in ("mean", "mixed") for value in (-0.1, 1.1, np.nan)],
        *[("held", value, "held must be a whole number of at least 1") for value in (0, -5, 64.5, 1e9)],
        *[("patience", value, "patience must be a whole number") for value in (-5, np.nan)],
        *[("finals", 1.5, "finals must be"), ("rest", 2.5, "rest must be"), ("home", np.inf, "home must be finite")],
    ],
)
def test_settings_that_are_refused(name: str, value: float, sentence: str) -> None:
    for make in (
        lambda: RaceSettings(**{name: value}),  # type: ignore[arg-type]
        lambda: race_merge(Confidence(), [expert(1.0)], **{name: value}),
        lambda: race_merge(Confidence(), [expert(1.0)], settings=RaceSettings(), **{name: value}),
    ):
        with pytest.raises(MergettaError, match=sentence):
            make()


def test_options_are_fields_of_the_settings() -> None:
    chosen = RaceSettings(caution=0.1, scale=False)
    adapter = race_merge(Confidence(), [expert(1.0)], settings=chosen, temperature=0.5, eager=False)
    assert adapter.settings == RaceSettings(caution=0.1, scale=False, temperature=0.5, eager=False, finals=0)
    assert chosen == RaceSettings(caution=0.1, scale=False)
    bundle = build_bundle(Confidence().groups, [expert(1.0)])
    with pytest.raises(MergettaError, match="race-merge has no option 'speed'"):
        create_adapter("race-merge", Confidence(), bundle=bundle, speed=3)


def test_bundles_that_are_refused() -> None:
    runtime = Confidence()
    with pytest.raises(MergettaError, match="at least one expert"):
        race_merge(runtime, [])
    with pytest.raises(MergettaError, match=r"^This bundle has no members: [^.]*\.$"):
        RaceMerge(runtime, build_bundle(runtime.groups, [expert(1.0)], members=0))
    with pytest.raises(MergettaError, match="The bundle"):
        RaceMerge(runtime, build_bundle(Confidence(True).groups, [expert(1.0, batch_norm=True)]))
    runtime.family = "ours"
    with pytest.raises(MergettaError, match="belongs to the family 'theirs'"):
        RaceMerge(runtime, build_bundle(runtime.groups, [expert(1.0).groups], family="theirs"))


@pytest.mark.parametrize("layers", [(1, 3), (3, 3)])
def test_spreads_of_another_model_are_refused(layers: tuple[int, int]) -> None:
    experts = [expert(1.0, batch_norm=True, spread=np.ones((2, count))) for count in layers]
    with pytest.raises(MergettaError, match="spread"):
        race_merge(Confidence(True), experts)


def test_features_of_another_model_are_refused() -> None:
    source = SourceFeatures(np.zeros(CLASSES), np.ones(CLASSES))
    with pytest.raises(MergettaError, match="features"):
        race_merge(Confidence(), [expert(1.0, features=np.ones((2, 3))) for _ in range(2)], source)


def test_features_of_different_sizes_are_as_good_as_none() -> None:
    source = SourceFeatures(np.zeros(CLASSES), np.ones(CLASSES))
    adapter = race_merge(Confidence(), [expert(1.0, features=np.ones((2, size))) for size in (CLASSES, 3)], source)
    assert type(adapter.normalise) is Plain


@pytest.mark.parametrize("batch_norm", [False, True])
def test_an_expert_that_breaks_the_model_gets_no_weight(batch_norm: bool, evenly: np.ndarray) -> None:
    """Even where the first mixture, the mean of all, is broken by it."""
    experts = [expert(value, batch_norm=batch_norm) for value in (2.0, 3e38, 3e38)]
    adapter = race_merge(Confidence(batch_norm), experts)
    with np.errstate(all="ignore"):
        for _ in range(12):
            logits = adapter.predict(evenly * 10)
            assert np.isfinite(logits).all()
            for value in adapter.state_dict().values():  # a device must be able to read it again
                assert np.isfinite(value).all()
    assert not adapter.candidates.multiples  # of the mean would be no numbers
    assert adapter.settled
    assert (adapter.weights[1:3] == 0).all()
    assert 0 < adapter.fallbacks < 12


@pytest.mark.parametrize("batch_norm", [False, True])
def test_images_without_numbers_are_only_counted(batch_norm: bool, evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(batch_norm), [expert(2.0, batch_norm=batch_norm)])
    for count, images in enumerate((evenly[:40], evenly[40:60], evenly)):
        adapter.predict(images)
        before = adapter.state_dict()
        assert before.pop("fallbacks") == count
        with np.errstate(all="ignore"):
            adapter.look(np.full_like(evenly[:1], np.nan))
            assert adapter.fallbacks == count
            adapter.predict(np.full_like(evenly[:1], np.nan))
        after = adapter.state_dict()
        assert after.pop("fallbacks") == count + 1
        assert_same_state(after, before)
    adapter.reset()
    assert adapter.fallbacks == 0
    with np.errstate(all="ignore"):
        adapter.predict(np.full_like(evenly, np.nan))
    for _ in range(12):
        assert np.isfinite(adapter.predict(evenly)).all()
    assert adapter.settled


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_prediction_without_numbers_is_the_source_models(batch_norm: bool, evenly: np.ndarray) -> None:
    runtime = Confidence(batch_norm)
    adapter = race_merge(runtime, [expert(3e38, batch_norm=batch_norm)], probe=False)
    with np.errstate(all="ignore"):
        for predict, fallbacks in ((adapter.predict, 1), (adapter.look, 1), (adapter.predict, 2)):
            np.testing.assert_array_equal(predict(evenly * 10), runtime(evenly * 10, given=1.0).logits)
            assert adapter.fallbacks == fallbacks


def test_a_candidate_without_numbers_leaves_no_trace(evenly: np.ndarray) -> None:
    """What the stream's moments are does not depend on what candidates make of them."""
    found = []
    for value in (1.5, 3e38):
        adapter = race_merge(Confidence(True), [expert(v, batch_norm=True) for v in (2.0, value)])
        adapter.candidates.mean = np.array([1.0, 0, 0])
        adapter.candidates.multiples = []
        adapter.reset()
        with np.errstate(all="ignore"):
            for _ in range(2):
                adapter.predict(evenly * 10)
        assert adapter.race.trials.count == 4
        found.append(adapter.normalise.moments.state())  # type: ignore[union-attr]
    assert_same_state(found[1], found[0])


def test_images_of_another_size_start_the_held_ones_anew(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(2.0)])
    adapter.predict(evenly[:40])
    adapter.predict(np.pad(evenly[:40], ((0, 0), (0, 0), (0, 2), (0, 0))))
    assert adapter.race.trials.held is not None
    assert adapter.race.trials.held.shape == (40, 1, CLASSES + 2, 2 * CLASSES)
    assert adapter.race.trials.labels.sum() == 40


def test_held_images_are_counted_once(evenly: np.ndarray) -> None:
    adapter = race_merge(Confidence(), [expert(2.0)])
    for _ in range(2):
        adapter.predict(evenly[:50])  # 14 of the second batch
    assert adapter.race.trials.count == 0 or adapter.race.trials.labels.sum() in (0, HELD)
    assert adapter.race.trials.labels.sum() == HELD


def test_an_expert_called_source_is_a_member_like_any_other(evenly: np.ndarray) -> None:
    runtime = Confidence()
    called = Expert(expert(2.0).groups, "", "source")
    adapter = race_merge(runtime, [called, expert(0.5)])
    assert adapter.bundle.members is not None
    assert adapter.bundle.members.names == ("source", "value 0.5")
    assert len(adapter.weights) == 3
    for _ in range(20):
        adapter.predict(evenly)
    found = adapter.status().weights
    assert adapter.settled
    assert found["source"] > 0.9
    assert found["source model"] < 0.1


class TestStatus:
    def test_from_the_first_image_to_the_next_domain(self, evenly: np.ndarray) -> None:
        adapter = race_merge(Confidence(), [expert(2.0), expert(0.5)], scale=False)
        status = adapter.status()
        assert (status.phase, status.steps, status.shifts, status.fallbacks) == (ADAPTING, 0, 0, 0)
        assert status.weights == {"value 2.0": 0.5, "value 0.5": 0.5, "source model": 0.0}
        steps = []
        while adapter.status().phase == ADAPTING:
            adapter.predict(evenly)
            status = adapter.status()
            steps.append(status.steps)
            names = ("value 2.0", "value 0.5", "source model")
            assert status.weights == pytest.approx(dict(zip(names, adapter.weights, strict=True)))
            assert sum(status.weights.values()) == pytest.approx(1)
        assert steps == [2, 4]
        assert status.phase == SETTLED
        adapter.predict(evenly + 5)
        status = adapter.status()
        assert (status.phase, status.shifts) == (ADAPTING, 1)
        with np.errstate(all="ignore"):
            adapter.predict(np.full_like(evenly, np.nan))
        assert adapter.status().fallbacks == 1
        adapter.reset()
        status = adapter.status()
        assert (status.phase, status.steps, status.shifts, status.fallbacks) == (ADAPTING, 0, 0, 0)

    def test_members_of_one_name_are_one(self, evenly: np.ndarray) -> None:
        experts = [Expert(expert(value).groups, "", name) for value, name in ((2.0, "fog"), (0.5, "x"), (1.5, "fog"))]
        adapter = race_merge(Confidence(), experts, temperature=0.5)
        for _ in range(3):
            adapter.predict(evenly)
        found, weights = adapter.status().weights, adapter.weights
        assert found == pytest.approx({"fog": weights[0] + weights[2], "x": weights[1], "source model": weights[3]})

    def test_a_member_may_be_called_like_the_source_model(self, evenly: np.ndarray) -> None:
        adapter = race_merge(Confidence(), [Expert(expert(2.0).groups, "", "source model"), expert(0.5)])
        adapter.predict(evenly)
        assert sum(adapter.status().weights.values()) == pytest.approx(adapter.weights.sum())

    def test_nothing_to_try_is_settled(self) -> None:
        assert race_merge(Confidence(), [expert(2.0)], probe=False).status().phase == SETTLED

    def test_what_it_normalises_with(self, evenly: np.ndarray) -> None:
        adapter = race_merge(Confidence(True), [expert(2.0, batch_norm=True)])
        assert "merged moments and 0 independent images" in adapter.status().normalises
        adapter.predict(evenly[:64])
        assert "merged moments and 64 independent images" in adapter.status().normalises
        plain = race_merge(Confidence(True), [expert(2.0, batch_norm=True)], moments=False)
        assert plain.status().normalises == "the batch's own statistics"
        assert race_merge(Confidence(), [expert(2.0)]).status().normalises == "no BatchNorm"


def test_a_bundle_of_another_source_model_is_refused(evenly: np.ndarray) -> None:
    """Whoever wrote another base into a hub would choose what every device runs."""
    adapter = race_merge(Confidence(), [expert(2.0)])
    adapter.predict(evenly)
    before = adapter.state_dict()
    other = build_bundle({"n.weight": np.full(1, -5.0)}, [expert(2.0)])
    with pytest.raises(MergettaError, match="another source model"):
        adapter.swap(other)
    assert_same_state(adapter.state_dict(), before)
