"""How much contributors count in the merge: all the same, unless a minority pulls the pool aside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mergetta.hub.influence import LEAST, filtered, influences
from mergetta.hub.records import ACTIVE, ExpertRecord
from mergetta.hub.screening import fair
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store

from .hub_parts import FAMILY, family_file, honest

RNG = np.random.default_rng(0)
COMMON = np.eye(400)[0]


def crowd(number: int, along: np.ndarray = COMMON, own: float = 0.6) -> np.ndarray:
    """Vectors of length 1 that share a direction; what each has of its own is like no other's."""
    rest = RNG.normal(size=(number, 400))
    rest -= np.outer(rest @ along, along)
    return (1 - own**2) ** 0.5 * along + own * rest / np.linalg.norm(rest, axis=1, keepdims=True)


def record(token: str, vector: np.ndarray, created: float = 0.0) -> ExpertRecord:
    norm = float(np.linalg.norm(vector))
    sketch = (vector / norm).astype(np.float16).tobytes()
    facts = ("fog", "roid", None, 1, norm, b"", sketch, ACTIVE, "", False)
    return ExpertRecord(f"{token}-{created}", FAMILY, *facts, token, created, created, 0)


def moved(means: np.ndarray, weights: np.ndarray, honest_mean: np.ndarray) -> float:
    return float(np.linalg.norm(weights @ means / weights.sum() - honest_mean))


@pytest.mark.parametrize("number", [1, 2, 5, 14, 100])
def test_an_honest_pool_is_left_as_it_is(number: int) -> None:
    assert (filtered(crowd(number, own=0.4 if number < 8 else 0.6)) == 1).all()


@pytest.mark.parametrize("evil", [3, 6, 13])
def test_a_minority_that_agrees_gains_little(evil: int) -> None:
    """Each points 0.2 along what the others share, and else where only they do."""
    good, aside = crowd(14), np.eye(400)[1]
    means = np.concatenate([good, np.tile(0.2 * COMMON + 0.98 * aside, (evil, 1))])
    weights = filtered(means)
    assert weights[14:].max() <= 0.5 and weights[:14].mean() > 0.8 and weights.min() >= LEAST
    before = moved(means, np.ones(len(means)), good.mean(axis=0))
    assert moved(means, weights, good.mean(axis=0)) < 0.6 * before


def test_what_one_sends_is_one_voice() -> None:
    """However long its vectors are, and however many."""
    good = [record(f"t{i}", vector) for i, vector in enumerate(crowd(14))]
    evil = [record("evil", 40 * vector, i) for i, vector in enumerate(crowd(30, np.eye(400)[1], 0.1))]
    assert set(influences(good, 1.0).values()) == {1.0}
    found = influences([*good, *evil], 1.0)
    assert len(found) == 15 and found["t0"] == 1 and influences(good, 0.0) == {}


def test_many_are_compared_in_parts() -> None:
    good = [record(f"{i:03}", vector) for i, vector in enumerate(crowd(600))]
    evil = [record(f"{i:03}e", 0.2 * COMMON + 0.98 * np.eye(400)[1]) for i in range(0, 600, 3)]
    found = influences([*good, *evil], 1.0)
    assert max(found[e.token] for e in evil) <= 0.5 and np.mean([found[g.token] for g in good]) > 0.9


def test_newcomers_crowd_out_nobody(tmp_path: Path) -> None:
    """Ids of tokens are random, so of many contributors some are looked at that no attacker chooses."""
    vectors = crowd(8)
    experts = [record(f"{i % 2}{i}", vectors[i], created=i) for i in range(8)]
    assert {expert.token for expert in fair(experts, 4)} == {"00", "02", "04", "06"}
    settings = HubSettings.in_folder(tmp_path)
    store = Store(settings.database, settings.blobs)
    store.put_family(family_file().to_bytes(), FAMILY)
    for i, token in enumerate(("b", "c", "a", "d")):
        expert, _ = store.add_expert(FAMILY, honest(i).to_bytes(), token)
        store.judge(FAMILY, {expert.id: (ACTIVE, "")})
    assert {expert.token for expert in store.voices(FAMILY, 2)} == {"a", "b"}
