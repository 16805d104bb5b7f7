"""Datasets as they lie on people's disks: each layout written small and read back, lazily, with clear errors."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergetta import MergettaError
from mergetta.data.cifar_c import CifarC
from mergetta.data.corruptions import CORRUPTIONS, corrupt
from mergetta.data.corruptions.planes import blur_matrix, on_planes
from mergetta.data.imagenet_c import ImagenetC
from mergetta.data.images import read_image
from mergetta.data.lazy import Corrupted, ImageFiles, JpegArchive, Subset
from mergetta.data.sources import open_source
from mergetta.data.streams import Domain, as_input
from mergetta.seeds import generator

WNIDS = [f"n{i:08d}" for i in range(1000, 3000, 2)]


def noise(count: int, size: int = 32) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def jpeg(path: Path, size: tuple[int, int] = (224, 224), colour: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, 100, 200)).save(path)
    return path


def class_list(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("\n".join(f"{wnid}_thing" for wnid in WNIDS))


def linked_domain(folder: Path, per_class: int, classes: list[str] = WNIDS) -> None:
    """A domain of many images that takes no room: hard links to a few files."""
    files = [jpeg(folder.parent / f"{folder.name}-{i}.JPEG", colour=i) for i in range(20)]
    for wnid in classes:
        (folder / wnid).mkdir(parents=True)
        for i in range(per_class):
            os.link(files[i % 20], folder / wnid / f"{i:05d}.JPEG")


class Recorder:
    """Images that remember which of them were asked for."""

    def __init__(self, images: np.ndarray, broken: bool = False) -> None:
        self.images, self.broken, self.asked = images, broken, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: np.ndarray) -> np.ndarray:
        self.asked.append(index)
        if self.broken and len(self.asked) > 2:
            raise MergettaError("The third batch is broken.")
        return self.images[index]


class TestStream:
    def test_order_and_values_are_those_of_the_permutation(self) -> None:
        images = noise(23)
        domain = Domain("d", images, np.arange(23))
        order = generator(4, 0, "stream/d").permutation(23)
        batches = list(domain.stream(4, 5))
        assert [len(labels) for _, labels in batches] == [5, 5, 5, 5, 3]
        np.testing.assert_array_equal(np.concatenate([labels for _, labels in batches]), order)
        np.testing.assert_array_equal(np.concatenate([x for x, _ in batches]), as_input(images[order]))

    def test_is_at_most_one_batch_ahead_and_leaves_no_thread(self) -> None:
        before = threading.active_count()
        images = Recorder(noise(100))
        stream = Domain("d", images, np.arange(100)).stream(0, 10)
        next(stream)
        next(stream)
        time.sleep(0.05)
        assert 2 <= len(images.asked) <= 3
        stream.close()  # type: ignore[attr-defined]
        assert threading.active_count() == before
        assert len(images.asked) <= 3

    def test_errors_come_through(self) -> None:
        before = threading.active_count()
        with pytest.raises(MergettaError, match="third batch"):
            list(Domain("d", Recorder(noise(60), broken=True), np.arange(60)).stream(0, 10))
        assert threading.active_count() == before

    def test_empty(self) -> None:
        assert list(Domain("d", noise(0), np.arange(0)).stream(0, 10)) == []


class TestLazyImages:
    def test_resized_and_cropped_as_usual(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        photo = Image.fromarray(rng.integers(0, 256, (60, 90, 3), dtype=np.uint8))
        photo.save(tmp_path / "wide.png")
        exact = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(exact).save(tmp_path / "exact.png")
        images = ImageFiles([tmp_path / "wide.png", tmp_path / "exact.png"], 32, resize_to=40)
        expected = photo.resize((60, 40), Image.Resampling.BILINEAR).crop((14, 4, 46, 36))
        np.testing.assert_array_equal(images[np.array([0])][0], np.asarray(expected))
        np.testing.assert_array_equal(images[np.array([1, 0, 1])][0], exact)
        assert images[np.array([], dtype=int)].shape == (0, 32, 32, 3)

    def test_one_unreadable_file_is_named(self, tmp_path: Path) -> None:
        good = jpeg(tmp_path / "good.JPEG")
        (tmp_path / "cut.JPEG").write_bytes(good.read_bytes()[:200])
        images = ImageFiles([good, tmp_path / "cut.JPEG", tmp_path / "gone.JPEG"], 224)
        assert len(images[np.array([0, 0])]) == 2
        for number, name in ((1, "cut.JPEG"), (2, "gone.JPEG")):
            with pytest.raises(MergettaError, match=f"Cannot read the image .*{name}"):
                images[np.array([0, number])]
        with pytest.raises(MergettaError, match="cannot be cropped to 224"):
            ImageFiles([good], 224, resize_to=100)

    @pytest.mark.parametrize("name", CORRUPTIONS)
    def test_corrupted_is_as_in_the_whole(self, name: str) -> None:
        images = noise(20)
        whole = corrupt(images, name, 4, seed=3)
        view = Corrupted(images, name, 4, seed=3)
        chosen = np.array([17, 2, 2, 9])
        np.testing.assert_array_equal(view[chosen], whole[chosen])
        part = Subset(view, np.array([19, 5, 7]))
        assert len(part) == 3
        np.testing.assert_array_equal(part[np.array([2, 0])], whole[[7, 19]])

    def test_corrupted_checks_its_arguments_at_once(self) -> None:
        with pytest.raises(MergettaError, match="no corruption 'rain'"):
            Corrupted(noise(1), "rain", 5)
        with pytest.raises(MergettaError, match="severity must be 1 to 5"):
            Corrupted(noise(1), "fog", 0)

    def test_wide_blur_is_opencvs(self) -> None:
        import cv2

        images = np.random.default_rng(0).random((2, 20, 16, 2), dtype=np.float32)
        size, sigma = 121, 15.0
        expected = on_planes(lambda x: cv2.GaussianBlur(x, (size, size), sigma), images)
        rows, columns = blur_matrix(20, size, sigma), blur_matrix(16, size, sigma)
        found = np.einsum("ij,bjkc,lk->bilc", rows, images, columns)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def write_archive(path: Path, **changes: np.ndarray) -> Path:
    files = [jpeg(path.parent / f"{i}.jpg", colour=i * 20).read_bytes() for i in range(6)]
    arrays = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "off": np.cumsum([0, *map(len, files)]),
        "y": np.array([5, 4, 3, 2, 1, 999]),
    }
    np.savez(path, **{**arrays, **changes})
    return path


class TestJpegArchive:
    def test_read(self, tmp_path: Path) -> None:
        archive = JpegArchive(write_archive(tmp_path / "a.npz"))
        images = archive[np.array([3, 0])]
        assert images.shape == (2, 224, 224, 3)
        assert abs(int(images[0, 0, 0, 0]) - 60) < 4
        assert archive.labels.tolist() == [5, 4, 3, 2, 1, 999]

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"y": np.array([5, 4, 3, 2, 1, 1000])}, "has the label 1000, but there are only the classes 0 to 999"),
            ({"y": np.array([1, 2])}, "must hold 6 integer labels"),
            ({"off": np.array([0, 5, 3])}, "offsets in .* do not divide"),
            ({"jpeg": np.zeros(3)}, "must hold its JPEGs as uint8"),
        ],
    )
    def test_errors(self, tmp_path: Path, changes: dict, sentence: str) -> None:
        with pytest.raises(MergettaError, match=sentence):
            JpegArchive(write_archive(tmp_path / "a.npz", **changes))

    def test_truncated(self, tmp_path: Path) -> None:
        path = write_archive(tmp_path / "a.npz")
        path.write_bytes(path.read_bytes()[:-300])
        with pytest.raises(MergettaError, match=r"Cannot read .*a.npz as an npz file"):
            JpegArchive(path)
        np.savez(path, jpeg=np.zeros(3, np.uint8))
        with pytest.raises(MergettaError, match="no array named 'off'"):
            JpegArchive(path)


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    images = noise(40)
    np.save(tmp_path / "gaussian_noise.npy", images)
    np.save(tmp_path / "spatter.npy", images[::-1])
    np.save(tmp_path / "labels.npy", np.tile(np.arange(8), 5))
    return tmp_path


class TestCifarC:
    def test_published(self, cifar: Path) -> None:
        source = CifarC(cifar)
        assert source.description == "CIFAR-10-C as published"
        assert source.domains == ("gaussian_noise",)
        domain = source.domain("gaussian_noise", severity=3, samples=4)
        assert domain.name == "gaussian_noise"
        assert domain.labels.tolist() == [0, 1, 2, 3]
        np.testing.assert_array_equal(domain.images[np.arange(4)], noise(40)[16:20])
        assert len(source.domain("spatter", 5).images) == 8
        assert not source.whole("spatter", 5).images.flags.owndata  # type: ignore[attr-defined]
        assert source.clean(5) is None

    def test_clean_only_is_corrupted_on_the_fly(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "cifar100_test.npz", x=noise(12), y=np.arange(12, dtype=np.uint8) + 80)
        source = CifarC(tmp_path, classes=100)
        assert source.description == "CIFAR-100 test corrupted by mergetta"
        assert source.domains == tuple(CORRUPTIONS)
        domain = source.domain("snow", 2, samples=10)
        chosen = np.array([8, 1])
        np.testing.assert_array_equal(domain.images[chosen], corrupt(noise(12), "snow", 2)[chosen])
        assert domain.labels[8] == 88
        clean = source.clean(5)
        assert clean is not None and clean.labels.tolist() == [87, 88, 89, 90, 91]

    @pytest.mark.parametrize(
        ("break_it", "sentence"),
        [
            (
                lambda f: np.save(f / "fog.npy", noise(40)[..., :2]),
                r"uint8 images \(5·N, 32, 32, 3\), not uint8",
            ),
            (lambda f: np.save(f / "fog.npy", noise(40) / 2), "not float64"),
            (lambda f: np.save(f / "fog.npy", noise(42)), r"\(42, 32, 32, 3\)"),
            (lambda f: np.save(f / "fog.npy", noise(35)), "labels.npy must hold 35 integer labels"),
            (lambda f: (f / "fog.npy").write_bytes((f / "spatter.npy").read_bytes()[:-9]), "fog.npy is truncated"),
            (lambda f: (f / "fog.npy").write_bytes(b""), "fog.npy is truncated"),
            (lambda f: (f / "fog.npy").write_bytes(b"PK\x03\x04 something else"), "not an npy file"),
            (lambda f: None, "has no fog.npy; it has gaussian_noise, spatter"),
            (lambda f: (f / "spatter.npy").rename(f / "fog.npy") and (f / "labels.npy").unlink(), "has no labels.npy"),
            (
                lambda f: np.save(f / "fog.npy", noise(40)) or np.save(f / "labels.npy", np.arange(40)),
                "has the label 10, but there are only the classes 0 to 9",
            ),
        ],
    )
    def test_errors(self, cifar: Path, break_it: Callable, sentence: str) -> None:
        break_it(cifar)
        with pytest.raises(MergettaError, match=sentence):
            CifarC(cifar).domain("fog", 1)

    def test_more_errors(self, cifar: Path, tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match="has 8 images, not 9"):
            CifarC(cifar).domain("spatter", 1, samples=9)
        with pytest.raises(MergettaError, match="severity must be 1 to 5"):
            CifarC(cifar).domain("spatter", 6)
        with pytest.raises(MergettaError, match=r"cifar10-styles needs clean images: put cifar10_test.npz"):
            open_source("cifar10-styles", cifar)
        (tmp_path / "empty").mkdir()
        with pytest.raises(MergettaError, match="has neither the files of CIFAR-10-C"):
            CifarC(tmp_path / "empty")
        np.savez(tmp_path / "empty" / "cifar10_test.npz", x=noise(3, 28), y=np.arange(3))
        with pytest.raises(MergettaError, match="32 × 32 pixels in colour"):
            CifarC(tmp_path / "empty").clean(1)


class TestImagenetC:
    @pytest.mark.parametrize("above", ["", "noise"])
    def test_published(self, tmp_path: Path, above: str) -> None:
        class_list(tmp_path)
        for i, wnid in enumerate((WNIDS[7], WNIDS[3], WNIDS[999])):
            jpeg(tmp_path / above / "shot_noise" / "5" / wnid / f"v{i}.JPEG", colour=i * 50)
        source = ImagenetC(tmp_path)
        assert source.description == "ImageNet-C as published"
        assert source.domains == ("shot_noise",)
        domain = source.whole("shot_noise", 5)
        assert domain.labels.tolist() == [3, 7, 999]
        assert abs(int(domain.images[np.array([0])][0, 0, 0, 0]) - 50) < 4
        with pytest.raises(MergettaError, match="no corruption 'fog'; it has shot_noise"):
            source.domain("fog", 5)
        with pytest.raises(MergettaError, match="has no severity 3"):
            source.domain("shot_noise", 3)
        assert source.clean(1) is None
        drawn = [source.domain("shot_noise", 5, samples=n).labels.tolist() for n in (2, 3)]
        assert drawn[1][:2] == drawn[0]
        with pytest.raises(MergettaError, match="has 3 images, not 4"):
            source.domain("shot_noise", 5, samples=4)

    def test_subset_is_named(self, tmp_path: Path) -> None:
        class_list(tmp_path)
        for wnid in WNIDS[:3]:
            for name in "ab":
                jpeg(tmp_path / "fog" / "1" / wnid / f"{name}.JPEG")
        ids = tmp_path / "imagenet_test_image_ids.txt"
        ids.write_text(f"{WNIDS[2]}/a.JPEG\n{WNIDS[0]}/b.JPEG\n")
        source = ImagenetC(tmp_path, subset=ids)
        assert source.description == (
            "ImageNet-C as published, the 2-image RobustBench subset imagenet_test_image_ids.txt"
        )
        assert source.whole("fog", 1).labels.tolist() == [2, 0]
        ids.write_text(f"{WNIDS[2]}/z.JPEG\n")
        with pytest.raises(MergettaError, match=r"has no n00001004/z.JPEG, which .* lists"):
            ImagenetC(tmp_path, subset=ids).domain("fog", 1)
        ids.write_text("../secrets\n")
        with pytest.raises(MergettaError, match=r"the line '../secrets'"):
            ImagenetC(tmp_path, subset=ids).domain("fog", 1)
        with pytest.raises(MergettaError, match="Cannot read the subset"):
            ImagenetC(tmp_path, subset=tmp_path / "none.txt").domain("fog", 1)

    @pytest.mark.parametrize("inner", ["", "val"])
    def test_clean_folder_is_corrupted_on_the_fly(self, tmp_path: Path, inner: str) -> None:
        class_list(tmp_path)
        for i, wnid in enumerate(WNIDS[:3]):
            jpeg(tmp_path / inner / wnid / "a.JPEG", size=(300, 280 + i), colour=i)
        source = ImagenetC(tmp_path)
        assert source.description == "ImageNet validation corrupted by mergetta"
        assert source.originals is not None
        clean = source.originals.images[np.arange(3)]
        assert clean.shape == (3, 224, 224, 3)
        found = source.whole("fog", 4).images[np.array([2])]
        np.testing.assert_array_equal(found, corrupt(clean, "fog", 4)[[2]])

    def test_archive(self, tmp_path: Path) -> None:
        path = write_archive(tmp_path / "imagenet_val3k_224.npz")
        source = ImagenetC(tmp_path)
        assert source.description == "ImageNet validation (imagenet_val3k_224.npz) corrupted by mergetta"
        domain = source.domain("contrast", 5, samples=4)
        labels = np.concatenate([labels for _, labels in domain.stream(0, 3)])
        assert len(set(labels.tolist())) == 4
        assert len(ImagenetC(path).whole("fog", 1).images) == 6
        with pytest.raises(MergettaError, match="have no names"):
            ImagenetC(tmp_path, subset="ids.txt")

    def test_classes_must_be_known(self, tmp_path: Path) -> None:
        jpeg(tmp_path / "fog" / "1" / WNIDS[5] / "a.JPEG")
        with pytest.raises(MergettaError, match="names 1 classes, so their numbers are unknown"):
            ImagenetC(tmp_path).domain("fog", 1)
        class_list(tmp_path)
        jpeg(tmp_path / "fog" / "1" / "n99999999" / "a.JPEG")
        with pytest.raises(MergettaError, match=r"has the class n99999999, which .*classes.txt does not name"):
            ImagenetC(tmp_path).domain("fog", 1)

    def test_empty(self, tmp_path: Path) -> None:
        with pytest.raises(MergettaError, match=r"has neither ImageNet-C .* nor clean images"):
            ImagenetC(tmp_path)
        class_list(tmp_path)
        (tmp_path / "fog" / "1" / WNIDS[5]).mkdir(parents=True)
        with pytest.raises(MergettaError, match="has no images"):
            ImagenetC(tmp_path).domain("fog", 1)

    def test_the_first_batch_of_50000_decodes_only_that(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        linked_domain(tmp_path / "fog" / "5", per_class=50)
        opened: list[int] = []
        decode = ImageFiles.decode
        monkeypatch.setattr(ImageFiles, "decode", lambda self, i: (opened.append(i), decode(self, i))[1])
        domain = ImagenetC(tmp_path).whole("fog", 5)
        assert len(domain.images) == 50_000
        assert domain.labels[[0, 49, 50, 49_999]].tolist() == [0, 0, 1, 999]
        assert not opened
        stream = domain.stream(0, 16)
        images, _ = next(stream)
        assert images.shape == (16, 3, 224, 224)
        stream.close()  # type: ignore[attr-defined]
        assert len(opened) <= 32  # this batch and the one prepared ahead

    def test_memory_does_not_grow_with_the_domain(self, tmp_path: Path) -> None:
        """3,000 images would take 450 MB as bytes, 1.8 GB as floats."""
        class_list(tmp_path)
        linked_domain(tmp_path / "fog" / "5", per_class=300, classes=WNIDS[:10])
        code = """
            import resource, sys
            from mergetta.data.imagenet_c import ImagenetC
            def peak():
                return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            before, seen = peak(), 0
            for images, labels in ImagenetC(sys.argv[1]).whole("fog", 5).stream(0, 32):
                seen += len(images.mean(axis=(2, 3)))
            print(seen, peak() - before)
        """
        run = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
        seen, growth = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
        assert int(seen) == 3000
        assert float(growth) < 200


def test_images_of_16_bits_are_not_clipped(tmp_path: Path) -> None:
    """Pillow takes every pixel above 255 of such an image for white."""
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    Image.fromarray(pixels.astype(np.uint16) * 257).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(read_image(tmp_path / "deep.png", 1)[..., 0], pixels)
    np.testing.assert_array_equal(read_image(tmp_path / "deep.png", 3), np.repeat(pixels[..., None], 3, axis=2))
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(MergettaError, match="neither bytes nor 16-bit"):
        read_image(tmp_path / "float.tiff", 1)
