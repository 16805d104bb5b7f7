"""Softmax and entropy for any array library (NumPy, torch with autograd)."""

from __future__ import annotations

from mergetta.arrays import Array, array_namespace


def log_softmax(logits: Array) -> Array:
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis=-1, keepdims=True))


def softmax(logits: Array) -> Array:
    return array_namespace(logits).exp(log_softmax(logits))


def entropy(logits: Array) -> Array:
    """H of the predicted distribution, per sample."""
    xp = array_namespace(logits)
    shifted = logits - xp.max(logits, axis=-1, keepdims=True)
    weights = xp.exp(shifted)
    total = xp.sum(weights, axis=-1)
    return xp.log(total) - xp.sum(weights * shifted, axis=-1) / total


def constant(x: Array) -> Array:
    """x without gradient."""
    return x.detach() if hasattr(x, "detach") else x
