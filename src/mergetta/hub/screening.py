"""Which experts to keep away from the merge: those whose task vector is unlike everybody else's.

Experts of honest devices point in similar directions with similar lengths, whatever their domain (on `fashion-bn`:
median cosines of 0.5 to 0.7 with the others, lengths within a factor of 1.8; layer by layer, cosines from −0.13 and
lengths within a factor of 2.6). A flipped, blown-up or random vector does not, nor does one with such a layer.

Every contributor has one voice, however much it has uploaded, and medians of the voices decide: a minority of
contributors cannot move the yardstick. What is found odd has no voice, and what a person has accepted keeps its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.groups import GroupValues, layer_sizes, learnable, moment_pairs, moments_of
from mergetta.hub.records import ACTIVE, ExpertRecord
from mergetta.seeds import generator

SKETCH = 2048
CROWD = 5
"""Fewer experts of a single contributor than this are no yardstick: all are taken, and looked at again later."""
MAJORITY = 3
"""So many voices it takes to say which direction is odd: of two that differ, neither is."""
LENGTH = 4.0
"""A task vector this many times longer or shorter than the median one is an outlier, and a layer this much longer."""
TINY = 1e-5
"""What BatchNorm adds to a variance: below it variances do not differ."""
ALIKE = 0.1
"""Lowest median cosine with the others, in a pool that agrees with itself at least twice as much."""
OPPOSED = -0.3
"""The same of a single layer, where domains differ more."""
AGAINST = -ALIKE
"""The same of moments, in a pool whose moments agree. (Honest ones of `fashion-bn`, severity 4: 0.35 at least among 15
domains, 0.10 among six, −0.05 among three.)"""
ROUNDS = 5
"""Most times that the yardstick is made again without those found odd."""
WHOLE, LAYER, MOMENTS = "task vector", "task vector in one layer", "vector of moments"
Vector = NDArray[Any]


def layout(base: GroupValues) -> list[slice]:
    """Which part of a sketch tells of which group."""
    return places([int(np.size(base[name])) for name in learnable(base)])


def places(sizes: list[int]) -> list[slice]:
    """As many of a sketch's numbers for each group as it has of all weights."""
    if (total := sum(sizes)) > SKETCH:
        sizes = [max(1, size * SKETCH // total) for size in sizes]
    return [slice(sum(sizes[:i]), sum(sizes[: i + 1])) for i in range(len(sizes))]


def sketch_of(expert: GroupValues, base: GroupValues) -> tuple[float, bytes]:
    """Length of the task vector, and its direction in about 2,048 numbers, group by group.

    Larger groups are folded (each entry, with a random sign, into one of theirs): cosines survive within ± 0.02.
    """
    parts, total = [], 0.0
    for name, where in zip(learnable(base), layout(base), strict=True):
        vector: Vector = np.asarray(expert[name], np.float64) - np.asarray(base[name], np.float64)
        total += float(vector @ vector)
        parts.append(folded(vector, where.stop - where.start))
    return float(np.sqrt(total)), packed(parts)


def folded(vector: Vector, width: int) -> Vector:
    if vector.size <= width:
        return vector
    rng = generator(0, vector.size, "sketch")
    place = rng.integers(0, width, vector.size)
    return np.bincount(place, vector * rng.choice((-1.0, 1.0), vector.size), width)


def packed(parts: Sequence[Vector]) -> bytes:
    """A direction, in two bytes per number."""
    sketch = np.concatenate(parts)
    length = float(np.linalg.norm(sketch))
    return bytes((sketch / length if length > 0 else sketch).astype(np.float16).tobytes())


def moments_apart(expert: GroupValues, base: GroupValues) -> tuple[Vector, bytes]:
    """How far an expert's moments are from the source's, per BatchNorm layer: the root mean square, over channels, of
    the mean's shift in standard deviations and of the logarithm of the variances' ratio. And in which direction, where
    every layer counts the same. Both are empty without BatchNorm.
    """
    if not moment_pairs(base):
        return np.empty(0, np.float32), b""
    (mean, variance), (origin, spread) = (
        moments_of(expert, base).astype(np.float64),
        moments_of(base).astype(np.float64),
    )
    shift = (mean - origin) / np.sqrt(spread + TINY)
    ratio = np.log((variance + TINY) / (spread + TINY))
    sizes = layer_sizes(base)
    layers = np.split(np.stack([shift, ratio]), np.cumsum(sizes)[:-1], axis=1)
    apart = np.array([np.sqrt((layer**2).sum() / layer.shape[1]) for layer in layers])
    widths = [where.stop - where.start for where in places([2 * size for size in sizes])]
    parts = [folded(layer.ravel() / layer.shape[1] ** 0.5, width) for layer, width in zip(layers, widths, strict=True)]
    return apart.astype(np.float32), packed(parts)


def rms(values: Vector) -> float:
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64)))) if values.size else 0.0


def direction(sketch: bytes) -> Vector:
    return np.frombuffer(sketch, np.float16).astype(np.float32)


def similarities(sketches: Sequence[bytes]) -> Vector:
    """Cosines between all experts."""
    unit = np.stack([direction(sketch) for sketch in sketches])
    cosines: Vector = np.clip(unit @ unit.T, -1.0, 1.0)
    return cosines


def fair(experts: Sequence[ExpertRecord], most: int) -> list[ExpertRecord]:
    """At most so many: of each contributor the latest, before there is a second of any.

    Ids of tokens, which are random, decide between contributors: nobody can crowd out the others by being new.
    """
    held: Counter[str] = Counter()
    ranks = []
    for expert in sorted(experts, key=lambda expert: -expert.created):
        ranks.append((held[expert.token], expert))
        held[expert.token] += 1
    return [expert for _, expert in sorted(ranks, key=lambda entry: (entry[0], entry[1].token))[:most]]


def middle(values: Vector) -> Vector:
    """The median over the rows; of an even number, the lower one."""
    return np.asarray(np.sort(values, axis=0)[(len(values) - 1) // 2])


class Yardstick:
    """What the voices say: one per contributor or, where there is a single one, one per expert."""

    def __init__(self, crowd: Sequence[ExpertRecord], groups: Sequence[slice]) -> None:
        alone = len({expert.token for expert in crowd}) == 1
        crowd = sorted(crowd, key=lambda expert: expert.id if alone else expert.token)
        names = [expert.id if alone else expert.token for expert in crowd]
        voices = {name: i for i, name in enumerate(dict.fromkeys(names))}
        self.crowd = crowd
        self.enough, self.majority = len(voices) >= (CROWD if alone else 2), len(voices) >= MAJORITY
        self.voice_of = np.array([voices[name] for name in names], dtype=np.int64)
        self.starts = np.flatnonzero(np.diff(self.voice_of, prepend=-1))
        """Where each voice begins in the crowd, which is in the order of voices."""
        self.place = {expert.id: i for i, expert in enumerate(crowd)}
        self.sketches = np.stack([direction(expert.sketch) for expert in crowd])
        self.moments = moments_in(crowd)
        self.parts = [(slice(0, self.sketches.shape[1]), WHOLE), *((group, LAYER) for group in groups)]

    def odd_lengths(self, suspects: Sequence[ExpertRecord]) -> dict[str, str]:
        """Task vectors or moments that are far longer than the median ones, as a whole or in a layer."""
        found: dict[str, str] = {}
        if not suspects or not self.enough:
            return found
        mine, theirs = (np.stack([distances(e) for e in experts]) for experts in (suspects, self.crowd))
        for ratio in self.ratios(mine, theirs).T[::-1]:
            note(found, suspects, ratio > LENGTH, "its moments are {:.2g} times as far off as the median ones", ratio)
        sketches = np.stack([direction(expert.sketch) for expert in suspects])
        ratios = self.ratios(self.lengths(suspects, sketches), self.lengths(self.crowd, self.sketches))
        for (_, what), ratio in zip(self.parts[::-1], ratios.T[::-1], strict=True):
            odd = (ratio > LENGTH) | ((ratio < 1 / LENGTH) & (what == WHOLE))
            note(found, suspects, odd, f"its {what} is {{:.2g}} times as long as the median one", ratio)
        return found

    def odd_directions(self, suspects: Sequence[ExpertRecord]) -> dict[str, str]:
        """Task vectors that point elsewhere, as a whole or in a layer; moments that point elsewhere as a whole. (Those
        of a layer may: behind the stem of `fashion-bn`, noise and fog lie on opposite sides.)
        """
        found: dict[str, str] = {}
        if not suspects or not self.enough or not self.majority:
            return found
        told = "its {} has a median cosine of {{:.2f}} with the others"
        theirs, mine = self.moments, moments_in(suspects)
        if theirs.shape[1] == mine.shape[1] and np.median(self.cosines(self.crowd, theirs, theirs)) > 2 * ALIKE:
            alike = self.cosines(suspects, mine, theirs)
            note(found, suspects, alike < AGAINST, told.format(MOMENTS), alike)
        sketches = np.stack([direction(expert.sketch) for expert in suspects])
        for part, what in reversed(self.parts):
            theirs, lowest = self.sketches[:, part], OPPOSED
            alike = self.cosines(suspects, sketches[:, part], theirs)
            if what == WHOLE:
                agreement = float(np.median(self.cosines(self.crowd, theirs, theirs)))
                lowest = ALIKE if agreement > 2 * ALIKE else -ALIKE
            note(found, suspects, alike < lowest, told.format(what), alike)
        return found

    def lengths(self, experts: Sequence[ExpertRecord], sketches: Vector) -> Vector:
        """Of their task vectors: of all of it, and of each layer."""
        norms = np.array([expert.norm for expert in experts])
        return np.stack([norms * np.linalg.norm(sketches[:, part], axis=1) for part, _ in self.parts], axis=1)

    def ratios(self, lengths: Vector, crowd: Vector) -> Vector:
        """By column, to the median of the voices (each a median); of two, to the shorter. 1 where that is nothing."""
        voices = np.split(crowd, self.starts[1:])
        usual = middle(np.stack([np.median(voice, axis=0) if len(voice) > 1 else voice[0] for voice in voices]))
        return np.where(usual > 0, lengths / np.where(usual > 0, usual, 1.0), 1.0)

    def cosines(self, experts: Sequence[ExpertRecord], mine: Vector, theirs: Vector) -> Vector:
        """Of each expert, the median over the voices of its mean cosine with the voice's experts other than itself: of
        their vectors, given the crowd's.
        """
        each = unit(theirs) @ unit(mine).T
        sums = np.add.reduceat(each, self.starts)
        counts = np.repeat(np.diff(self.starts, append=len(each))[:, None], len(experts), axis=1)
        rows = np.array([self.place.get(expert.id, -1) for expert in experts])
        columns = np.flatnonzero(rows >= 0)
        voices = self.voice_of[rows[columns]]
        others = counts[voices, columns] > 1
        columns, voices = columns[others], voices[others]
        sums[voices, columns] -= each[rows[columns], columns]
        counts[voices, columns] -= 1
        return np.asarray(np.median(sums / counts, axis=0))


def note(found: dict[str, str], experts: Sequence[ExpertRecord], odd: Vector, sentence: str, values: Vector) -> None:
    """Add what is odd about some; what is said last counts."""
    found.update({experts[i].id: sentence.format(values[i]) for i in np.flatnonzero(odd).tolist()})


def distances(expert: ExpertRecord) -> Vector:
    """Of its moments from the source's: of all layers, and of each."""
    layers = np.frombuffer(expert.layers, np.float32)
    return np.append(rms(layers), layers)


def moments_in(experts: Sequence[ExpertRecord]) -> Vector:
    """Which way their moments lie; no way at all, if that is not known of an expert."""
    found = [direction(expert.moments) for expert in experts]
    width = max((each.size for each in found), default=0)
    return np.stack([each if each.size == width else np.zeros(width, np.float32) for each in found])


def unit(rows: Vector) -> Vector:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12))


def trusted(yardstick: Sequence[ExpertRecord]) -> list[ExpertRecord]:
    """What a person has accepted, if that is enough."""
    accepted = [expert for expert in yardstick if expert.decided and expert.state == ACTIVE]
    return accepted if len(accepted) >= CROWD else list(yardstick)


def screen(
    yardstick: Sequence[ExpertRecord], suspects: Sequence[ExpertRecord], groups: Sequence[slice]
) -> dict[str, str]:
    """Reason per outlier among the suspects. Who is odd has no voice: the yardstick is made again without."""
    crowd = trusted(yardstick)
    if not crowd:
        return {}
    for look in (Yardstick.odd_lengths, Yardstick.odd_directions):
        for _ in range(ROUNDS):
            odd = look(Yardstick(crowd, groups), [expert for expert in crowd if not expert.decided])
            kept = [expert for expert in crowd if expert.id not in odd]
            if not odd or not kept:
                break
            crowd = kept
    judge = Yardstick(crowd, groups)
    return {**judge.odd_directions(suspects), **judge.odd_lengths(suspects)}
