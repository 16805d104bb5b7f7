"""zo-merge-plus: how much stored BatchNorm statistics count, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mergetta.adapters.forward_only.guard import Guard
from mergetta.adapters.forward_only.zo_merge_plus import HELD, ZOMergePlus
from tests.confidence import Blended, Confidence, each_in_turn, expert, score, shares_of


@pytest.fixture
def evenly() -> np.ndarray:
    return each_in_turn()


@pytest.mark.parametrize(("best", "prior"), [(0.1, 0), (0.5, 64), (0.7, 192), (1.0, 512)])
def test_blend_by_hand(best: float, prior: int, evenly: np.ndarray) -> None:
    """64 images are shown with stored statistics that count as 192 (3/4), 0, 512 (8/9) and 64 (1/2) images, then
    experts without, then the mixture that was found with the four again; 128 images are predicted with
    prior / (prior + 128).
    """
    adapter = ZOMergePlus(Blended(best), [expert(1.5), expert(1.2)], mirror=False, guard=False)
    first, *tries = shares_of(adapter, evenly[:HELD], 1 + 4 + 11)
    assert first == pytest.approx([1, 3 / 4])  # the source model; before anything is known
    assert [shown for shown, _ in tries[:4]] == pytest.approx([3 / 4, 0, 8 / 9, 1 / 2])
    chosen = prior / (prior + HELD)
    assert tries[4:] == [[0, chosen]] * 11  # mean, twice, four times that, two experts, the source model; 3 of them; 2
    assert not adapter.settled
    again = shares_of(adapter, evenly[:HELD], 6)
    assert [shown for shown, _ in again[:4]] == pytest.approx([3 / 4, 0, 8 / 9, 1 / 2])
    assert again[4][0] == chosen  # the best two of these once more, on other images
    assert adapter.settled
    assert adapter.prior == prior
    assert shares_of(adapter, evenly, 1) == [[prior / (prior + 128)]]


def test_experts_are_judged_by_what_they_were_made_with(evenly: np.ndarray) -> None:
    """Without stored statistics, logits are twice as large here: the uniform mixture has 2 · 1.35, and so on."""
    adapter = ZOMergePlus(Blended(0.5), [expert(1.5), expert(1.2)], temperature=0.1, mirror=False, guard=False)
    shares_of(adapter, evenly[:HELD], 10)
    assert adapter.trials == 9  # not yet: the source model
    assert adapter.prior == 64
    values = np.array([score(2 * x) for x in (1.35, 1.7, 2.4, 1.5, 1.2)]) - 0.04 * np.sqrt([1, 2, 4, 1, 1])
    parts = np.exp(values / 0.1) / np.exp(values / 0.1).sum()
    both = parts @ [0.5, 1, 2, 0, 0]
    np.testing.assert_allclose(adapter.weights, [both + parts[3], both + parts[4], 0], rtol=1e-5)


def test_a_blend_that_was_chosen_is_kept_until_all_have_been_tried_again(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Blended(0.5), [expert(1.5)], mirror=False, guard=False)
    adapter.predict(evenly)
    first, _, last = adapter.races
    first.standing, last.standing = np.eye(4)[1], np.eye(4)[2]
    assert adapter.prior == 0
    last.rounds = 1
    assert adapter.prior == 512


def test_one_share_for_both_views_and_the_guard(evenly: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the batch in which the domain jumps and everything starts anew."""
    adapter = ZOMergePlus(Blended(0.0), [expert(1.5)])
    shares_of(adapter, evenly[:HELD], 24)
    assert adapter.tried
    assert adapter.prior == 0
    told: list[float] = []
    monkeypatch.setattr(Guard, "finds_odd", lambda self, looks, p, q, share: bool(told.append(share)))
    shares = shares_of(adapter, np.repeat(evenly[:1], HELD, axis=0) + 5, 1)[0]
    assert adapter.shifts == 1
    assert adapter.prior == 192
    assert shares == [0.0, 1.0, 0.0]  # the batch, the source model because it is of one class, the mirrored batch
    assert told == [0.0]


def test_the_order_of_trying_is_that_of_the_domain(evenly: np.ndarray) -> None:
    images = evenly[:HELD] * 4
    images[:60] = images[0]
    adapter = ZOMergePlus(Blended(0.0), [expert(1.5)], mirror=False, guard=False, shift_threshold=100)
    for _ in range(2):
        adapter.predict(evenly[:HELD])
    assert list(adapter.priors) == [192, 0, 512, 64]
    adapter.asked = 0  # so that the source model is asked once more
    adapter.predict(images)
    assert list(adapter.priors) == [192, 0, 512, 64]  # one has been tried in this order
    adapter = ZOMergePlus(Blended(0.0), [expert(1.5)], mirror=False, guard=False)
    adapter.predict(images)
    assert list(adapter.priors) == [0, 64, 192, 512]
    for _ in range(2):
        adapter.predict(evenly[:HELD] + 5)  # a jump
    assert list(adapter.priors) == [192, 0, 512, 64]


def test_a_first_mixture_that_breaks_the_model_says_nothing_for_stored_statistics(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Confidence("batch"), [expert(2.0), expert(3e38)], mirror=False, guard=False)
    with np.errstate(all="ignore"):
        shares_of(adapter, evenly * 10, 6)
    assert adapter.trials > 4
    assert adapter.prior == 0


def test_a_state_in_the_middle_of_blending_goes_on_exactly(evenly: np.ndarray) -> None:
    adapter, again = (ZOMergePlus(Blended(0.5), [expert(1.5)], mirror=False) for _ in range(2))
    shares_of(adapter, evenly, 3)
    again.load_state_dict(adapter.state_dict())
    assert shares_of(adapter, evenly, 6) == shares_of(again, evenly, 6)
    assert adapter.prior == again.prior == 64


@pytest.mark.parametrize("options", [{"blend": False}, {"probe": False}])
def test_what_is_not_asked_for_is_not_blended(options: dict[str, Any], evenly: np.ndarray) -> None:
    shares = shares_of(ZOMergePlus(Blended(1.0), [expert(1.5)], mirror=False, guard=False, **options), evenly, 9)
    assert {share for batch in shares[1:] for share in batch} == {0.0}


def test_nothing_is_blended_without_batch_norm(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Blended(0.0, "layer"), [expert(1.5)], mirror=False)
    shares = shares_of(adapter, evenly, 6)
    assert {share for batch in shares[1:] for share in batch} == {0.0}
    assert len(adapter.races) == 1
    assert adapter.trials >= len(adapter.candidates)


def test_stored_statistics_are_tried_last_where_the_source_model_sees_a_few_classes(evenly: np.ndarray) -> None:
    """Of 64 images, 60 are of the first class to it."""
    images = evenly[:HELD] * 4
    images[:60] = images[0]
    adapter = ZOMergePlus(Blended(0.0), [expert(1.5)], mirror=False, guard=False)
    shares = shares_of(adapter, images, 5)
    assert [batch[0] for batch in shares] == pytest.approx([1, 0, 1 / 2, 3 / 4, 8 / 9])
    assert shares[0][1] == 0


def test_stored_statistics_count_as_16_images_or_more_in_small_batches(evenly: np.ndarray) -> None:
    adapter = ZOMergePlus(Blended(0.6), [expert(1.5)], mirror=False)
    shares = shares_of(adapter, evenly[:16], 40)
    assert shares[0] == [1.0, 0.5]
    assert {share for batch in shares for share in batch} == {1.0, 0.5}  # experts come first
    shares += shares_of(adapter, evenly[:16], 80)
    assert adapter.tried
    assert adapter.prior == 0
    assert shares[-1] == [0.5]
    assert {share for batch in shares for share in batch} == {1.0, *(n / (n + 16) for n in (16, 64, 192, 512))}
