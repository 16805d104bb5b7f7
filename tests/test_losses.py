"""Losses: golden values worked out by hand, the same for NumPy and torch, gradients under torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mergetta.losses import LOSSES, Deyo, Entropy, Roid, create_loss
from mergetta.losses.probabilities import entropy, log_softmax, softmax
from mergetta.losses.roid import correct_prior, min_max, sample_weights, soft_likelihood_ratio, symmetric_cross_entropy
from mergetta.seeds import generator


def logits_of(*probabilities: list[float]) -> np.ndarray:
    return np.log(np.array(probabilities))


def test_entropy_by_hand() -> None:
    values = entropy(logits_of([0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]))
    np.testing.assert_allclose(values, [1.5 * math.log(2), math.log(3)])


def test_softmax_is_stable() -> None:
    np.testing.assert_allclose(softmax(np.array([[1000.0, 0.0]])), [[1, 0]])
    assert np.isfinite(log_softmax(np.array([[1e4, -1e4]]))).all()


def test_soft_likelihood_ratio_by_hand() -> None:
    # p = (0.8, 0.2): −(0.8 ln(4 + 1e-5) + 0.2 ln(0.25 + 1e-5))
    expected = -(0.8 * math.log(4 + 1e-5) + 0.2 * math.log(0.25 + 1e-5))
    np.testing.assert_allclose(soft_likelihood_ratio(logits_of([0.8, 0.2])), [expected])
    # p above 0.99 counts as 0.99: ln(99)
    clipped = -(0.99 * math.log(99 + 1e-5) + 0.001 * math.log(0.001 / 0.999 + 1e-5))
    np.testing.assert_allclose(soft_likelihood_ratio(logits_of([0.999, 0.001])), [clipped], rtol=1e-6)


def test_sample_weights_by_hand() -> None:
    logits = logits_of([0.9, 0.1], [0.5, 0.5], [0.1, 0.9])
    mean = np.array([0.9, 0.1])
    cosine = [1.0, 0.5 / (math.sqrt(0.5) * math.sqrt(0.82)), 0.18 / 0.82]
    diversity = [(1 - c) / (1 - cosine[2]) for c in cosine]  # min-max: 1 − cos runs from 0 to 1 − cosine[2]
    certainty = [1, 0, 1]  # the two certain ones are equally so
    weights, keep = sample_weights(logits, mean, 1 / 3)
    np.testing.assert_allclose(weights, [math.exp(3 * d * c) for d, c in zip(diversity, certainty, strict=True)])
    assert keep.tolist() == [d >= sum(diversity) / 3 for d in diversity]


def test_min_max_of_constant_values() -> None:
    np.testing.assert_array_equal(min_max(np.array([2.0, 2.0])), [1, 1])
    np.testing.assert_array_equal(min_max(np.array([2.0])), [1])
    np.testing.assert_allclose(min_max(np.array([1.0, 3.0, 2.0])), [0, 1, 0.5])


def test_symmetric_cross_entropy_by_hand() -> None:
    p, q = [0.8, 0.2], [0.5, 0.5]
    expected = -0.5 * (math.log(0.5) + 0.5 * math.log(0.8) + 0.5 * math.log(0.2))
    np.testing.assert_allclose(symmetric_cross_entropy(logits_of(p), logits_of(q)), [expected])


def test_prior_correction_by_hand() -> None:
    logits = logits_of([0.8, 0.2], [0.6, 0.4])
    share = np.array([0.7, 0.3])
    smooth = max(1 / 2, 1 / 2) / 0.7
    np.testing.assert_allclose(correct_prior(logits), logits * (share + smooth) / (1 + 2 * smooth))


class Views:
    """A forward function that returns prepared logits, in order."""

    def __init__(self, *logits: np.ndarray) -> None:
        self.logits = list(logits)
        self.seen: list[int] = []

    def __call__(self, images: np.ndarray, gradient: bool = True) -> np.ndarray:
        self.seen.append(len(images))
        return self.logits.pop(0)


def test_roid_value_by_hand(rng: np.random.Generator) -> None:
    clean = logits_of([0.7, 0.2, 0.1], [0.3, 0.4, 0.3], [0.1, 0.1, 0.8])
    weights, keep = sample_weights(clean, np.full(3, 1 / 3), 1 / 3)
    view = logits_of(*[[0.2, 0.5, 0.3]] * int(keep.sum()))
    forward = Views(clean, view)
    result = Roid().evaluate(forward, np.zeros((3, 1, 4, 4)), rng)
    expected = sum(
        w * (soft_likelihood_ratio(clean[i : i + 1]) + symmetric_cross_entropy(clean[i : i + 1], view[:1]))
        for i, w in enumerate(weights)
        if keep[i]
    )
    np.testing.assert_allclose(result.value, expected[0] / 3)
    assert forward.seen == [3, result.kept]


def test_roid_state(rng: np.random.Generator) -> None:
    loss = Roid()
    logits = logits_of([0.7, 0.3], [0.9, 0.1])
    before = loss.prior(logits).tolist()
    loss.evaluate(Views(logits, logits[:1]), np.zeros((2, 1, 2, 2)), rng)
    assert loss.prior(logits).tolist() == before == [0.5, 0.5]  # evaluating does not change the state
    loss.observe(logits)
    np.testing.assert_allclose(loss.prior(logits), [0.9 * 0.5 + 0.1 * 0.8, 0.9 * 0.5 + 0.1 * 0.2])
    other = Roid()
    other.load_state_dict(loss.state_dict())
    np.testing.assert_allclose(other.prior(logits), loss.prior(logits), rtol=1e-6)
    loss.reset()
    assert loss.prior(logits).tolist() == [0.5, 0.5]


def test_deyo_value_by_hand(rng: np.random.Generator) -> None:
    # entropies: 0.325 and 0.394 pass the filter 0.5 ln 3 = 0.549, 1.099 does not
    clean = logits_of([0.9, 0.1 - 1e-9, 1e-9], [1 / 3, 1 / 3, 1 / 3], [0.05, 0.9, 0.05])
    destroyed = logits_of([0.6, 0.2, 0.2], [0.05, 0.85, 0.1])  # PLPD 0.3 and 0.05: only the first is above 0.2
    forward = Views(clean, destroyed)
    result = Deyo().evaluate(forward, np.zeros((3, 1, 4, 4)), rng)
    h = float(entropy(clean[:1])[0])
    expected = (math.exp(0.4 * math.log(3) - h) + math.exp(0.3)) * h
    assert result.kept == 1
    assert forward.seen == [3, 2]
    np.testing.assert_allclose(result.value, expected, rtol=1e-6)


def test_deyo_without_reliable_samples(rng: np.random.Generator) -> None:
    flat = logits_of([0.5, 0.5])
    result = Deyo().evaluate(Views(flat), np.zeros((1, 1, 4, 4)), rng)
    assert result.kept == 0
    assert math.isnan(float(result.value))


def test_entropy_loss_is_the_mean(rng: np.random.Generator) -> None:
    result = Entropy().evaluate(Views(logits_of([0.5, 0.5], [0.9, 0.1])), np.zeros((2, 1, 2, 2)), rng)
    h = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    np.testing.assert_allclose(result.value, (math.log(2) + h) / 2)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("batch", [1, 30])
def test_numpy_and_torch_agree_and_gradients_flow(name: str, channels: int, batch: int) -> None:
    rng = np.random.default_rng(4)
    images = rng.random((batch, channels, 12, 12)).astype(np.float32)
    weights = rng.normal(size=(5, channels * 144)).astype(np.float32) * 0.5

    def forward_numpy(x: np.ndarray, gradient: bool = True) -> np.ndarray:
        return x.reshape(len(x), -1) @ weights.T

    learnt = torch.tensor(weights, requires_grad=True)

    def forward_torch(x: torch.Tensor, gradient: bool = True) -> torch.Tensor:
        return x.reshape(len(x), -1) @ learnt.T

    one = create_loss(name).evaluate(forward_numpy, images, generator(0, 0, "views"))
    other = create_loss(name).evaluate(forward_torch, torch.from_numpy(images), generator(0, 0, "views"))
    assert one.kept == other.kept
    np.testing.assert_allclose(float(one.value), float(other.value.detach()), rtol=1e-4)
    if one.kept:
        other.value.backward()
        assert learnt.grad is not None
        assert torch.isfinite(learnt.grad).all()
        assert learnt.grad.abs().sum() > 0


def test_gradient_of_entropy_by_hand() -> None:
    """∂H/∂z_k = −p_k (ln p_k + H)."""
    logits = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64, requires_grad=True)
    entropy(logits).sum().backward()
    p = torch.softmax(logits.detach(), dim=1)
    h = -(p * p.log()).sum()
    torch.testing.assert_close(logits.grad, -p * (p.log() + h))
