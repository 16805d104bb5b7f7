"""Our formulas beside those of public code, written down again from what it computes (docs/reference/parity.md)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mergetta.adapters.forward_only.cola import by_similarity
from mergetta.adapters.forward_only.lame import assign, nearest
from mergetta.adapters.forward_only.t3a import T3A
from mergetta.data.corruptions.strengths import CIFAR, IMAGENET
from mergetta.losses.probabilities import entropy
from mergetta.losses.roid import correct_prior, sample_weights, soft_likelihood_ratio, symmetric_cross_entropy

from .numpy_runtime import NumpyRuntime


@pytest.fixture
def logits() -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(size=(32, 10)) * 3)


def test_entropy(logits: Tensor) -> None:
    p = logits.softmax(1)
    torch.testing.assert_close(entropy(logits), -(p * p.log()).sum(1))


def test_roid(logits: Tensor) -> None:
    p, q = logits.softmax(1), logits.flip(0).softmax(1)
    odds = p.clamp(max=0.99) / (1 - p.clamp(max=0.99))
    torch.testing.assert_close(soft_likelihood_ratio(logits), -(p.clamp(max=0.99) * (odds + 1e-5).log()).sum(1))
    both = -(p * q.log()).sum(1) / 2 - (q * p.log()).sum(1) / 2
    torch.testing.assert_close(symmetric_cross_entropy(logits, logits.flip(0)), both)
    mean = torch.linspace(1, 3, 10, dtype=torch.float64)
    rare = scaled(1 - functional.cosine_similarity(mean[None] / mean.sum(), p, dim=1))
    weights, keep = sample_weights(logits, mean / mean.sum(), 1 / 3)
    torch.testing.assert_close(weights, torch.exp(3 * rare * scaled((p * p.log()).sum(1))))
    assert torch.equal(~keep, rare < rare.mean())
    share = p.mean(0)
    smooth = max(1 / 32, 1 / 10) / share.max()
    torch.testing.assert_close(correct_prior(logits), logits * (share + smooth) / (1 + 10 * smooth))


def scaled(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())


def test_lame(logits: Tensor) -> None:
    """With the affinity of k nearest neighbours."""
    features = np.random.default_rng(1).normal(size=(32, 16))
    directions = functional.normalize(torch.from_numpy(features), dim=1)
    closest = torch.cdist(directions, directions).topk(6, largest=False).indices[:, 1:]
    affinity = torch.zeros(32, 32, dtype=torch.float64).scatter_(1, closest, 1.0)
    np.testing.assert_array_equal(nearest(features, 5), affinity)
    unary = -(logits.softmax(1) + 1e-10).log()
    y, before = (-unary).softmax(1), np.inf
    for number in range(100):
        pull = affinity @ y
        y = (pull - unary).softmax(1)
        energy = float((y * (unary - pull + y.log())).sum())
        if number > 1 and abs(energy - before) <= 1e-8 * abs(before):
            break
        before = energy
    log_p = logits.log_softmax(1).numpy()
    np.testing.assert_allclose(np.exp(assign(log_p, affinity.numpy(), 100, 1e-8)), y, atol=1e-12)


def test_t3a(numpy_runtime: NumpyRuntime) -> None:
    """Two batches, three supports per class: one-hot labels times normalised supports, normalised per class."""
    images = np.random.default_rng(0).random((24, 1, 6, 6)).astype(np.float32)
    weight, bias = map(torch.from_numpy, numpy_runtime.classifier)
    supports, adapter = weight, T3A(numpy_runtime, keep=3)
    for batch in (images[:12], images[12:]):
        features = torch.from_numpy(numpy_runtime(batch).features)
        supports = torch.cat([supports, features])
        outputs = supports @ weight.T + bias
        certainty, labels = entropy(outputs), outputs.argmax(1)
        kept = [torch.where(labels == k)[0][certainty[labels == k].argsort()[:3]] for k in range(len(bias))]
        supports = supports[torch.cat(kept)]
        sums = functional.normalize(supports, dim=1).T @ functional.one_hot(labels[torch.cat(kept)], len(bias)).float()
        expected = features @ functional.normalize(sums, dim=0)
        np.testing.assert_allclose(adapter.predict(batch), expected, atol=1e-5)


def test_cola() -> None:
    rng = np.random.default_rng(0)
    experts, now = rng.random((4, 2, 20)) + 0.1, rng.random((2, 20)) + 0.1
    closeness = []
    for mean, variance in experts:
        square = (mean - now[0]) ** 2
        far = np.mean((variance + square) / 2 / now[1] - 0.5 + (now[1] + square) / 2 / variance - 0.5)
        closeness.append(1 / (far + 1e-4) / 5)
    expected = functional.softmax(torch.tensor(closeness), dim=0)
    np.testing.assert_allclose(by_similarity(experts, now), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("strengths", "published", "longer"),
    [
        (CIFAR, [(1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)], (3, 4, 5)),
        (IMAGENET, [(1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)], (2, 4)),
    ],
)
def test_zoom_factors(strengths: dict, published: list[tuple[float, float]], longer: tuple[int, ...]) -> None:
    """A known difference: a half-open range of decimals may end a step earlier than meant, and ours does not."""
    for severity, (ours, (end, step)) in enumerate(zip(strengths["zoom_blur"], published, strict=True), 1):
        theirs = np.arange(1, end, step)
        assert len(ours) - len(theirs) == (severity in longer)
        np.testing.assert_allclose(ours[: len(theirs)], theirs)
