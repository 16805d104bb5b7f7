"""Our own method: find out by forward passes which experts fit the stream, mix those, look twice where that helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mergetta.adapters.base import Adapter, check_family, entry
from mergetta.adapters.forward_only.cola import by_similarity, distance
from mergetta.adapters.forward_only.guard import Guard, entropy, is_few, looks_of
from mergetta.adapters.forward_only.race import BROKEN, Race
from mergetta.adapters.forward_only.source_features import check_source
from mergetta.arrays import Array, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import Vector, check_groups
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.base import Output, Runtime

HELD = 64
"""Images of the stream that every candidate is shown; smaller batches tell less of themselves."""
PRIOR = 16
"""Images that stored statistics count for, at least, where a batch is small."""
PRIORS = (192, 0, 512, 64)
"""How many they may count for in any batch, in the order of trying. From few to many where little speaks for them: the
source model sees a few classes only, or batches are small, where a few images are many.
"""
FURTHER = (2, 4)
"""How many times the experts' mean is tried."""
MEMORY = 0.8
"""Share of the past in the stream's statistics after the stem."""
COUNTS = ("asked", "trials", "shown", "recent_images", "shifts", "compared", "changed")
ARRAYS = ("recent", "tally", "candidates", "priors")
COMPARED = 256
"""Images on which the mirrored view is judged, at least."""
WORTH = 0.04
"""Share of the predictions that the mirrored view has to change to be worth a forward pass."""


class ZOMergePlus(Adapter):
    """θ = θ₀ + Σ w_m τ_m: one weight per expert, and what is left for the source model.

    - **Similarity** starts the weights: half of them are the mean of all experts, half go by how near each expert's
      statistics after the stem are to the stream's (CoLA).
    - **Probe**: that mixture, each expert and the source model are shown the same first images, a few of them per
      batch, the most similar first; then the better half of them others, and so on (`race.py`; `halving=False`: once).
      w = softmax(score / temperature) over these candidates; score = entropy of the mean prediction − mean entropy:
      sure of each image, varied over all.
    - **Scale**: twice and four times the mean of all experts are candidates too: experts are rarely trained to the end,
      and what they share points further.
    - **Caution**: what a candidate has to gain in score over the source model, times the square root of the weight that
      it gives to experts: they have been trained to be sure, rightly or not.
    - **Blend**, for BatchNorm: how many images the stored statistics should count for, beside those of the batch, is a
      question of how far the domain is from the source. The first mixture is shown the images with 0, 64, 192 and
      512 (not in small batches), and so is the one that was found in the end; what scores best is kept. (Experts are
      compared with 0, which they have been made with.)
    - **Guard**, for BatchNorm: batches that look like a few classes only (`guard.py`) are left to the source model with
      its stored statistics, because they are no measure for a norm layer. (Classes are taken to be equally
      frequent; for a stream in which they never are, `guard=False`.)
    - **Mirror**: predictions are averaged with those for the mirrored image, until that surely (by two standard errors)
      changes fewer than 4 in 100 of them. Only for images that mean the same when mirrored; else `mirror=False`.
    - **Alignment**, without BatchNorm and if `source` is given (`measure_source`): the classifier's input gets the mean
      and std that it had at the source. Not in batches of a few classes: they differ from the source by that.

    At most three forward passes per batch, and one when settled: all candidates tried, both views of one mind, no batch
    in doubt. (The guard asks the source model, one pass, of batches that look suspicious.) Where the views go on to
    differ it stays with two; `mirror=False` has one view only. When the statistics after the stem jump (over at least
    64 images), it starts anew with the next batch.

    >>> adapter = ZOMergePlus(runtime, experts)   # doctest: +SKIP
    """

    def __init__(
        self,
        runtime: Runtime,
        experts: Sequence[Expert],
        source: Sequence[Vector] | None = None,
        temperature: float = 0.01,
        caution: float = 0.04,
        similarity: bool = True,
        probe: bool = True,
        halving: bool = True,
        scale: bool = True,
        guard: bool = True,
        mirror: bool = True,
        blend: bool = True,
        align: bool = True,
        shift_threshold: float | None = None,
    ) -> None:
        super().__init__(runtime)
        experts = [expert for expert in experts if expert.domain != "source"]
        if not experts:
            raise MergettaError("zo-merge-plus needs at least one expert.")
        for expert in experts:
            check_family(runtime, expert.family, f"The expert {expert.domain!r}")
            check_groups(expert.groups, runtime.groups, f"The expert {expert.domain!r}")
        if not 0 < temperature < np.inf:
            raise MergettaError(f"temperature must be positive, not {temperature}.")
        if not 0 <= caution < np.inf:
            raise MergettaError(f"caution must not be negative, not {caution}.")
        self.tasks = {
            name: np.stack([*(expert.groups[name] - base for expert in experts), np.zeros_like(base)])
            for name, base in runtime.groups.items()
        }
        """(M + 1, D) each; the last row is the source model's, which moves nothing."""
        self.size = len(experts) + 1
        mean = np.append(np.full(len(experts), 1 / len(experts)), 0)
        self.multiples = [times * mean for times in FURTHER if scale and self._is_finite(times * mean)]
        self.batch_norm = any(group.kind == "batch" for group in runtime.structure)
        self.statistics = known_statistics(experts, runtime) if similarity else None
        self.source = check_source(runtime, source) if source is not None and align and not self.batch_norm else None
        self.temperature, self.caution, self.mirror = temperature, caution, mirror
        self.probe, self.halving = probe, halving
        self.guarding = guard and self.batch_norm
        self.blend = blend and probe and self.batch_norm
        self.most = np.log(min(HELD, len(runtime.classifier.bias)))
        self.shift_threshold = (0.2 if self.batch_norm else 0.1) if shift_threshold is None else shift_threshold
        self.reset()

    def reset(self) -> None:
        self.running: np.ndarray | None = None
        """Statistics of the stream after the stem."""
        self.recent = np.zeros((2, 0))
        """Sums of the statistics and of squares over the images since `running` was last moved."""
        self.recent_images = 0
        self.held: np.ndarray | None = None
        """The images that candidates are shown, until all have seen them."""
        self.candidates = np.full((1, self.size), 1 / self.size)
        """Weights to try, in this order; the first images say which."""
        self.priors = np.array(PRIORS if self.blend else [0])
        """How many images the stored BatchNorm statistics may count for, in the order in which they are tried."""
        self.asked = 0
        """Of how many first images the source model has been asked."""
        self.races = self._new_races(self.candidates)
        self.trials = 0
        """How often a candidate has been shown the images."""
        self.shown = 0
        """How many of the images the next candidate has been shown so far."""
        self.tally = np.zeros(1 + len(self.runtime.classifier.bias))
        """Its sum of entropies, then of predictions."""
        self.guard = Guard.new(len(self.runtime.classifier.bias))
        self.compared = self.changed = 0
        """Images seen in both views since all candidates have been tried; predictions that the second one changed."""
        self.shifts = 0
        """How often it has started anew."""

    def _new_races(self, candidates: np.ndarray) -> list[Race]:
        """For the blend, by the first mixture; for the experts; for the blend, by the mixture that was found."""
        handicap = self.caution * np.sqrt(candidates[:, :-1].sum(axis=1))
        blends = np.zeros(len(self.priors))
        first, experts, last = (
            Race(values, self.temperature, self.most / 2, rounds)
            for values, rounds in ((blends, 1), (handicap, None if self.halving else 1), (blends, None))
        )
        if not self.halving:
            last.skip()
        return [first, experts, last] if self.blend else [experts]

    @property
    def begun(self) -> bool:
        """Whether any candidate has been shown an image."""
        return bool(self.trials or self.shown)

    @property
    def race(self) -> Race | None:
        """What is being asked."""
        return next((race for race in self.races if self.probe and not race.over), None)

    @property
    def experts(self) -> Race:
        """The race of the candidates for the weights, alone or between those for the blend."""
        return self.races[len(self.races) // 2]

    @property
    def tried(self) -> bool:
        """Whether there is nothing left to ask."""
        return self.race is None

    @property
    def weights(self) -> Vector:
        """Of each expert, and of the source model at the end."""
        return np.asarray(self.experts.standing @ self.candidates)

    @property
    def prior(self) -> int:
        """How many images the stored statistics count for: the best of what has been tried, in doubt the fewest."""
        if not self.blend:
            return 0
        first, _, last = self.races
        standing = (last if last.rounds else first).standing
        return int(self.priors[standing == standing.max()].min())

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to try and nothing in doubt, and one view of an image is enough."""
        return self.tried and not self.guard.doubt and (not self.mirror or self.agreed)

    @property
    def agreed(self) -> bool:
        """Whether the mirrored view surely changes too little."""
        return self.compared >= COMPARED and self.changed + 2 * np.sqrt(self.changed) < WORTH * self.compared

    def predict(self, images: Array, adapt: bool = True) -> Array:
        """Logits (logarithms of probabilities) of a batch; `adapt=False` only predicts."""
        before = self.runtime.forwarded
        asking = adapt and (self.guard.doubt or self.asked < (HELD if self.guarding else 1))
        q = self._ask(images) if asking else None
        if adapt and not asking and not self.tried:
            self._probe(len(images))
        weights, share = self.weights, self._stored_share(len(images), self.prior)
        output = self._forward(images, weights, share)
        p = self._probabilities(output)
        if adapt and not asking:
            self._follow(output, len(images))
        broken, odd = not np.isfinite(p).all(), False
        if self.guarding and not broken:
            looks = looks_of(to_numpy(images))
            if not asking and self.guard.suspects(looks, p):
                q = numbers(self._probabilities(self._forward(images, self.alone, 1.0)))
            odd = q is not None and self.guard.finds_odd(looks, p, q, share)
            if adapt:
                self.guard = self.guard.after(looks, p, q, odd, share)
        elif adapt:
            self.guard = self.guard.without_doubt()  # or no candidate would be tried
        if adapt and not odd and not self.tried:
            self._hold(to_numpy(images))
        if odd or broken:
            weights, share = self.alone, 1.0
            p = self._probabilities(self._forward(images, weights, share)) if q is None else q
        if self.mirror and not self.agreed and self.runtime.forwarded - before <= 2 * len(images):
            mirrored = array_namespace(images).flip(images, axis=3)
            both = (p + self._probabilities(self._forward(mirrored, weights, share))) / 2
            if adapt and self.tried and not odd and not broken:
                self.compared += len(p)
                self.changed += int(np.count_nonzero(p.argmax(axis=1) != both.argmax(axis=1)))
            p = both
        return beside(np.log(np.maximum(p, 1e-12)), output.logits)

    @property
    def alone(self) -> Vector:
        """The weights of the source model."""
        return np.append(np.zeros(self.size - 1), 1.0)

    def _ask(self, images: Array) -> np.ndarray | None:
        """Predictions of the source model, if they are numbers. At the start they say what to try first."""
        source = self._forward(images, self.alone, 1.0)
        q = numbers(self._probabilities(source))
        self._follow(source, len(images))
        self.asked += len(images)
        if not self.begun and (q is None or is_few(q.mean(axis=0), len(q))):
            self.priors = np.sort(self.priors)
        return q

    def _forward(self, images: Array, weights: Vector, stored_share: float) -> Output:
        self.runtime.load(self._merged(weights))
        return self.runtime(images, source_statistics=stored_share)

    def _merged(self, weights: Vector) -> dict[str, Vector]:
        w = weights.astype(np.float32)
        return {name: base + w @ self.tasks[name] for name, base in self.runtime.groups.items()}

    def _is_finite(self, weights: Vector) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            return all(np.isfinite(vector).all() for vector in self._merged(weights).values())

    def _stored_share(self, images: int, prior: int) -> float:
        """Of the BatchNorm statistics: the fewer images, the more the stored ones count."""
        if is_small(images):
            prior = max(prior, PRIOR)
        return prior / (prior + images) if self.batch_norm else 0.0

    def _probabilities(self, output: Output) -> np.ndarray:
        p = np.asarray(softmax(to_numpy(output.logits)), dtype=np.float64)
        if self.source is None or is_few(p.mean(axis=0), len(p)):
            return p
        features = to_numpy(output.features).astype(np.float64)
        trust = len(features) / (len(features) + PRIOR)
        mean, std = features.mean(axis=0), features.std(axis=0)
        moved = (features - mean) * ((self.source.std + 1e-3) / (std + 1e-3)) ** trust
        weight, bias = self.runtime.classifier
        return np.asarray(softmax((moved + mean + trust * (self.source.mean - mean)) @ weight.T + bias))

    def _follow(self, output: Output, images: int) -> None:
        """Take in the statistics after the stem, which no weights change, in portions of at least 64 images."""
        mean, variance = to_numpy(output.statistics).astype(np.float64)
        if self.statistics is not None and self.statistics.shape[2] != mean.size:
            raise MergettaError("The experts' feature statistics are not of this model.")
        if not np.isfinite([mean, variance]).all():
            return
        sums = images * np.stack([mean, variance + mean**2])
        self.recent = sums if not self.recent_images else self.recent + sums
        self.recent_images += images
        mean, square = self.recent / self.recent_images
        now = np.stack([mean, square - mean**2])
        if self.recent_images >= HELD:
            if self.running is not None and distance(self.running, now) > self.shift_threshold:
                kept = self.guard.after_jump(), self.shifts + 1
                self.reset()
                self.guard, self.shifts = kept
            self.running = now if self.running is None else MEMORY * self.running + (1 - MEMORY) * now
            self.recent_images = 0
        if not self.begun:
            first = order = np.append(np.full(self.size - 1, 1 / (self.size - 1)), 0)
            if self.statistics is not None:
                order = by_similarity(self.statistics, now if self.running is None else self.running)
                first = (first + order) / 2
            self.candidates = np.vstack([first, *self.multiples, np.eye(self.size)[np.argsort(-order, kind="stable")]])
            self.races = self._new_races(self.candidates)
            if self.blend and is_small(images):
                self.priors = np.sort(self.priors)
                if self.halving:
                    self.races[0].skip()  # experts are worth more, and there may not be many images

    def _hold(self, images: np.ndarray) -> None:
        if (self.held is None or len(self.held) < HELD) and np.isfinite(images).all():
            same = self.held is not None and self.held.shape[1:] == images.shape[1:]
            held = np.concatenate([self.held, images]) if same else images
            self.held = held[:HELD].copy()

    def _probe(self, images: int) -> None:
        """Show the held images to the next candidates, at most as many as the batch has, in equal portions."""
        if not images or self.held is None or len(self.held) < HELD:
            return
        left, portion = images, 1 << (min(images, HELD).bit_length() - 1)  # divides 64
        while self.held is not None and (race := self.race) and (size := min(portion, HELD - self.shown)) <= left:
            part = self.held[self.shown : self.shown + size]
            weights, prior = self._trial(race)
            p = self._probabilities(self._forward(part, weights, self._stored_share(size, prior)))
            if np.isfinite(p).all():
                self.tally = self.tally + np.append(entropy(p).sum(), p.sum(axis=0))
            else:
                self.tally[0] += BROKEN * HELD
            self.shown, left = self.shown + size, left - size
            if self.shown == HELD:
                race.enter(float(entropy(self.tally[1:] / HELD)), self.tally[0] / HELD)
                self.trials, self.shown, self.tally = self.trials + 1, 0, np.zeros_like(self.tally)
                if self.tried or not (race.over or race.shown):
                    self.held = None  # the next round has images of its own

    def _trial(self, race: Race) -> tuple[Vector, int]:
        """Weights and prior of the next candidate. Experts were made with the statistics of the batch."""
        if race is self.experts:
            return self.candidates[race.next], 0
        first = race is self.races[0]
        return self.candidates[0] if first else self.weights, int(self.priors[race.next])

    def state_dict(self) -> dict[str, Any]:
        known = {"running": self.running, "held": self.held}
        return {
            **{name: int(getattr(self, name)) for name in COUNTS},
            **{name: getattr(self, name).copy() for name in ARRAYS},
            **{name: np.array(value) for name, value in known.items() if value is not None},
            **{key: value for i, race in enumerate(self.races) for key, value in race.state(f"race {i}").items()},
            **self.guard.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        counts = {name: entry(state, name) for name in COUNTS}
        misfit = MergettaError(f"This state does not fit zo-merge-plus with {self.size - 1} experts and these options.")
        try:
            arrays = {name: np.array(entry(state, name)) for name in ARRAYS}
            optional = {name: None if name not in state else np.array(state[name]) for name in ("running", "held")}
        except (TypeError, ValueError) as error:
            raise misfit from error
        known = [x for x in (*arrays.values(), *optional.values()) if x is not None]
        if not all(x.dtype.kind in "fiu" and np.isfinite(x).all() for x in known):
            raise misfit
        recent, tally, candidates, priors = arrays.values()
        running, held = optional.values()
        width = None if self.statistics is None else self.statistics.shape[2]
        widths = {x.shape[1] for x in (running, recent) if x is not None and x.ndim == 2 and x.size}
        fits = (
            all(np.ndim(x) == 0 and np.asarray(x).dtype.kind in "biu" and x >= 0 for x in counts.values())
            and candidates.shape[1:] == (self.size,)
            and priors.dtype.kind in "iu"
            and np.array_equal(np.sort(priors, axis=None), np.sort(self.priors))
            and priors.shape == self.priors.shape
            and tally.shape == self.tally.shape
            and all(x is None or (x.ndim, len(x)) == (2, 2) for x in (running, recent))
            and len(widths | ({width} if width else set())) <= 1
            and (not counts["recent_images"] or recent.size)
            and (held is None or (held.ndim == 4 and held.size))
            and counts["shown"] < HELD
            and counts["changed"] <= counts["compared"]
            and len(candidates) > 0
            and bool((candidates >= 0).all())
        )
        if not fits:
            raise misfit
        races = self._new_races(candidates)
        for i, race in enumerate(races):
            race.restore(f"race {i}", state)
        self.guard = self.guard.restored(state)
        self.races = races
        for name, value in {**arrays, **optional}.items():
            setattr(self, name, value)
        for name, count in counts.items():
            setattr(self, name, type(getattr(self, name))(count))


def is_small(images: int) -> bool:
    """Whether a batch has too few images for statistics of its own."""
    return images < HELD / 2


def numbers(p: np.ndarray) -> np.ndarray | None:
    return p if np.isfinite(p).all() else None


def known_statistics(experts: Sequence[Expert], runtime: Runtime) -> np.ndarray | None:
    """(M + 1, 2, C) after the stem, with NaN for a source model that has none. None unless all experts have some."""
    found = [expert.statistics for expert in experts if expert.statistics is not None]
    if len(found) < len(experts):
        return None
    if len({value.shape for value in found}) > 1:
        raise MergettaError("The experts have feature statistics of different sizes.")
    return np.stack([*found, np.full_like(found[0], np.nan) if runtime.statistics is None else runtime.statistics])
