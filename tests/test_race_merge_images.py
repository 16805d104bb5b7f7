"""What race-merge promises on real images, however they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from mergetta import Expert, OnnxRuntime, TorchRuntime, load_family
from mergetta.adapters.backprop.expert_training import train_expert
from mergetta.adapters.forward_only.normaliser import Aligner
from mergetta.adapters.forward_only.race_merge import RaceMerge
from mergetta.adapters.forward_only.refinement import Refinement, RefineSettings
from mergetta.adapters.forward_only.source_features import measure_source
from mergetta.adapters.wrappers.mirrored import Mirrored
from mergetta.bench.inputs import Place, clean_images, load_domain
from mergetta.losses.probabilities import softmax
from mergetta.runtimes.base import Runtime
from tests.confidence import CLASSES, Confidence, expert, race_merge


def images_of(name: str, count: int, start: int = 0, severity: int = 5) -> tuple[np.ndarray, np.ndarray]:
    return next(iter(load_domain(Place("fashion"), name, severity, start, count).stream(0, count)))


def clean(count: int) -> tuple[np.ndarray, np.ndarray]:
    domain = clean_images(Place("fashion"), count)
    assert domain is not None
    return next(iter(domain.stream(0, count)))


def sorted_by_class(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(labels, kind="stable")
    return images[order], labels[order]


def batches(images: np.ndarray, size: int) -> Iterator[np.ndarray]:
    return (images[start : start + size] for start in range(0, len(images), size))


def error(adapter: RaceMerge, images: np.ndarray, labels: np.ndarray, size: int) -> float:
    """With the mirrored view, as these images mean the same in it."""
    viewed = Mirrored(adapter)
    viewed.reset()
    predicted = np.concatenate([viewed.predict(batch) for batch in batches(images, size)]).argmax(axis=1)
    return float(np.mean(predicted != labels))


def source_error(runtime: Runtime, images: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(runtime(images, given=1.0).logits.argmax(axis=1) != labels))


def experts_of(runtime: TorchRuntime) -> list[Expert]:
    """Of three domains, from 400 images that no test shows."""
    return [
        train_expert(runtime, batches(images_of(name, 400, start=1000)[0], 100), domain=name)
        for name in ("fog", "defocus_blur", "impulse_noise")
    ]


@pytest.fixture(scope="module")
def subject() -> RaceMerge:
    runtime = TorchRuntime(load_family("fashion-bn"))
    return race_merge(runtime, experts_of(runtime))


@pytest.fixture(scope="module")
def experts(subject: RaceMerge) -> list[Expert]:
    return experts_of(subject.runtime)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def device(exported: Callable[[str], Path]) -> OnnxRuntime:
    return OnnxRuntime(exported("fashion-bn").read_bytes(), threads=1)


class TestOnRealImages:
    @pytest.mark.parametrize(("size", "count"), [(1, 200), (16, 400), (200, 400)])
    def test_one_class_after_the_other(self, size: int, count: int, subject: RaceMerge) -> None:
        images, labels = images_of("gaussian_noise", count)
        source, mixed = source_error(subject.runtime, images, labels), error(subject, images, labels, size)
        in_order = error(subject, *sorted_by_class(images, labels), size)
        assert subject.visit.shifts == 0 and not subject.race.over  # hardly a candidate is shown what is of one class
        assert source > 0.7
        assert in_order < source - 0.3
        assert in_order <= mixed + 0.12

    @pytest.mark.parametrize(
        ("size", "count"),
        [
            (1, 200),
            (16, 400),
            (200, 200),
        ],
    )
    def test_candidates_are_shown_mixed_images(self, size: int, count: int, subject: RaceMerge) -> None:
        error(subject, *images_of("gaussian_noise", count), size)
        assert subject.race.trials.count > 0

    @pytest.mark.parametrize("size", [8, 100, 200])
    @pytest.mark.parametrize("order", ["mixed", "sorted"])
    def test_clean_images_lose_nothing(self, size: int, order: str, subject: RaceMerge) -> None:
        images, labels = clean(600) if order == "mixed" else sorted_by_class(*clean(600))
        assert error(subject, images, labels, size) <= source_error(subject.runtime, images, labels) + 0.015

    def test_clean_single_frames_lose_nothing(self, subject: RaceMerge) -> None:
        images, labels = clean(150)
        assert error(subject, images, labels, 1) <= source_error(subject.runtime, images, labels) + 0.015

    @pytest.mark.parametrize("order", ["mixed", "sorted"])
    @pytest.mark.parametrize("size", [16, 200])
    def test_a_source_model_that_sees_one_class_is_adapted(self, size: int, order: str, subject: RaceMerge) -> None:
        images, labels = images_of("contrast", 400)
        predicted = subject.runtime(images, given=1.0).logits.argmax(axis=1)
        assert np.bincount(predicted).max() > 0.7 * len(labels)
        assert source_error(subject.runtime, images, labels) > 0.8
        if order == "sorted":
            images, labels = sorted_by_class(images, labels)
        assert error(subject, images, labels, size) < 0.65

    def test_a_change_of_domain_starts_anew_a_change_of_class_does_not(
        self, subject: RaceMerge, experts: list[Expert]
    ) -> None:
        subject.reset()
        for batch in batches(sorted_by_class(*images_of("contrast", 320))[0], 64):
            subject.predict(batch)
        assert subject.visit.shifts == 0
        fresh = race_merge(subject.runtime, experts)
        for batch in batches(images_of("gaussian_noise", 192)[0], 64):
            np.testing.assert_allclose(softmax(subject.predict(batch)), softmax(fresh.predict(batch)), atol=1e-4)
        assert subject.visit.shifts == 1
        assert fresh.visit.shifts == 0

    @pytest.mark.parametrize("name", ["fog", "frost"])
    def test_a_change_is_found_although_predictions_collapse_with_it(self, name: str, subject: RaceMerge) -> None:
        """What is known of noise makes most of these images one class, as if classes came one by one."""
        subject.reset()
        for start in ("gaussian_noise", name):
            for batch in batches(images_of(start, 192)[0], 64):
                subject.predict(batch)
        assert subject.visit.shifts == 1

    def test_with_frozen_moments_nothing_depends_on_the_batch(self, subject: RaceMerge) -> None:
        images, _ = images_of("gaussian_noise", 200)
        error(subject, images, np.zeros(200, int), 50)
        together = subject.look(images[:20])
        alone = np.concatenate([subject.look(image[None]) for image in images[:20]])
        np.testing.assert_allclose(together, alone, atol=1e-4)

    def test_the_order_of_groups_in_a_file_changes_nothing(
        self, subject: RaceMerge, experts: list[Expert], tmp_path: Path
    ) -> None:
        loaded = []
        for i, each in enumerate(experts):
            turned = Expert(
                dict(reversed(list(each.groups.items()))),
                each.family,
                each.domain,
                each.signature,
                each.features,
                each.spread,
                each.provenance,
            )
            (turned if i % 2 else each).save(tmp_path / "e")
            loaded.append(turned if i == 2 else Expert.load(tmp_path / "e"))
        orders = {tuple(each.groups) for each in loaded}
        assert orders != {tuple(subject.runtime.groups)}
        other = race_merge(subject.runtime, loaded)
        expected = race_merge(subject.runtime, experts)
        one, two = (each.normalise.moments.variances for each in (other, expected))  # type: ignore[union-attr]
        assert one is not None and two is not None
        np.testing.assert_array_equal(one.domains, two.domains)
        for batch in batches(images_of("gaussian_noise", 192)[0], 64):
            np.testing.assert_allclose(other.predict(batch), expected.predict(batch), atol=1e-4)

    def test_onnx_gives_the_same_numbers(self, subject: RaceMerge, experts: list[Expert], device: OnnxRuntime) -> None:
        other = race_merge(device, experts)
        subject.reset()
        images, _ = images_of("gaussian_noise", 150)
        for batch in batches(images, 50):
            np.testing.assert_allclose(softmax(subject.predict(batch)), softmax(other.predict(batch)), atol=2e-3)
        together = other.look(images[:20])
        alone = np.concatenate([other.look(image[None]) for image in images[:20]])
        np.testing.assert_allclose(together, alone, atol=1e-4)

    def test_onnx_takes_the_same_steps(self, subject: RaceMerge, device: OnnxRuntime) -> None:
        """The same perturbations of the same images teach the same Jacobian, and lead to the same point."""
        images, _ = images_of("gaussian_noise", 256)
        points = []
        for runtime in (subject.runtime, device):
            start = subject.bundle.mixture(subject.candidates.mean[:-1])
            steps = Refinement(subject.bundle, 10, 0.0, RefineSettings(warm=1, block=100))

            def forward(
                part: np.ndarray,
                moved: dict[str, np.ndarray],
                runtime: Runtime = runtime,
                start: dict[str, np.ndarray] = start,
            ) -> np.ndarray:
                groups = {**start, **{name: start[name] + change for name, change in moved.items()}}
                return np.asarray(runtime(part, groups, given=1.0).logits)

            for batch in batches(images, 64):
                steps.run(batch, forward(batch, steps.moved()), forward, forward)
            points.append(steps.point)
        assert np.abs(points[0]).max() > 0.05
        np.testing.assert_allclose(points[1], points[0], atol=0.02)

    @pytest.mark.parametrize("size", [1, 50])
    def test_without_batch_norm(self, size: int) -> None:
        """One class after the other, which alignment to all classes would lead astray; and mixed."""
        runtime = TorchRuntime(load_family("fashion-vit"))
        source = measure_source(runtime, batches(clean(500)[0], 100))
        fog = train_expert(runtime, batches(images_of("fog", 200, start=1000)[0], 50), domain="fog")
        adapter = race_merge(runtime, [fog], source=source)
        assert isinstance(adapter.normalise, Aligner)
        images, labels = images_of("jpeg_compression", 100)
        before = source_error(runtime, images, labels)
        assert error(adapter, images, labels, size) <= before + 0.02
        assert error(adapter, *sorted_by_class(images, labels), size) <= before + 0.02


def mixed_images(size: int, count: int = 64) -> np.ndarray:
    """Each class in turn, of so many pixels on a side."""
    images = np.random.default_rng(0).random((count, 1, size, size), np.float32) / 8
    images[np.arange(count), 0, 0, np.arange(count) % CLASSES] += 0.8
    return images


@pytest.mark.parametrize(("size", "own"), [(8, True), (96, False)])
def test_large_images_are_never_normalised_together(size: int, own: bool) -> None:
    """64 of them in one pass would take several times the memory of a plain model, and so would 16."""
    runtime = Confidence(batch_norm=True)
    adapter = race_merge(runtime, [expert(2.0, batch_norm=True), expert(0.5, batch_norm=True)], patience=100, rest=9999)
    images = mixed_images(size)
    for _ in range(40):
        for frame in images:
            adapter.predict(frame[None])
    assert adapter.race.over
    assert (0.0 in runtime.given) == own  # a pass by the images' own statistics
    assert (adapter.refinement.steps > 0) == own  # no duel, no steps
    assert adapter.refinement.over != own and adapter.refining == own
    assert own or adapter.visit.count >= 2000  # and it did not forget the domain for steps that it does not take


def test_large_images_that_come_together_are_normalised_by_their_own_statistics() -> None:
    """As a plain model would, once the stream is known to be mixed; single frames and few are not."""
    runtime = Confidence(batch_norm=True)
    adapter = race_merge(runtime, [expert(2.0, batch_norm=True), expert(0.5, batch_norm=True)])
    images = mixed_images(96)
    adapter.predict(images[:15])
    assert 0.0 not in runtime.given and not adapter.normalise.moments.is_trusted
    adapter.predict(images)
    assert adapter.race.begun and adapter.normalise.moments.is_trusted
    assert 0.0 in runtime.given  # candidates are compared as they come too
    for count, by_themselves in ((32, True), (15, False), (1, False)):
        for learn in (True, False):
            runtime.given.clear()
            adapter.mixture.follow(images[:count], adapter.weights, learn)
            assert (runtime.given[-1] == 0.0) == by_themselves
    same = np.repeat(images[:1], 32, axis=0)  # all of one class, whatever they are normalised by
    runtime.given.clear()
    adapter.mixture.follow(same, adapter.weights)
    assert runtime.given[-1] > 0
    adapter.reset()
    assert not adapter.normalise.moments.is_trusted
