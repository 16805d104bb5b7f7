"""Which experts to keep away from the merge: those whose task vector is unlike everybody else's.

Experts of honest devices point in similar directions with similar lengths, whatever their domain (on the embedded
families: cosines of 0.2 to 0.9 with the median expert, lengths within a factor of 2). A flipped, blown-up or random
vector does not. Medians decide, so that a minority cannot move the yardstick.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.groups import GroupValues, learnable, moment_pairs, moments_of
from mergetta.seeds import generator

SKETCH = 2048
CROWD = 5
"""Fewer experts than this are no yardstick: all are taken, and looked at again when there are more."""
LENGTH = 4.0
"""A task vector this many times longer or shorter than the median one is an outlier."""
TINY = 1e-5
"""What BatchNorm adds to a variance: below it variances do not differ."""
ALIKE = 0.1
"""Lowest median cosine with the others, in a pool that agrees with itself at least twice as much."""
Vector = NDArray[Any]


def sketch_of(expert: GroupValues, base: GroupValues) -> tuple[float, bytes]:
    """Length of the task vector, and its direction in 2,048 numbers.

    Larger vectors are folded (each entry, with a random sign, into one of the 2,048): cosines survive within ± 0.02.
    """
    names = learnable(base)
    vector = np.concatenate([np.asarray(expert[n], np.float64) - np.asarray(base[n], np.float64) for n in names])
    norm = float(np.linalg.norm(vector))
    if vector.size > SKETCH:
        rng = generator(0, vector.size, "sketch")
        place = rng.integers(0, SKETCH, vector.size)
        vector = np.bincount(place, vector * rng.choice((-1.0, 1.0), vector.size), SKETCH)
    length = float(np.linalg.norm(vector))
    return norm, (vector / length if length > 0 else vector).astype(np.float16).tobytes()


def moments_apart(expert: GroupValues, base: GroupValues) -> float:
    """How far an expert's moments are from the source's: the root mean square, over channels, of the mean's shift in
    standard deviations and of the logarithm of the variances' ratio. 0 without BatchNorm.
    """
    if not moment_pairs(base):
        return 0.0
    (mean, variance), (origin, spread) = (
        moments_of(expert, base).astype(np.float64),
        moments_of(base).astype(np.float64),
    )
    shift = (mean - origin) ** 2 / (spread + TINY)
    return float(np.sqrt(np.mean(shift + np.log((variance + TINY) / (spread + TINY)) ** 2)))


def direction(sketch: bytes) -> Vector:
    return np.frombuffer(sketch, np.float16).astype(np.float32)


def similarities(sketches: Sequence[bytes]) -> Vector:
    """Cosines between all experts."""
    unit = np.stack([direction(sketch) for sketch in sketches])
    cosines: Vector = np.clip(unit @ unit.T, -1.0, 1.0)
    return cosines


def fair(contributors: Mapping[str, str]) -> list[str]:
    """Experts that make the yardstick: where three or more contribute, nobody has more than a third of the voices."""
    of: dict[str, list[str]] = {}
    for expert, contributor in contributors.items():
        of.setdefault(contributor, []).append(expert)
    if len(of) < 3:
        return list(contributors)
    return [expert for mine in of.values() for expert in mine[: max(1, (len(contributors) - len(mine)) // 2)]]


def screen(
    norms: Mapping[str, float],
    sketches: Mapping[str, bytes],
    yardstick: Sequence[str],
    suspects: Sequence[str],
    moments: Mapping[str, float],
) -> dict[str, str]:
    """Reason per outlier among the suspects, each measured against the experts of `yardstick` other than itself."""
    if len(yardstick) < CROWD:
        return {}
    crowd = np.stack([direction(sketches[name]) for name in yardstick])
    cosines = crowd @ crowd.T
    np.fill_diagonal(cosines, np.nan)
    agreement = float(np.median(np.nanmedian(cosines, axis=1)))
    lowest = ALIKE if agreement > 2 * ALIKE else -ALIKE
    place = {name: i for i, name in enumerate(yardstick)}
    typical = float(np.median([norms[name] for name in yardstick]))
    usual = float(np.median([moments[name] for name in yardstick]))
    found: dict[str, str] = {}
    for name in suspects:
        others = crowd @ direction(sketches[name])
        if name in place:
            others = np.delete(others, place[name])
        alike, norm = float(np.median(others)), norms[name]
        if typical > 0 and not typical / LENGTH <= norm <= typical * LENGTH:
            found[name] = f"its task vector is {norm / typical:.2g} times as long as the median one"
        elif (
            usual > 0 and moments[name] > LENGTH * usual
        ):  # domains may lie in opposite directions, so that only lengths compare
            found[name] = f"its moments are {moments[name] / max(usual, TINY):.2g} times as far off as the median ones"
        elif alike < lowest:
            found[name] = f"its task vector has a median cosine of {alike:.2f} with the others"
    return found
