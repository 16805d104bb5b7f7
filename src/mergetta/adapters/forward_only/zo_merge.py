"""The paper's method on the device (Algorithm 2): predict with the merged model, tune its coefficients by ZO-SGD."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np

from mergetta.adapters.base import Adapter, Status, check_bundle, entry, part
from mergetta.adapters.forward_only.normaliser import Normalisation, Plain
from mergetta.arrays import Array, to_numpy
from mergetta.bundle import Bundle
from mergetta.errors import MergettaError
from mergetta.groups import Vector, check_groups
from mergetta.losses import Forward, Loss, create_loss
from mergetta.losses.information import information
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.base import Output, Runtime
from mergetta.seeds import rewind
from mergetta.zeroth_order.spsa import DELTA, Step, apply, probe


class ZOMerge(Adapter):
    """A batch is predicted with the coefficients as they are, then moves them by one step.

    A step costs two evaluations of the loss (of one forward pass each for entropy, up to two for ROID and DeYO,
    which look at a second view). A loss that is not finite moves nothing and is counted in `skipped`.

    Parameters
    ----------
    runtime
        The model.
    bundle
        A bundle that starts from this model.
    loss
        `roid`, `deyo`, `entropy`, or a loss.
    lr
        η, the size of a step.
    delta
        δ, how far a perturbation goes.
    clamp
        Bound of the slope.
    seed
        Of the perturbations.
    sides
        1 measures the loss at w + δz only and takes the other value from the prediction itself: one forward pass
        fewer, a noisier slope.
    keep_history
        How many steps `history` remembers (default: all).
    normalise
        What BatchNorm normalises with: by default, as in the paper, the batch's own statistics, which need large
        batches of mixed classes; `Normaliser.of_bundle` does not.
    """

    def __init__(
        self,
        runtime: Runtime,
        bundle: Bundle,
        loss: str | Loss = "roid",
        lr: float = 5e-3,
        delta: float = DELTA,
        clamp: float = 5.0,
        seed: int = 0,
        sides: int = 2,
        keep_history: int | None = None,
        normalise: Normalisation | None = None,
    ) -> None:
        super().__init__(runtime)
        check_bundle(runtime, bundle)
        for name, value in (("delta", delta), ("clamp", clamp)):
            if not 0 < value < math.inf:
                raise MergettaError(f"{name} must be finite and positive, not {value}.")
        if not 0 <= lr < math.inf:
            raise MergettaError(f"lr must be finite and not negative, not {lr}.")
        if sides not in (1, 2):
            raise MergettaError(f"sides must be 1 or 2, not {sides}.")
        self.sides = sides
        self._bits = np.random.Philox(key=0)
        self._views = np.random.Generator(self._bits)
        self.normalise = normalise or Plain(runtime)
        self.bundle = bundle
        self.loss = loss if isinstance(loss, Loss) else create_loss(loss)
        self.keep_history = keep_history
        self.lr, self.delta, self.clamp, self.seed = lr, delta, clamp, seed
        self.reset()

    def reset(self) -> None:
        self.point = self.bundle.flatten()
        """The coefficients that move, as one vector; replaced by each step, never changed in place."""
        self._merged: tuple[Vector, dict[str, Vector]] | None = None  # for which point
        self.steps = 0
        self.skipped = 0
        self.history: deque[Step] = deque(maxlen=self.keep_history)
        self.loss.reset()
        self.forget_domain()
        self.output: Output | None = None
        """Of the last prediction: its signature tells whether the domain has changed."""

    @property
    def coefficients(self) -> dict[str, Vector]:
        """The coefficients that move, by group."""
        return self.bundle.unflatten(self.point)

    @coefficients.setter
    def coefficients(self, values: Mapping[str, Vector]) -> None:
        self.point = self.bundle.flatten(values)

    def swap(self, bundle: Bundle) -> bool:
        """Go on with another bundle of the family: its initial merge, moved by what the stream has taught so far.

        Per group w = w₀' + (w − w₀) V V'ᵀ: the part of the movement that the new basis can express (for a basis that
        is not orthonormal, the nearest to it). Groups that are now frozen go back to the merge. The same bundle again
        changes nothing, and gives False; one that does not fit raises and changes nothing.
        """
        check_bundle(self.runtime, bundle)
        if bundle.digest == self.bundle.digest:
            return False
        old, before, coefficients = self.bundle, self.coefficients, {}
        for name in bundle.moving:
            coefficients[name] = bundle.coefficients[name].astype(np.float64)
            if name in before:
                movement = (before[name] - old.coefficients[name]) @ old.basis[name].astype(np.float64)
                coefficients[name] += np.linalg.lstsq(bundle.basis[name].T.astype(np.float64), movement)[0]
        check_groups(bundle.merge(coefficients), self.runtime.groups, "The new merge")
        self.bundle, self.point, self._merged = bundle, bundle.flatten(coefficients), None
        self.history.clear()  # replays from these coefficients
        return True

    def predict(self, images: Array, adapt: bool = True, learn: bool | None = None) -> Array:
        """Logits of a batch; `adapt=False` takes no step, and leaves the moments as they are unless told to `learn`."""
        self.output = self.normalise(images, self.merged(), learn=adapt if learn is None else learn)
        logits = self._shown(self.output)
        if adapt and self.point.size:
            self._step(images, logits)
            self.loss.observe(logits)
        return logits

    def look(self, images: Array) -> Array:
        return self._shown(self.normalise(images, self.merged()))

    def has_gained(self, images: Array) -> bool:
        """Whether the coefficients are at least as certain and diverse on a batch as the initial ones."""
        here, start = (
            information(softmax(to_numpy(self.normalise(images, groups).logits)))
            for groups in (self.merged(), self.bundle.merge())
        )
        return here >= start

    def restart(self) -> None:
        """Back to the initial coefficients; what was learnt of the stream stays."""
        self.point = self.bundle.flatten()
        self.history.clear()

    def forget_domain(self) -> None:
        """The domain has changed: its moments are those of another one."""
        self.normalise.clear()

    def status(self) -> Status:
        last = self.history[-1] if self.history else None
        return Status(
            steps=self.steps,
            normalises=self.normalise.describe(),
            loss=None if last is None else (last.loss_plus + last.loss_minus) / 2,
            moved=float(np.linalg.norm(self.point - self.bundle.flatten())),
        )

    def merged(self) -> dict[str, Vector]:
        """The groups of the coefficients as they are."""
        if self._merged is None or self._merged[0] is not self.point:
            self._merged = self.point, self.bundle.merge(self.point)
        return self._merged[1]

    def loss_at(self, point: Vector, images: Array) -> float:
        """The loss of other coefficients on a batch."""
        merged = self.bundle.merge(point)
        return self._evaluate(lambda images, gradient=True: self.normalise(images, merged).logits, images)

    def _evaluate(self, forward: Forward, images: Array) -> float:
        rewind(self._bits, self.seed, self.steps, "views")  # the same second view on both sides of a step
        return float(self.loss.evaluate(forward, images, self._views).value)

    def _step(self, batch: Array, logits: Array) -> None:
        def known(images: Array, gradient: bool = True) -> Array:
            return logits if images is batch else self.normalise(images, self.merged()).logits

        here = self._evaluate(known, batch) if self.sides == 1 else None
        sizes = self.bundle.sizes
        step = probe(
            lambda w: self.loss_at(w, batch), self.point, sizes, self.seed, self.steps, self.delta, self.clamp, here
        )
        self.point = apply(self.point, sizes, step, self.lr)
        self.history.append(step)
        self.skipped += step.skipped
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "steps": self.steps,
            "skipped": self.skipped,
            **{f"coefficients/{name}": w.copy() for name, w in self.coefficients.items()},
            **{f"loss/{name}": value for name, value in self.loss.state_dict().items()},
            **self.normalise.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        steps, skipped = int(entry(state, "steps")), int(entry(state, "skipped"))
        loaded: dict[str, Vector] = {}
        for name, current in self.coefficients.items():
            value = np.array(entry(state, f"coefficients/{name}"), dtype=np.float64)
            if value.shape != current.shape or not np.isfinite(value).all():
                raise MergettaError(f"This state does not fit the bundle: coefficients of group {name!r}.")
            loaded[name] = value
        if int(entry(state, "seed")) != self.seed:
            raise MergettaError(f"This state was drawn with seed {state['seed']}, not {self.seed}.")
        loss_state = part(state, "loss/")
        self.loss.check_state(loss_state)
        self.normalise.restore(state)
        self.point, self.steps, self.skipped = self.bundle.flatten(loaded), steps, skipped
        self.history.clear()  # replays from these coefficients
        self.loss.load_state_dict(loss_state)
