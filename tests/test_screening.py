"""What the hub measures of an expert, by hand, and which of a crowd it finds odd."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from mergetta.hub.records import ACTIVE, PENDING, ExpertRecord
from mergetta.hub.screening import TINY, direction, layout, moments_apart, rms, screen, sketch_of

from .hub_parts import BASE, expert_of, task_vector

ONE = {
    "bn.weight": np.ones(2),
    "bn.running_mean": np.array([0.0, 1.0]),
    "bn.running_var": np.array([4.0, 1.0]) - TINY,
}


def test_distance_of_moments_by_hand() -> None:
    other = {**ONE, "bn.running_mean": np.array([2.0, 1.0]), "bn.running_var": np.array([4.0, math.e**3]) - TINY}
    # one standard deviation in the first channel, three powers of e in the second: √((1 + 9) / 2)
    apart, way = moments_apart(other, ONE)
    assert apart == pytest.approx(math.sqrt(5), rel=1e-5)
    assert direction(way) == pytest.approx(np.array([1, 0, 0, 3]) / math.sqrt(10), abs=1e-3)
    assert moments_apart(ONE, ONE)[0] == 0
    assert moments_apart({**ONE, "bn.weight": np.full(2, 100.0)}, ONE)[0] == 0
    assert rms(moments_apart({"a.weight": np.ones(2)}, {"a.weight": np.zeros(2)})[0]) == 0.0


def test_a_variance_of_zero_is_finite() -> None:
    dead = {**ONE, "bn.running_var": np.zeros(2)}
    assert 0 < moments_apart(dead, ONE)[0] < 20
    assert 0 < moments_apart(ONE, dead)[0] < np.inf


def test_a_sketch_is_of_what_was_learnt() -> None:
    """Moments of domains lie in all directions, and would drown what the experts have in common."""
    near, far = (expert_of(task_vector(1), "fog", apart=apart).groups for apart in (0.1, 3.0))
    assert sketch_of(near, BASE) == sketch_of(far, BASE)
    assert sketch_of(expert_of(task_vector(2)).groups, BASE) != sketch_of(near, BASE)


def entry(
    number: int, vector: np.ndarray | None = None, token: str = "t", apart: float = 0.3, domain: str = "fog"
) -> ExpertRecord:
    groups = expert_of(task_vector(number) if vector is None else vector, domain, apart=apart).groups
    norm, sketch = sketch_of(groups, BASE)
    layers, moments = moments_apart(groups, BASE)
    return ExpertRecord(
        f"{token}-{number}", "f", "d", "", None, 1, norm, layers.tobytes(), sketch, PENDING, "", False,
        token, float(number), 0.0, 0, moments=moments,
    )  # fmt: skip


def odd(*experts: ExpertRecord) -> set[str]:
    return set(screen(experts, experts, layout(BASE)))


@pytest.mark.parametrize(("apart", "is_odd"), [(0.0, False), (0.1, False), (1.1, False), (1.3, True), (50.0, True)])
def test_moments_compare_by_length(apart: float, is_odd: bool) -> None:
    """Four times the median is too far; near the source is not odd, because a mild domain is that."""
    crowd, suspect = [entry(i) for i in range(9)], entry(9, apart=apart)
    found = screen([*crowd, suspect], [suspect], layout(BASE))
    assert bool(found) == is_odd
    if is_odd:
        assert "moments are" in found[suspect.id]


def test_moments_on_the_other_side_are_odd() -> None:
    """Where the pool agrees on a side, and however near the source they are."""
    crowd, suspect = [entry(i, token=f"h{i}") for i in range(9)], entry(9, token="e", apart=-0.1)
    found = screen([*crowd, suspect], [suspect], layout(BASE))
    assert "vector of moments" in found[suspect.id]
    both = [entry(i, token=f"h{i}", apart=0.3 * (-1) ** i) for i in range(9)]
    assert screen([*both, suspect], [suspect], layout(BASE)) == {}


def test_moments_of_an_unknown_direction_are_not_odd() -> None:
    crowd, old = [entry(i, token=f"h{i}") for i in range(9)], replace(entry(9, token="o"), moments=b"")
    assert odd(*crowd, old) == set()
    assert odd(*(replace(expert, moments=b"") for expert in crowd), entry(9, token="n")) == set()


def test_without_batch_norm_nobody_is_odd() -> None:
    assert odd(*(replace(entry(i), layers=b"", moments=b"") for i in range(9))) == set()


def test_one_contributor_has_one_voice() -> None:
    """However much it uploads, and whoever came first: the majority of contributors decides."""
    honest = [entry(i, token=f"h{i}") for i in range(3)]
    evil = [entry(i, -task_vector(i), "evil") for i in range(40)]
    assert odd(*evil, *honest) == {e.id for e in evil}


def test_of_two_contributors_the_longer_is_odd() -> None:
    honest = [entry(i, token="honest") for i in range(14)]
    evil = [entry(i, -20 * task_vector(i), "evil") for i in range(15)]
    assert odd(*evil, *honest) == {e.id for e in evil}


def test_the_odd_have_no_voice() -> None:
    """Two are too long. Were they heard on directions, the three that point elsewhere would be in the majority."""
    honest = [entry(i, token=f"h{i}") for i in range(4)]
    long = [entry(10 + i, -20 * task_vector(i), f"l{i}") for i in range(2)]
    flipped = [entry(20 + i, -task_vector(i), f"f{i}") for i in range(3)]
    assert odd(*long, *flipped, *honest) == {e.id for e in (*long, *flipped)}


def test_what_a_person_has_accepted_is_the_yardstick() -> None:
    accepted = [replace(entry(i, token="a"), decided=True, state=ACTIVE) for i in range(5)]
    many = [entry(100 + i, -task_vector(i), f"e{i}") for i in range(20)]
    honest = entry(50, token="h")
    assert odd(*accepted, *many, honest) == {e.id for e in many}


@pytest.mark.parametrize("how", ["flipped", "long"])
def test_a_single_layer_can_be_odd(how: str) -> None:
    """As a whole the vector is like the others."""
    vector = task_vector(9)
    vector[:8] *= -1 if how == "flipped" else 6
    suspect = entry(9, vector, "s")
    whole = screen([*(entry(i, token=f"h{i}") for i in range(8)), suspect], [suspect], [])
    found = screen([*(entry(i, token=f"h{i}") for i in range(8)), suspect], [suspect], layout(BASE))
    assert not whole and "one layer" in found[suspect.id]


def test_a_single_layer_of_moments_can_be_odd() -> None:
    layers = np.full(20, 0.3, np.float32)
    crowd = [replace(entry(i), layers=layers.tobytes()) for i in range(9)]
    layers[3] = 2.0
    suspect = replace(entry(9), layers=layers.tobytes())
    assert rms(layers) < 4 * 0.3
    assert odd(*crowd, suspect) == {suspect.id}


def test_large_groups_are_folded_each_for_itself() -> None:
    rng = np.random.default_rng(0)
    base = {"a": np.zeros(30_000), "b": np.zeros(10_000)}
    one, two = ({name: rng.normal(size=v.size) for name, v in base.items()} for _ in range(2))
    near = {name: one[name] + 0.5 * two[name] for name in base}
    assert [part.stop - part.start for part in layout(base)] == [1536, 512]
    norm, sketch = sketch_of(one, base)
    assert norm == pytest.approx(200, rel=0.02)
    cosine = float(np.dot(direction(sketch), direction(sketch_of(near, base)[1])))
    assert cosine == pytest.approx(1 / np.sqrt(1.25), abs=0.03)
