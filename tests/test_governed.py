"""When the paper's method adapts: it settles, wakes, goes back, and continues exactly from a state."""

from __future__ import annotations

import numpy as np
import pytest

from mergetta import Bundle, MergettaError, ZOMerge, build_bundle
from mergetta.adapters.base import ADAPTING, SETTLED
from mergetta.adapters.forward_only.normaliser import Normaliser
from mergetta.adapters.wrappers.governed import Governed, unusual

from .confidence import Confidence, each_in_turn
from .numpy_runtime import NumpyRuntime


def make_bundle(runtime: NumpyRuntime) -> Bundle:
    rng = np.random.default_rng(0)
    experts = [{n: v + 0.3 * rng.normal(size=v.shape) for n, v in runtime.groups.items()} for _ in range(4)]
    return build_bundle(runtime.groups, experts, family=runtime.family)


def governed(**options: object) -> Governed:
    runtime = NumpyRuntime()
    return Governed(ZOMerge(runtime, make_bundle(runtime), loss="entropy", lr=1e-3, delta=0.1), **options)


def domain(kind: int, batches: int, size: int = 32, seed: int = 0) -> list[np.ndarray]:
    """Streams of three kinds, whose features differ."""
    rng = np.random.default_rng(seed + 100 * kind)
    low, high = [(0.0, 1.0), (0.6, 1.0), (0.0, 0.25)][kind]
    return [rng.uniform(low, high, (size, 1, 6, 6)).astype(np.float32) for _ in range(batches)]


class TestGoverned:
    @pytest.mark.parametrize("size", [32, 100])
    def test_settles_and_wakes_at_each_change(self, size: int) -> None:
        adapter = governed(max_steps=10)
        woken: list[int] = []
        for number, images in enumerate(x for kind in (0, 1, 2, 0) for x in domain(kind, 25, size)):
            before = adapter.shifts
            adapter.predict(images)
            if adapter.shifts > before:
                woken.append(number)
            if number % 25 == 20:
                assert adapter.status().phase == SETTLED
        late = [number - change for number, change in zip(woken, (25, 50, 75), strict=True)]
        assert all(0 <= batches * size < 2 * 64 for batches in late)  # a shift is told by 64 images

    def test_no_false_wakes(self) -> None:
        adapter = governed(max_steps=6)
        for images in domain(0, 300, 16):
            adapter.predict(images)
        assert adapter.shifts <= 1  # in 300 batches

    def test_settled_costs_one_pass(self) -> None:
        adapter = governed(max_steps=3)
        images = domain(0, 1)[0]
        for _ in range(8):
            adapter.predict(images)
        assert adapter.status().phase == SETTLED
        before = adapter.adapter.runtime.forwarded
        adapter.predict(images)
        assert adapter.adapter.runtime.forwarded - before == len(images)

    def test_duty_cycle_and_budget(self) -> None:
        adapter = governed(every=3, max_steps=100, window=50)
        for images in domain(0, 9):
            adapter.predict(images)
        assert adapter.adapter.steps == 3
        adapter = governed(budget=1.5, max_steps=100, window=50)
        for images in domain(0, 60):
            adapter.predict(images)
        assert adapter.passes / adapter.images <= 1.5
        assert adapter.adapter.steps > 5

    def test_a_runaway_loss_rolls_back(self) -> None:
        adapter = governed(max_steps=100, window=50)
        stream = domain(0, 30)
        for images in stream[:6]:
            adapter.predict(images)
        adapter.losses = [0.1] * 6
        adapter.predict(stream[6])  # a loss far above 0.1
        assert adapter.fallbacks == 1
        assert adapter.status().phase == SETTLED
        bundle = adapter.adapter.bundle
        assert all(np.allclose(w, bundle.coefficients[n]) for n, w in adapter.adapter.coefficients.items())

    def test_predictions_that_are_no_numbers_are_the_source_models(self, monkeypatch: pytest.MonkeyPatch) -> None:
        adapter, (images,) = governed(), domain(0, 1)
        merged = adapter.adapter.predict
        monkeypatch.setattr(adapter.adapter, "predict", lambda *batch, **how: np.nan * merged(*batch, **how))
        np.testing.assert_array_equal(adapter.predict(images), adapter.runtime(images, given=1.0).logits)
        assert adapter.fallbacks >= 1 and adapter.status().phase == SETTLED

    def test_worse_than_the_merge_is_undone(self) -> None:
        """Coefficients ruined on purpose do not survive settling."""
        adapter = governed(max_steps=2)
        adapter.adapter.coefficients = {n: w - 50 for n, w in adapter.adapter.coefficients.items()}
        for images in domain(0, 3):
            adapter.predict(images)
        assert adapter.status().phase == SETTLED
        assert adapter.fallbacks == 1

    def test_state_continues_exactly(self) -> None:
        stream = [x for kind in (0, 1) for x in domain(kind, 8)]
        whole = governed()
        expected = [whole.predict(images) for images in stream]
        first = governed()
        for images in stream[:7]:
            first.predict(images)
        second = governed()
        second.load_state_dict(first.state_dict())
        for images, logits in zip(stream[7:], expected[7:], strict=True):
            np.testing.assert_array_equal(second.predict(images), logits)
        assert (second.shifts, second.passes, second.settled) == (whole.shifts, whole.passes, whole.settled)

    def test_bad_options_and_states(self) -> None:
        for options in ({"window": 1}, {"every": 0}, {"budget": 0.5}):
            with pytest.raises(MergettaError):
                governed(**options)
        with pytest.raises(MergettaError, match="does not fit"):
            governed().load_state_dict({})

    def test_unusual(self) -> None:
        assert not unusual(100.0, [1.0, 1.0], 0.1, 4)
        assert unusual(1.5, [1.0, 1.0, 1.0], 0.1, 4)
        assert not unusual(1.3, [1.0, 1.0, 1.0], 0.1, 4)
        assert not unusual(0.0, [1.0, 1.0, 1.0], 0.1, 4)

    def test_moments_follow_the_stream_when_settled(self) -> None:
        """A step moves coefficients; what BatchNorm normalises with costs none."""
        runtime = Confidence(batch_norm=True)
        bundle = build_bundle(runtime.groups, [{**runtime.groups, "n.weight": np.array([1.5], np.float32)}])
        normalise = Normaliser.of_bundle(runtime, bundle)
        adapter = Governed(ZOMerge(runtime, bundle, loss="entropy", delta=0.1, normalise=normalise), max_steps=3)
        for image in each_in_turn()[:60]:
            adapter.predict(image[None])
        assert adapter.status().phase == SETTLED
        assert adapter.shifts == 0
        assert normalise.moments is not None
        assert normalise.moments.stream.count == 60

    def test_starts_adapting(self) -> None:
        assert governed().status().phase == ADAPTING
