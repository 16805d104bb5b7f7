"""The suites of the package: the paper's settings per family, plans, and what is said about missing files."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from mergetta import MergettaError
from mergetta.bench.inputs import STATISTICS, clean_images, place_of, target_of, training_of
from mergetta.bench.keys import expert_key
from mergetta.bench.plan import plan_of
from mergetta.bench.runner import Part
from mergetta.bench.suite import FOLDER, MethodSettings, list_suites, load_suite, merged

from .suites import small
from .test_cli import mergetta

PAPER = {  # η, δ, ε, batch size, last blocks that do not move (ALGORITHMS.md)
    ("cifar10-c", "wrn-28-10"): (5e-3, 1.0, 1e-2, 200, 1),
    ("cifar100-c", "resnext-29-32x4d"): (5e-3, 0.25, 1e-3, 200, 1),
    ("imagenet-c", "resnet-50"): (5e-3, 0.25, 1e-2, 64, 1),
    ("imagenet-c", "vit-b-16"): (2.5e-3, 1e-4, 1e-4, 64, 3),
}
EXPERTS = {  # optimiser and learning rate of ROID and DeYO experts
    ("cifar10-c", "wrn-28-10"): (("sgd", 1e-3), ("adam", 1e-3)),
    ("cifar100-c", "resnext-29-32x4d"): (("adam", 1e-3), ("adam", 1e-3)),
    ("imagenet-c", "resnet-50"): (("sgd", 5e-4), ("sgd", 2.5e-4)),
    ("imagenet-c", "vit-b-16"): (("sgd", 1e-3), ("sgd", 2.5e-4)),
}


CORRUPTION_SUITES = [name for name in list_suites() if "styles" not in name]


@pytest.mark.parametrize("name", CORRUPTION_SUITES)
def test_every_suite_is_valid(name: str) -> None:
    suite = load_suite(name)
    assert {"source", "bn-stats", "t3a", "cola", "merge", "zo-merge", "tent", "deyo", "roid"} <= suite.methods.keys()
    assert set(suite.experts) == {"roid", "deyo"}


@pytest.mark.parametrize(("name", "family"), PAPER)
def test_the_paper_s_presets(name: str, family: str) -> None:
    suite = load_suite(name, family)
    method = suite.methods["zo-merge"]
    assert method.bundle is not None
    found = (method.options["lr"], method.options["delta"], method.bundle.tolerance, suite.batch_size)
    assert (*found, method.bundle.frozen_blocks) == PAPER[name, family]
    assert (method.bundle.keep, method.bundle.max_rank, method.bundle.initial) == (0.4, 5, 0.1)
    assert method.options["clamp"] == 5
    assert method.bundle == suite.methods["merge"].bundle
    for expert, (optimizer, lr) in zip(("roid", "deyo"), EXPERTS[name, family], strict=True):
        assert (suite.experts[expert]["optimizer"], suite.experts[expert]["lr"]) == (optimizer, lr)


def test_another_family_takes_the_general_settings() -> None:
    suite = load_suite("cifar10-c", "resnet-20", Path("weights.th"), Path("data"))
    assert (suite.family, suite.checkpoint, suite.folder) == ("resnet-20", Path("weights.th"), Path("data"))
    assert suite.methods == load_suite("cifar10-c").methods


def test_merged() -> None:
    before = {"a": {"b": 1, "c": 2}, "d": 3}
    assert merged(before, {"a": {"c": 4}, "d": {"e": 5}}) == {"a": {"b": 1, "c": 4}, "d": {"e": 5}}
    assert before == {"a": {"b": 1, "c": 2}, "d": 3}


def test_a_plan(tmp_path: Path) -> None:
    suite = load_suite("fashion-bn").restricted(["bn-stats", "merge"], samples=40)
    plan = plan_of(Part(suite, "roid", ["fog"], [0, 1]), tmp_path)
    text = "\n".join(plan.lines())
    assert not plan.missing
    assert f"4 results: 0 are in {tmp_path}, 4 are to be measured, 0 come with experts" in text
    assert "experts to make: 28" in text
    assert "core-hours" in text


def test_a_plan_tells_what_comes_with_experts_from_what_is_known(tmp_path: Path) -> None:
    """ROID itself on fog makes the expert of fog, which merge on snow needs."""
    suite = load_suite("fashion-bn").restricted(["roid", "merge"], samples=40)
    lines = plan_of(Part(suite, "roid", ["fog", "snow"], [0]), tmp_path).lines()
    assert f"4 results: 0 are in {tmp_path}, 2 are to be measured, 2 come with experts" in lines


def test_experts_from_other_images_by_the_command_line(tmp_path: Path) -> None:
    command = ["bench", "fashion-bn", "--samples", "20", "--expert-samples", "30", "--methods", "cola", "--dry-run"]
    result = mergetta(*command, "--cache", "cache", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "experts by roid from 30 other images" in " ".join(result.stdout.split())


def test_dry_run_says_what_is_missing_and_where_to_get_it(tmp_path: Path) -> None:
    result = mergetta("bench", "cifar10-c", "--data", "nowhere", "--dry-run", cwd=tmp_path)
    assert result.returncode == 2
    assert "There is no folder nowhere" in result.stdout
    assert "zenodo.org" in result.stdout
    assert "wrn-28-10" in result.stdout


def test_a_published_set_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small CIFAR-10-C in the published layout, and a family of one's own, through `mergetta bench`."""
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    rng = np.random.default_rng(0)
    suite = load_suite("cifar10-c")
    for domain in suite.domains:
        np.save(folder / f"{domain}.npy", rng.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", np.arange(50) % 10)
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = ["bench", "cifar10-c", "--family", "mine:family", "--data", folder, "--samples", "8", "--seeds", "1"]
    options = ["--methods", "bn-stats,cola,merge", "--domains", "fog", "--json", "out.json", "--cache", "cache"]
    first = mergetta(*command, *options, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "as published" in first.stdout
    again = mergetta(*command, *options, cwd=tmp_path)
    assert again.returncode == 0
    assert (tmp_path / "out.json").is_file()


OWN = """
import torch
from mergetta.models.family import Family, Preprocessing
from mergetta.models.small_resnet import SmallResNet


def family():
    torch.manual_seed(0)
    model = SmallResNet(channels=3, classes=10).eval()
    return Family("mine", model, Preprocessing((0.5,) * 3, (0.5,) * 3, 32), tuple("abcdefghij"), "small-resnet", {})
"""


def style_folder(tmp_path: Path, paintings: int) -> Path:
    from PIL import Image

    folder = tmp_path / "cifar10"
    (folder / "styles").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(paintings):
        pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "styles" / f"painting-{number:02}.png")
    np.savez(folder / "cifar10_test.npz", x=rng.integers(0, 256, (30, 32, 32, 3), dtype=np.uint8), y=np.arange(30) % 10)
    return folder


@pytest.mark.parametrize(("styles", "initial"), [(10, 0.35), (12, 0.35), (20, 0.15), (3, 0.35)])
def test_styles(tmp_path: Path, styles: int, initial: float) -> None:
    from mergetta.bench.inputs import source_of, target_of

    suite = load_suite("cifar10-styles", folder=style_folder(tmp_path, 20), styles=styles)
    assert len(suite.domains) == styles
    assert {m.bundle.initial for m in suite.methods.values() if m.bundle} == {initial}
    small = suite.model_copy(update={"samples": 6})
    domain = target_of(small, suite.domains[0])
    assert np.asarray(domain.images).shape == (6, 32, 32, 3)
    assert not np.array_equal(domain.images, target_of(small, suite.domains[1]).images)
    assert "styles of 20 paintings" in source_of(suite).description
    with pytest.raises(MergettaError, match="20 styles here"):
        load_suite("cifar10-styles", folder=suite.folder, styles=21)
    with pytest.raises(MergettaError, match="has no styles"):
        load_suite("cifar10-c", folder=suite.folder, styles=3)


def test_the_source_model_s_place_in_cola_s_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signature from clean images, where there are any."""
    from mergetta.bench.inputs import family_of

    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = style_folder(tmp_path, 2)
    suite = load_suite("cifar10-c", "mine:family", folder=folder)
    found = family_of(suite).signature
    assert found is not None and found.shape == (2, 16)
    (folder / "cifar10_test.npz").rename(folder / "elsewhere.npz")
    for name in ("fog", "labels"):
        np.save(folder / f"{name}.npy", np.zeros((5, 32, 32, 3), np.uint8) if name == "fog" else np.zeros(5, np.int64))
    moved = folder.rename(tmp_path / "published")
    assert family_of(load_suite("cifar10-c", "mine:family", folder=moved)).signature is None


def test_experts_from_other_images(tmp_path: Path) -> None:
    from mergetta.bench.inputs import target_of, training_of

    suite = load_suite("fashion-bn").model_copy(update={"samples": 20, "expert_samples": 30})
    target, training = target_of(suite, "fog"), training_of(suite, "fog")
    assert (len(target.labels), len(training.labels)) == (20, 30)
    assert not {i.tobytes() for i in target.images} & {i.tobytes() for i in training.images}  # type: ignore[attr-defined]


def test_wrong_severity_or_too_many_samples(tmp_path: Path) -> None:
    suite = load_suite("fashion-bn").model_copy(update={"samples": 10**6})
    from mergetta.bench.inputs import target_of

    with pytest.raises(MergettaError, match="fog has 4,000 images, not 1,000,000"):
        target_of(suite, "fog")


def test_forward_only_methods_on_the_model_of_a_device() -> None:
    suite = load_suite("fashion-vit").on("int8").restricted(methods=["all"])
    moved = {name for name, settings in suite.methods.items() if settings.runtime == "int8"}
    assert {"source", "cola", "race-merge", "zoa"} <= moved
    assert not moved & {"roid", "tent", "foa", "fozo"}  # gradients, prompts: no such model has them
    assert load_suite("fashion-bn").on("onnx").peers["adabn"].runtime == "onnx"  # moments are an output of it
    with pytest.raises(ValueError, match="PyTorch's runtime"):
        MethodSettings(adapter="foa", runtime="int8")
    with pytest.raises(MergettaError, match="onnx or int8"):
        load_suite("fashion-vit").on("tflite")


VALID = "family: f\ndata: fashion\nsamples: 1\nbatch_size: 1\nexperts: {}\nmethods: {x: {adapter: source}}\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("family: fashion-bn", "is not a valid suite"),
        ("family: [", "is not a valid suite"),
        ("- 1", "is not a valid suite"),
        (
            "family: f\ndata: fashion\nsamples: 1\nbatch_size: 1\nexperts: {}\nmethods: {x: {adapter: magic}}",
            "no adapter",
        ),
        (VALID + "speed: 3", r"is not a valid suite: speed: Extra inputs are not permitted\.$"),
        ("family: f\nsamples: 0", r"data: Field required; samples: Input should be greater than 0; .* more\)\.$"),
        (VALID.replace("experts: {}", "experts: {cola: {}}"), "forward-only"),
        (VALID.replace("experts: {}", "experts: {magic: {}}"), "no adapter 'magic'"),
        (VALID.replace("{adapter: source}", "{adapter: source, options: {lr: 1}}"), "no option 'lr'"),
        (VALID.replace("{adapter: source}", "{adapter: merge}"), "needs its bundle settings"),
        (VALID + "domains: [rain]", "no domain 'rain'"),
    ],
)
def test_bad_suites(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(MergettaError, match=sentence):
        load_suite(str(tmp_path / "s.yaml"))


@pytest.mark.parametrize("name", ["fashion-bn", "fashion-vit", "cifar10-c", "cifar100-c", "imagenet-c"])
def test_peers_are_compared_only_when_asked_for(name: str) -> None:
    suite = load_suite(name)
    assert "eata" in suite.peers
    assert "eata" not in suite.restricted().methods
    assert list(suite.restricted(methods=["source", "eata"]).methods) == ["source", "eata"]
    assert suite.restricted(methods=["all"]).methods == {**suite.methods, **suite.peers}


def test_bad_choices() -> None:
    with pytest.raises(MergettaError, match="no suite 'mnist'"):
        load_suite("mnist")
    with pytest.raises(MergettaError, match="no method 'magic'"):
        small().restricted(methods=["magic"])
    with pytest.raises(MergettaError, match="no domain 'rain'"):
        small().restricted(domains=["rain"])
    with pytest.raises(MergettaError, match="no experts by 'tent'"):
        expert_key(small(), "tent", "fog", 0)


@pytest.mark.parametrize(
    ("family", "images", "like"),
    [
        ("efficientnet-lite0", 500, "resnet-50"),
        ("resnet-50-keras", 500, "resnet-50"),
        ("mobilenet-v2", 1000, "resnet-50"),
        ("deit-tiny", 1000, "vit-b-16"),
    ],
)
def test_imagenet_s_3000_images_give_targets_and_experts_of_their_own(family: str, images: int, like: str) -> None:
    """With the paper's settings for the family that is nearest; styles have as many images."""
    found, published = load_suite("imagenet-c", family), load_suite("imagenet-c", like)
    assert (found.samples, found.expert_samples) == (images, images)
    assert (found.methods, found.experts, found.batch_size) == (published.methods, published.experts, 64)
    assert found.samples + (found.expert_samples or 0) + STATISTICS <= 3000
    styles = yaml.safe_load((FOLDER / "imagenet-styles.yaml").read_text())["families"]
    assert (styles[family]["samples"], styles[family]["expert_samples"]) == (images, images)
    assert styles[family].get("experts") == styles[like].get("experts") if like in styles else like == "resnet-50"


def test_targets_experts_and_clean_images_are_disjoint(tmp_path: Path) -> None:
    """Of an archive as ImageNet's, told apart by their labels: each image has a class of its own."""
    buffers = []
    for number in range(12):
        buffer = io.BytesIO()
        Image.fromarray(np.full((224, 224, 3), 20 * number, np.uint8)).save(buffer, "JPEG")
        buffers.append(buffer.getvalue())
    offsets = np.cumsum([0, *map(len, buffers)])
    jpeg = np.frombuffer(b"".join(buffers), np.uint8)
    np.savez(tmp_path / "imagenet_val3k_224.npz", jpeg=jpeg, off=offsets, y=np.arange(12))
    suite = load_suite("imagenet-c", "mobilenet-v2", folder=tmp_path).changed(samples=5, expert_samples=4)
    clean = clean_images(place_of(suite), 3)
    assert clean is not None
    for domain in ("fog", "contrast"):
        parts = [target_of(suite, domain), training_of(suite, domain), clean]
        assert [len(part.labels) for part in parts] == [5, 4, 3]
        assert len({int(label) for part in parts for label in part.labels}) == 12
