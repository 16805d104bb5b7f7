"""Our own method: find out by forward passes which experts fit the stream, mix those, let their moments follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from mergetta.adapters.base import Adapter, check_family
from mergetta.adapters.forward_only.cola import by_similarity
from mergetta.adapters.forward_only.normaliser import Aligner, Normaliser, Plain
from mergetta.adapters.forward_only.race import BROKEN, Race
from mergetta.adapters.forward_only.source_features import check_source
from mergetta.arrays import Array, beside, to_numpy
from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.groups import (
    Vector,
    as_mixed,
    from_mixed,
    has_batch_norm,
    learnable,
    mixture_shares,
)
from mergetta.losses.probabilities import softmax
from mergetta.merging.build import check_experts, variances_of
from mergetta.runtimes.base import Output, Runtime
from mergetta.streams.classes import mixed
from mergetta.streams.domain import DomainMoments, Variances, between_domains, predicted
from mergetta.streams.moments import StreamMoments
from mergetta.streams.shift import ShiftDetector
from mergetta.streams.state import Field, checked

HELD = 64
"""Images of the stream that every candidate is shown."""
MEAN = 0.25
"""Share of the experts' mean in the first mixture; the rest goes by similarity."""
MEMORY = 2000
"""Images that the domain's signature is that of, at most."""
MIXED = 0.5
"""How mixed their classes must look."""
FURTHER = (2, 4)
"""How many times the experts' mean is tried."""
COUNTS = ("trials", "shown", "shifts", "compared", "changed")
COMPARED = 256
"""Images on which the mirrored view is judged, at least."""
WORTH = 0.04
"""Share of the predictions that the mirrored view has to change to be worth a forward pass."""


class ZOMergePlus(Adapter):
    """θ = θ₀ + Σ w_m τ_m: one weight per expert, and what is left for the source model.

    - **Similarity** starts the weights: a quarter of them is the mean of all experts, the rest goes by how near each
      expert's signature is to the stream's (CoLA).
    - **Probe**: that mixture, each expert and the source model are shown the same images of the stream, a few of them
      per batch, the most similar first; then the better half of them others, and so on (`race.py`; `halving=False`:
      once). w = softmax(score / temperature) over these candidates; score = entropy of the mean prediction − mean
      entropy: sure of each image, varied over all. Where classes come one by one that would mislead, so images are
      shown only if they look mixed.
    - **Scale**: twice and four times the mean of all experts are candidates too: experts are rarely trained to the end,
      and what they share points further.
    - **Caution**: what a candidate has to gain in score over the source model, times the square root of the weight that
      it gives to experts: they have been trained to be sure, rightly or not.
    - **Moments**: BatchNorm normalises with the moments of the mixture, moved to where the stream says they are, as far
      as the stream can be believed (`normaliser.py`). So batches of any size and classes in any order are treated
      alike. `moments=False` takes the batch's own statistics. Without BatchNorm, and if `source` is given
      (`measure_source`), the classifier's input is aligned in the same way (`align=False`: not).
    - **Mirror**: predictions are averaged with those for the mirrored image, until that surely (by two standard errors)
      changes fewer than 4 in 100 of them. Only for images that mean the same when mirrored; else `mirror=False`.

    At most three forward passes per image, and one when settled: all candidates tried, both views of one mind. Where
    the views go on to differ it stays with two. (Of a new domain the first batch, and large ones, take a few more.)
    When the signature jumps (over at least 64 images), it starts anew.

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
        mirror: bool = True,
        moments: bool = True,
        align: bool = True,
        shift_threshold: float | None = None,
    ) -> None:
        super().__init__(runtime)
        experts = [expert for expert in experts if expert.domain != "source"]
        if not experts:
            raise MergettaError("zo-merge-plus needs at least one expert.")
        for expert in experts:
            check_family(runtime, expert.family, f"The expert {expert.domain!r}")
        check_experts(runtime.groups, experts, None)
        if not 0 < temperature < np.inf:
            raise MergettaError(f"temperature must be positive, not {temperature}.")
        if not 0 <= caution < np.inf:
            raise MergettaError(f"caution must not be negative, not {caution}.")
        self.pool = ExpertPool(runtime, experts)
        self.size = len(experts) + 1
        self.mean = np.append(np.full(len(experts), 1 / len(experts)), 0)
        self.multiples = [times * self.mean for times in FURTHER if scale and self.pool.is_finite(times * self.mean)]
        self.signatures = known_signatures(experts, runtime) if similarity else None
        self.normalise = normaliser_of(runtime, experts, moments, source if align else None)
        self.temperature, self.caution, self.mirror = temperature, caution, mirror
        self.probe, self.halving = probe, halving
        default = 0.2 if has_batch_norm(runtime.structure) else 0.1
        self.shift_threshold = default if shift_threshold is None else shift_threshold
        self.classes = len(runtime.classifier.bias)
        self.reset()

    def reset(self) -> None:
        self.detector = ShiftDetector(self.shift_threshold, HELD)
        self.shifts = 0
        """How often it has started anew."""
        self._begin()

    def _begin(self, channels: int = 1) -> None:
        """Nothing is known of the domain, not even its signature, of so many channels."""
        if self.normalise.moments is not None:
            self.normalise.moments.clear()
        self.held: np.ndarray | None = None
        """The images that candidates are shown, until all have seen them."""
        self.candidates = self.mean[None]
        """Weights to try, in this order; the first images say which."""
        self.race = self._new_race(self.candidates)
        self.trials = 0
        """How often a candidate has been shown the images."""
        self.shown = 0
        """How many of the images the next candidate has been shown so far."""
        self.seen = StreamMoments(channels, MEMORY)
        """Signature of the domain so far."""
        self.labels: np.ndarray = np.zeros(self.classes)
        """How often each class was predicted for the images that are held."""
        self.tally = np.zeros(1 + self.classes)
        """Its sum of entropies, then of predictions."""
        self.compared = self.changed = 0
        """Images seen in both views since all candidates have been tried; predictions that the second one changed."""

    def _new_race(self, candidates: np.ndarray) -> Race:
        handicap = self.caution * np.sqrt(candidates[:, :-1].sum(axis=1))
        return Race(handicap, self.temperature, None if self.halving else 1)

    @property
    def tried(self) -> bool:
        """Whether there is nothing left to ask."""
        return not self.probe or self.race.over

    @property
    def weights(self) -> Vector:
        """Of each expert, and of the source model at the end."""
        return np.asarray(self.race.standing @ self.candidates)

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to try, and one view of an image is enough."""
        return self.tried and (not self.mirror or self.agreed)

    @property
    def agreed(self) -> bool:
        """Whether the mirrored view surely changes too little."""
        return self.compared >= COMPARED and self.changed + 2 * np.sqrt(self.changed) < WORTH * self.compared

    def predict(self, images: Array, adapt: bool = True) -> Array:
        """Logits (logarithms of probabilities) of a batch; `adapt=False` only predicts."""
        output = self._forward(images, self.weights, learn=adapt)
        if adapt and self._is_new(output):
            output = self._forward(images, self.weights, learn=True)
        p = probabilities(output)
        sound = bool(np.isfinite(p).all())
        if not sound:
            p = probabilities(self.runtime(images, given=1.0))
        elif self.mirror and not self.agreed:
            mirrored = array_namespace(images).flip(images, axis=3)
            both = (p + probabilities(self._forward(mirrored, self.weights))) / 2
            if adapt and self.tried:
                self.compared += len(p)
                self.changed += int(np.count_nonzero(p.argmax(axis=1) != both.argmax(axis=1)))
            p = both
        if adapt and np.isfinite(p).all() and not self.tried:
            self._hold(to_numpy(images), p)
            self._probe(len(images))
        return beside(np.log(np.maximum(p, 1e-12)), output.logits)

    def _forward(self, images: Array, weights: Vector, learn: bool = False) -> Output:
        return self.normalise(images, self.pool.merged(weights), self.pool.features_of(weights), learn)

    def _is_new(self, output: Output) -> bool:
        """Whether a batch is the first one of a domain: then nothing is known, and it is predicted once more."""
        signature, p = to_numpy(output.signature), probabilities(output)
        if self.signatures is not None and self.signatures.shape[2] != signature.shape[1]:
            raise MergettaError("The experts' signatures are not of this model.")
        first = self.detector.signature is None
        shifted = self.detector.add(signature, len(p), predicted(p))
        if first or shifted:
            self._begin(signature.shape[1])
            self.shifts += shifted
        self.seen.add(signature, len(p))
        if not self.trials and not self.shown:
            self._order()
        return first or shifted

    def _order(self) -> None:
        """The first mixture, and what is tried in which order, by similarity."""
        first = order = self.mean
        if self.signatures is not None:
            order = by_similarity(self.signatures, self.seen.value())
            first = MEAN * self.mean + (1 - MEAN) * order
        self.candidates = np.vstack([first, *self.multiples, np.eye(self.size)[np.argsort(-order, kind="stable")]])
        self.race = self._new_race(self.candidates)

    def _hold(self, images: np.ndarray, p: np.ndarray) -> None:
        """Keep images to show to candidates, if they look mixed: classes that come one by one would mislead them."""
        if self.held is not None and len(self.held) == HELD:
            return
        same = self.held is not None and self.held.shape[1:] == images.shape[1:]
        before = len(self.held) if same and self.held is not None else 0
        self.held = np.concatenate([self.held, images])[:HELD] if same else images[:HELD].copy()
        self.labels = (self.labels if same else 0) + predicted(p[: len(self.held) - before])
        if len(self.held) == HELD and mixed(self.labels) < MIXED:
            self.held = None

    def _probe(self, images: int) -> None:
        """Show the held images to the next candidates, at most as many as the batch has."""
        while self.held is not None and len(self.held) == HELD and images > 0 and not self.race.over:
            part = self.held[self.shown : self.shown + images]
            p = probabilities(self._forward(part, self.candidates[self.race.next]))
            images -= len(part)
            self.shown += len(part)
            entropies = entropy(p).sum() if np.isfinite(p).all() else BROKEN * HELD
            self.tally = self.tally + np.append(entropies, np.nan_to_num(p).sum(axis=0))
            if self.shown < HELD:
                continue
            self.race.enter(float(entropy(self.tally[1:] / HELD)), self.tally[0] / HELD)
            self.trials, self.shown, self.tally = self.trials + 1, 0, np.zeros_like(self.tally)
            if self.race.over or not self.race.shown:
                self.held = None  # the next round has images of its own

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: int(getattr(self, name)) for name in COUNTS},
            "candidates": self.candidates.copy(),
            "tally": self.tally.copy(),
            "labels": self.labels.copy(),
            **({} if self.held is None else {"held": self.held.copy()}),
            **self.race.state("race"),
            **self.detector.state("signature."),
            **self.seen.state("domain."),
            **({} if self.normalise.moments is None else self.normalise.moments.state()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = {
            **{name: Field(low=0, whole=True) for name in COUNTS},
            "candidates": Field((None, self.size), low=0),
            "tally": Field(self.tally.shape, low=0),
            "labels": Field(self.labels.shape, low=0),
        }
        if "held" in state:
            fields["held"] = Field((None, None, None, None))
        found = checked(state, fields)
        counts = {name: int(found[name]) for name in COUNTS}
        empty = not len(found["candidates"]) or ("held" in found and not found["held"].size)
        if empty or counts["shown"] >= HELD or counts["changed"] > counts["compared"]:
            raise MergettaError(f"This state does not fit zo-merge-plus with {self.size - 1} experts.")
        race = self._new_race(found["candidates"])
        race.restore("race", state)
        channels = None if self.signatures is None else self.signatures.shape[2]
        detector = self.detector.restored(state, "signature.", self.classes, channels)
        seen = StreamMoments(1 if detector.signature is None else detector.signature.shape[1], MEMORY)
        seen.restore(state, "domain.")
        if self.normalise.moments is not None:
            self.normalise.moments.restore(state)
        self.race, self.detector, self.seen = race, detector, seen
        self.candidates, self.tally, self.labels = found["candidates"], found["tally"], found["labels"]
        self.held = found["held"].astype(np.float32) if "held" in found else None
        for name, count in counts.items():
            setattr(self, name, count)


class ExpertPool:
    """Experts and the source model, and what mixtures of them are."""

    def __init__(self, runtime: Runtime, experts: Sequence[Expert]) -> None:
        self.base = runtime.groups
        self.mixed = as_mixed(runtime.groups)
        adapted = [as_mixed(expert.groups) for expert in experts]
        self.weights = frozenset(learnable(self.base))
        self.tasks = {name: np.stack([values[name] - base for values in adapted]) for name, base in self.mixed.items()}
        """(M, D) each; of moments, the differences as they mix."""
        found = [expert.features for expert in experts if expert.features is not None]
        if any(features.shape != (2, runtime.classifier.weight.shape[1]) for features in found):
            raise MergettaError("An expert's features are not of this model.")
        self.features = np.stack(found).astype(np.float64) if len(found) == len(experts) else None
        self._last: tuple[bytes, dict[str, Vector]] | None = None

    def merged(self, weights: Vector) -> dict[str, Vector]:
        """All groups of a mixture; the last weight is the source model's."""
        key = weights.tobytes()
        if self._last is None or self._last[0] != key:
            w = weights[:-1].astype(np.float32)
            shares = mixture_shares(w)
            mixed = {
                name: self.mixed[name] + (w if name in self.weights else shares) @ tasks
                for name, tasks in self.tasks.items()
            }
            self._last = key, from_mixed(mixed, self.base)
        return self._last[1]

    def features_of(self, weights: Vector) -> np.ndarray | None:
        """Mean and variance of the classifier's input in a mixture of the experts' domains, (2, F)."""
        if self.features is None:
            return None
        total = weights[:-1].sum()
        shares = weights[:-1] / total if total > 0 else np.full(len(self.features), 1 / len(self.features))
        mean, seconds = shares @ self.features[:, 0], shares @ (self.features[:, 1] + self.features[:, 0] ** 2)
        return np.stack([mean, np.maximum(seconds - mean**2, 0)])

    def is_finite(self, weights: Vector) -> bool:
        with np.errstate(over="ignore", invalid="ignore"):
            return all(np.isfinite(vector).all() for vector in self.merged(weights).values())


def normaliser_of(
    runtime: Runtime, experts: Sequence[Expert], moments: bool, source: Sequence[Vector] | None
) -> Normaliser | Aligner | Plain:
    """What a family's moments are put to use by."""
    if has_batch_norm(runtime.structure) and moments:
        return Normaliser.of_variances(runtime, variances_of(runtime.groups, experts))
    features = [expert.features for expert in experts if expert.features is not None]
    if has_batch_norm(runtime.structure) or source is None or len(features) < len(experts):
        return Plain(runtime)
    known = check_source(runtime, source)
    at_source = np.stack([known.mean, known.std**2])
    width = at_source.shape[1]
    spreads = [expert.spread for expert in experts if expert.spread is not None]
    variances = None
    if spreads:
        between = between_domains(np.stack([*features, at_source]), [width])
        variances = Variances(np.mean(spreads, axis=0), between)
    return Aligner(runtime, DomainMoments([width], len(runtime.classifier.bias), variances), at_source)


def probabilities(output: Output) -> np.ndarray:
    return np.asarray(softmax(to_numpy(output.logits)), dtype=np.float64)


def entropy(p: np.ndarray) -> np.ndarray:
    return np.asarray(-(p * np.log(np.maximum(p, 1e-12))).sum(axis=-1))


def known_signatures(experts: Sequence[Expert], runtime: Runtime) -> np.ndarray | None:
    """(M + 1, 2, C), with NaN for a source model that has none. None unless all experts have some."""
    found = [expert.signature for expert in experts if expert.signature is not None]
    if len(found) < len(experts):
        return None
    if len({value.shape for value in found}) > 1:
        raise MergettaError("The experts have signatures of different sizes.")
    return np.stack([*found, np.full_like(found[0], np.nan) if runtime.signature is None else runtime.signature])
