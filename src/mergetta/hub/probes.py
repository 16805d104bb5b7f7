"""Behavioural screening: what an expert does to predictions on images that the operator vouches for.

Task vectors tell what is unlike the others; crafted ones are made to be alike. What they do, they cannot hide as well:
the source model with a crafted task vector loses its predictions on ordinary images, and the further one goes along the
vector, the faster. So the hub goes far along each expert's, and looks. Crafted moments show at once: an expert that is
what it says predicts some view by its own moments. The hub needs the device's model and a few clean images of the
family, without labels: the source model's own predictions on them are what is expected of every view.

References
----------
Xie et al. 2019, Zeno: distributed SGD with suspicion-based fault tolerance (updates are scored by their loss on a few
trusted samples). Cao et al. 2021, FLTrust: Byzantine-robust federated learning via trust bootstrapping (a small clean
root data set instead of a majority).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergetta.data.streams import as_input
from mergetta.errors import MergettaError
from mergetta.files import decode, encode, expect_names
from mergetta.groups import GroupValues, learnable, moment_pairs
from mergetta.hub.influence import LEAST
from mergetta.hub.records import ExpertRecord
from mergetta.hub.screening import MAJORITY
from mergetta.hub.store.storage import Unavailable
from mergetta.losses.probabilities import log_softmax, softmax
from mergetta.runtimes.base import Runtime

FORMAT, VERSION = "mergetta.probes", 1
CLEAN = "clean"
COUNT, FEWEST, SEVERITY = 32, 8, 3
"""Images that are taken, how many different ones there must be, and how strongly they are corrupted."""
FAR = 3.5
"""How far the hub goes along a task vector, in usual lengths: whatever the length of an expert, its direction shows."""
RUIN, ALONE, DOUBT = 16.0, 8.0, 2.0
"""An expert is harmful if the loss there is 16 times the source model's own (8 times, while there are not yet three
contributors to compare with); never, if it is less than twice that."""
WORSE, DOUBTFUL = 3, 2
"""In between, if its logarithm is three times that of an ordinary contributor. From twice on (or 8 times the loss), a
contributor counts less. (Honest experts of one domain, severity 4: on `fashion-bn` 1.3 to 1.8 times the source model's
loss, on `fashion-vit` 1.5 to 6.4; crafted ones 3.3 to 22 and 8.3 to 16. Ordinary ones have 1.5 and 2.6.)"""
HALVED = 1 / 16
"""What a contributor counts is halved as often as the logarithm of its loss is above that by so much."""
ORDINARY = 4
"""An ordinary contributor: a quarter of all do no more harm. Three quarters would have to collude to move that upwards.
(The same limits for honest experts of 15 domains as with a third, and lower ones where half collude.)"""
SAME = 1.2
"""What was measured with another usual length holds while that has changed by no more than this factor."""
WORST = 99.0
"""The harm of an expert with which the model gives no numbers, or misleads by its own moments."""
MISLED = 2.0
"""It does, if its loss on the best of the views is this many times that of guesses. (Guesses of ten classes have 2.3
nats; honest experts of `fashion-bn` 0.2 to 1.0 at severity 4, whether their own corruption is a view or not, and 3.0 at
most at severity 5; 15 and more those with moments that were crafted to do harm.)"""


@dataclass(frozen=True, eq=False)
class ProbeFile:
    """A device's model, and views of the same clean images: as they are, and corrupted."""

    model: bytes
    views: Mapping[str, NDArray[np.uint8]]
    """(N, H, W, C) each."""

    @classmethod
    def of_images(cls, model: bytes, images: NDArray[np.uint8], corruptions: Iterable[str] | None = None) -> ProbeFile:
        """With views of all common corruptions, or of these."""
        from mergetta.data.corruptions import CORRUPTIONS, corrupt  # needs OpenCV, which a hub may not have

        names = CORRUPTIONS if corruptions is None else corruptions
        return cls(model, {CLEAN: images, **{name: corrupt(images, name, SEVERITY) for name in names}})

    def to_bytes(self) -> bytes:
        tensors = {f"view/{name}": view for name, view in self.views.items()}
        model = np.frombuffer(self.model, np.uint8)
        return encode({"model": model, **tensors}, FORMAT, VERSION, {"views": list(self.views)})

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the probe file") -> ProbeFile:
        tensors, header = decode(data, FORMAT, VERSION, source)
        names = expect_names(header, "views", source)
        if {"model", *(f"view/{name}" for name in names)} != set(tensors) or CLEAN not in names:
            raise MergettaError(f"{source} lacks its model or a view.")
        return cls(tensors["model"].tobytes(), {name: tensors[f"view/{name}"] for name in names})


def different(images: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """So many of them, spread over all, none twice."""
    first = sorted({hash(image.tobytes()): i for i, image in enumerate(images)}.values())
    if len(first) < FEWEST:
        raise MergettaError(f"Give at least {FEWEST} different images: here are {len(first)}.")
    return images[first[:: max(1, len(first) // count)][:count]]


def opened(model: bytes) -> Runtime:
    """With ONNX Runtime, whose 20 MB only a hub with probes needs."""
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

    return OnnxRuntime(model, threads=1)


class Probes:
    """Runs experts on the views. One thread, so that requests are answered meanwhile."""

    def __init__(self, file: ProbeFile, digest: str = "", runtime: Runtime | None = None) -> None:
        self.digest = digest
        self.runtime = runtime or opened(file.model)
        self.views = [as_input(view) for view in file.views.values()]
        clean = self.runtime(as_input(file.views[CLEAN]), given=1.0).logits
        self.expected = softmax(np.asarray(clean, np.float64))
        self.own = self.loss(self.runtime.groups)
        """The source model's, with the statistics of batches."""
        if not 0 < self.own < math.inf:
            raise MergettaError("The model's predictions on the probe images are no probabilities: export it again.")

    def loss(self, groups: GroupValues, keep_on: Callable[[], bool] = lambda: True) -> float:
        """Cross-entropy with the source model's predictions on the clean views, mean over views and images."""
        return float(np.mean(self.losses(groups, 0.0, keep_on)))

    def losses(
        self, groups: GroupValues, given: float, keep_on: Callable[[], bool] = lambda: True
    ) -> NDArray[np.float64]:
        """The same of each view, with the statistics of batches or, if `given` is 1, with the groups' moments."""
        found = []
        for view in self.views:
            if not keep_on():  # a large model takes long
                raise Unavailable("This hub stops.")
            logits = np.asarray(self.runtime(view, groups, given=given).logits, np.float64)
            found.append(-(self.expected * log_softmax(logits)).sum(axis=1).mean())
        return np.array(found)

    def misleads(self, expert: GroupValues, keep_on: Callable[[], bool] = lambda: True) -> bool:
        """Whether an expert with its own moments does far worse than guesses on all views."""
        base = self.runtime.groups
        if not moment_pairs(base):
            return False
        return not self.losses({**base, **expert}, 1.0, keep_on).min() <= MISLED * math.log(self.expected.shape[1])

    def harm(self, expert: GroupValues, usual: float, keep_on: Callable[[], bool] = lambda: True) -> float:
        """The logarithm of how many times the source model's loss it has, `FAR` usual lengths along its task vector."""
        base, names = self.runtime.groups, learnable(self.runtime.groups)
        if self.misleads(expert, keep_on):
            return WORST
        task = {name: np.asarray(expert[name], np.float64) - base[name] for name in names}
        length = math.sqrt(sum(float(part @ part) for part in task.values()))
        if length == 0:
            return 0.0
        far = {n: base[n] + np.float32(FAR * usual / length) * part for n, part in task.items()}
        loss = self.loss({**base, **far}, keep_on)
        return min(math.log(loss / self.own), WORST) if loss > 0 else WORST

    def knows(self, expert: ExpertRecord, usual: float) -> bool:
        """Whether it has been tried already, at about this length."""
        if expert.probes != self.digest or expert.usual is None or expert.harm is None:
            return False
        return expert.usual == usual or usual / SAME < expert.usual < usual * SAME

    def check(self) -> None:
        """Raise unless experts can do harm on these images: unless the model knows what it sees."""
        classes = self.expected.shape[1]
        if len(set(self.expected.argmax(1).tolist())) == 1:
            raise MergettaError("The model takes all of these images for one class: give images of several.")
        if self.own >= math.log(classes):
            raise MergettaError(
                f"On corrupted views of these images the model does no better than guesses (loss {self.own:.2g} of "
                f"{math.log(classes):.2g}): are they clean images of what it was trained on?"
            )


def most_harm(harms: Sequence[float]) -> tuple[float, float]:
    """What an expert may do before it counts less, and before it is kept out, given what each contributor's do."""
    if len(harms) < MAJORITY:
        return math.log(ALONE), math.log(ALONE)
    ordinary = max(math.log(DOUBT) / WORSE, sorted(harms)[len(harms) // ORDINARY])
    return min(math.log(ALONE), DOUBTFUL * ordinary), min(math.log(RUIN), WORSE * ordinary)


def harms_of(voices: Sequence[ExpertRecord]) -> dict[str, float]:
    """Of each contributor, the median of its experts'."""
    of: dict[str, list[float]] = {}
    for expert in voices:
        if expert.harm is not None:
            of.setdefault(expert.token, []).append(expert.harm)
    return {token: float(np.median(each)) for token, each in of.items()}


def harmful(voices: Sequence[ExpertRecord], suspects: Sequence[ExpertRecord]) -> dict[str, str]:
    """Reason per expert with which predictions on the probe images are far worse than with ordinary ones."""
    _, most = most_harm([*harms_of(voices).values()])
    found = {}
    for expert in suspects:
        if expert.harm is not None and expert.harm > most:
            times = f"{math.exp(expert.harm):.2g} times the source model's loss, and {math.exp(most):.2g} is the most"
            found[expert.id] = f"far along its task vector, the probe images have {times}"
            if expert.harm == WORST:
                found[expert.id] = "with it, predictions on the probe images are no numbers, or far worse than guesses"
    return found


def doubts(yardstick: Sequence[ExpertRecord], voices: Sequence[ExpertRecord]) -> dict[str, float]:
    """What contributors count whose experts do more harm than ordinary ones, but not so much that they are kept out:
    honest ones of a model that does not adapt well can do as much as crafted ones. Powers of two, so that a newcomer
    seldom changes what others count.
    """
    first, _ = most_harm([*harms_of(yardstick).values()])
    above = {token: harm - first for token, harm in harms_of(voices).items() if harm > first}
    return {token: max(LEAST, 2.0 ** -math.ceil(more / HALVED)) for token, more in above.items()}
