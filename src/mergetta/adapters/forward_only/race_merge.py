"""Our own method: a bundle's members race on the stream, what wins is merged, and moments follow the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.base import ADAPTING, SETTLED, Adapter, Status, check_bundle
from mergetta.adapters.forward_only.candidates import Candidates, carried, named
from mergetta.adapters.forward_only.mixture import Mixture, probabilities
from mergetta.adapters.forward_only.race import Race
from mergetta.adapters.forward_only.refinement import Refinement
from mergetta.adapters.forward_only.trials import Trials
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.groups import Vector
from mergetta.runtimes.base import Output, Predict, Runtime
from mergetta.streams.classes import predicted
from mergetta.streams.state import Field, checked
from mergetta.streams.visit import Visit

LEAVE = 2
"""A device leaves home at twice the distance at which it is there, and so does not go in and out at the threshold."""


@dataclass(frozen=True)
class RaceSettings:
    """Chosen at severity 4 of fashion-bn and on ResNet-32 (docs/research-log.md)."""

    temperature: float = 0.01
    """Of the softmax over scores."""
    caution: float = 0.7
    """What a candidate has to gain in score over the source model, times how far it goes from there (in lengths of all
    scales and shifts): members have been trained to be sure, rightly or not, and the longer the surer."""
    mean: float = 0.25
    """Share of the members' mean in the first mixture; the rest goes by similarity."""
    held: int = 64
    """Images of the stream that every candidate is shown, and that a shift is told by, at least."""
    mixed: float = 0.5
    """How mixed their classes must look."""
    source_mixed: float = 0.25
    """Or how mixed to the source model, which no expert can mislead. Sorted images look up to 0.33 so to it, 0.09 in
    the middle (fashion-vit at severity 4, where 0.15 does harm to sorted streams and 0.35 gains less on mixed ones)."""
    finals: int = 2
    """How often the best six are compared again, on other images: 64 tell candidates apart that are far apart."""
    memory: float = 2000.0
    """Images that the domain's signature is that of, at most."""
    shift: float = 0.1
    """Distance of signatures that is a shift: CoLA's without BatchNorm. Its 0.2 with BatchNorm missed four of fourteen
    changes of domain, over portions of 64 images; within a domain no distance was above 0.03."""
    rest: int = 2000
    """Images of a domain after which a settled device takes its moments as they are, and folds the norm layers: as many
    as are remembered."""
    wake: float = 0.01
    """Distance of the running signature from the domain's that ends its rest, long before it is a shift."""
    home: float = 0.002
    """Distance from the source's own signature within which there is nothing to adapt to. 1,000 clean images are nearer
    (ResNet-32 and fashion-bn: 0.0017 at most). It cannot be wider: jpeg looks much like clean images do."""
    similarity: bool = True
    """Whether the first mixture, and who is tried first, goes by similarity."""
    probe: bool = True
    """Whether there is a race."""
    eager: bool = True
    """Whether half of the candidates of a new domain are tried at once, by up to eight further passes: until then it is
    a first mixture that nothing has tested, and that whoever copies a signature has a part in. The others wait until
    more is known of the moments."""
    scale: bool = True
    """Whether multiples of the members' mean are tried: experts are rarely trained to the end, and what they share
    points further."""
    moments: bool = True
    """Whether BatchNorm normalises with merged moments that follow the stream, instead of with the batch's own."""
    refine: bool = True
    """Whether steps are taken after the race, on long streams."""
    patience: int = 4000
    """Images of a domain before the first step: on shorter streams it would not pay."""
    align: bool = True
    """Whether features are aligned where there is no BatchNorm."""

    def __post_init__(self) -> None:
        if not 1e-6 <= self.temperature < np.inf:
            raise MergettaError(f"temperature must be at least 1e-6, not {self.temperature}.")
        if not 0 <= self.caution < np.inf:
            raise MergettaError(f"caution must not be negative, not {self.caution}.")
        if not (self.shift > 0 and self.wake > 0 and self.memory > 0 and 0 <= self.home < np.inf):
            raise MergettaError("shift, wake and memory must be positive, and home must be finite and not negative.")
        if not all(0 <= share <= 1 for share in (self.mean, self.mixed, self.source_mixed)):
            raise MergettaError("mean, mixed and source_mixed must lie between 0 and 1.")
        for name, least in (("held", 1), ("rest", 1), ("finals", 0), ("patience", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise MergettaError(f"{name} must be a whole number of at least {least}, not {value}.")


class RaceMerge(Adapter):
    """θ = θ₀ + Σ w_m τ_m: one weight per member of the bundle. (The source model has one too, and nothing to merge.)

    - **Candidates**: the first mixture (by similarity of signatures, as CoLA has it, and a quarter the members' mean),
      twice and four times the members' mean, each member, the source model. Nobody gains by being many.
    - **Race**: all are shown the same images of the stream, the best then others; w is the softmax of their scores over
      them (information maximisation: sure of each image, varied over all). Classes that come one by one would mislead,
      so images are shown only if they look mixed; until then it is the first mixture. On long streams, steps follow.
    - **Moments**: BatchNorm normalises with the mixture's, moved to where the stream says they are, as far as it can be
      believed: batches of any size and classes in any order are treated alike. Without BatchNorm, and if `source` is
      given, the classifier's input is aligned in this way.
    - **Rest**: when settled, a plain model with norm layers folded into the convolutions, until the signature moves a
      little; then moments follow the stream again. When it jumps, over at least 64 images, all starts anew. Within a
      small distance of the source's own signature the source model predicts as it is.

    Parameters
    ----------
    runtime
        The model.
    bundle
        A bundle with members that starts from this model.
    source
        Mean and deviation of the classifier's input on clean images (`measure_source`), without BatchNorm.
    settings, options
        All constants, and single fields of them.
    """

    Settings = RaceSettings

    def __init__(
        self,
        runtime: Runtime,
        bundle: Bundle,
        source: Sequence[Vector] | None = None,
        settings: RaceSettings | None = None,
        **options: Any,
    ) -> None:
        super().__init__(runtime)
        self.settings = replace(settings or RaceSettings(), **options)
        self.source = source if self.settings.align else None
        self._take(bundle)
        self.reset()

    def _take(self, bundle: Bundle, channels: int | None = None) -> None:
        """Use a bundle that fits, for signatures of so many channels; one that does not changes nothing."""
        check_bundle(self.runtime, bundle)
        candidates = Candidates(self.runtime, bundle, self.settings.mean, self.settings.similarity, self.settings.scale)
        candidates.check(channels)
        self.mixture = Mixture(self.runtime, bundle, self.settings.moments, self.source)
        self.bundle, self.normalise, self.candidates = bundle, self.mixture.normalise, candidates

    def reset(self) -> None:
        self.visit = Visit(self.settings.shift, self.settings.held, self.settings.memory)
        self.fallbacks = 0
        self._begin()

    def _begin(self, home: bool = False) -> None:
        """Nothing is known of the domain, unless it is the source's own."""
        self.normalise.clear()
        self._folded: Predict | None = None
        self.home = home
        """Whether the stream is what the source model was made for."""
        self.carried: Vector | None = None
        """Weights to start with instead of by similarity: what another bundle amounted to."""
        self.race = self._race([self.candidates.mean])
        self.refinement = Refinement(self.bundle, self.runtime.classes, self.settings.mixed)

    def _race(self, candidates: Sequence[Vector] | None = None, trials: Trials | None = None) -> Race:
        """A new one, of all candidates as they are known by now, on images of its own unless some are held already."""
        chosen, signature = self.settings, self.visit.signature if self.visit.count else None
        trials = trials or Trials(chosen.held, chosen.mixed, self.runtime.classes, chosen.eager, chosen.source_mixed)
        far, entrants = self.candidates.lengths, candidates or self.candidates.ordered(signature, self.carried)
        return Race(trials, entrants, lambda tried: chosen.caution * far(tried), chosen.temperature, chosen.finals)

    @property
    def weights(self) -> Vector:
        """Of each member, and of the source model at the end."""
        return np.eye(self.candidates.size)[-1] if self.home else self.race.weights

    @property
    def changes(self) -> int:
        return self.visit.shifts

    @property
    def settled(self) -> bool:
        """Whether there is nothing left to try."""
        return not self.settings.probe or self.race.over or self.home

    def status(self) -> Status:
        return Status(
            phase=ADAPTING if not self.settled or self.refining else SETTLED,
            steps=self.race.tried + self.refinement.steps,
            moved=float(np.linalg.norm(self.refinement.point)),
            shifts=self.visit.shifts,
            fallbacks=self.fallbacks,
            normalises="what the source model was trained with" if self.home else self.normalise.describe(),
            weights=named(self.candidates.names, self.weights),
        )

    def predict(self, images: Array, adapt: bool = True) -> Array:
        """Logits of a batch; `adapt=False` only predicts."""
        output, p = self._merge(images, learn=adapt and self.visit.channels is not None)
        if adapt and self._follow(to_numpy(output.signature), p):
            output, p = self._merge(images, learn=True)
        broken = not np.isfinite(p).all()
        if broken:
            self.fallbacks += adapt
            output, p = answer(self.runtime(images, given=1.0))
        if adapt and np.isfinite(p).all() and self._improve(to_numpy(images), to_numpy(output.logits), p, broken):
            winners, p = self._merge(images, learn=False)
            output = winners if np.isfinite(p).all() else output
        return self._shown(output)

    def _improve(self, images: NDArray[Any], logits: NDArray[Any], p: NDArray[Any], broken: bool) -> bool:
        """First the race, then steps from there. True if what has answered turns out to be worse than the source."""
        untested = not (self.race.begun or broken)
        if not self.settled:
            if (held := self.race.run(images, p, self.mixture.tried)) is not None:
                self.mixture.begin(held, self.weights)
        elif self.refining and not broken:
            self.refinement.run(images, logits, *self.mixture.moving(self.weights, images), self.normalise.moments)
            if self.refinement.over and self.refinement.steps:
                self.visit.seen.clear()  # moments are to be those of where it ends, before it rests
                self._folded = None
        return untested and self.race.lost

    @property
    def refining(self) -> bool:
        """Whether a domain is known well enough to take steps in it, and there are steps left."""
        wanted = self.settings.refine and self.settings.probe and not self.home and not self.refinement.over
        return wanted and self.settled and self.visit.images > self.settings.patience

    @property
    def resting(self) -> bool:
        """Whether a domain is known so well that the model is plain until it changes."""
        known = self.visit.count if self.home else min(self.visit.count, self.normalise.followed)
        return self.settled and known >= self.settings.rest and not self.refining

    def _merge(self, images: Array, learn: bool) -> Answer:
        """What the mixture says, or the source model at home."""
        if self.home or self.resting:
            if self._folded is None:
                self._folded = self.mixture.folded(self.weights, self.refinement.moved(), self.home)
            return answer(self._folded(images))
        if self.refining or self.refinement.steps:
            return answer(self.mixture(images, self.weights, learn, self.refinement.moved()))
        return answer(self.mixture.follow(images, self.weights, learn))

    def look(self, images: Array) -> Array:
        return self.predict(images, adapt=False)

    def _follow(self, signature: NDArray[Any], p: NDArray[Any]) -> bool:
        """Where the stream is: elsewhere, at home, or stirring. True if the batch is the first one of a domain."""
        self.candidates.check(signature.shape[1])
        if begins := self.visit.begins(signature, len(p), predicted(p)):
            self._begin()
        if self.resting and not self.home and self.visit.drift > self.settings.wake:
            self.visit.seen.clear()
            self.normalise.look_again()
            self._folded = None
        if self.home or not self.resting:
            self.visit.learn(signature, len(p))
        near = self.visit.is_near(self.runtime.signature, self.settings.home * (LEAVE if self.home else 1))
        if changed := near != self.home:
            self._begin(near)
        known = changed or self.visit.images.bit_length() > (self.visit.images - len(p)).bit_length()  # twice as well
        if known and not (self.home or self.resting or self.race.begun):  # every other mixture opens another graph
            self.race = self._race(trials=self.race.trials)
        return begins

    def swap(self, bundle: Bundle) -> bool:
        """Go on with another bundle of the family: weights by member and the stream's moments are carried over, and the
        members race anew against what they amount to. The same bundle again changes nothing, and gives False.
        """
        if bundle.digest == self.bundle.digest:
            return False
        before, former = named(self.candidates.names, self.weights), self.normalise
        self._take(bundle, self.visit.channels)
        self._begin(self.home)
        if (former.moments is None) == (self.normalise.moments is None):
            self.normalise.restore(former.state())
        self.carried = carried(before, self.candidates.names) if self.visit.count and not self.home else None
        self.race = self._race()
        return True

    def state_dict(self) -> dict[str, Any]:
        first = {} if self.carried is None else {"carried": self.carried.copy()}
        found = {**self.race.state(), **self.refinement.state("refinement."), **self.visit.state()}
        return {"fallbacks": self.fallbacks, **first, **found, **self.normalise.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        fields = {"fallbacks": Field(low=0, whole=True), "carried": Field((self.candidates.size,), low=0)}
        found = checked(state, {name: field for name, field in fields.items() if name in state or name != "carried"})
        race = self.race.restored(state)
        visit = self.visit.restored(state, self.runtime.classes, self.candidates.channels)
        refinement = self.refinement.restored(state, "refinement.", self.normalise.moments)
        self.normalise.restore(state)
        self.race, self.visit, self.refinement = race, visit, refinement
        self.fallbacks, self.carried, self._folded = int(found["fallbacks"]), found.get("carried"), None
        self.home = visit.is_near(self.runtime.signature, self.settings.home)


Answer = tuple[Output, NDArray[np.float64]]
"""With the probabilities of the classes."""


def answer(output: Output) -> Answer:
    return output, probabilities(output)
