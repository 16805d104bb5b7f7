"""Streams of images: folders, files, frames, videos, and the batches they come in."""

from __future__ import annotations

import io
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergetta import MergettaError
from mergetta.device.stream import Batches, ImageShape, Item, open_stream

CLASSES = list("abcd")
GREY = ImageShape(1, 28)


class TestStream:
    def test_folder_goes_on_past_bad_images(self, tmp_path: Path) -> None:
        Image.fromarray(np.full((9, 5, 3), 200, np.uint8)).save(tmp_path / "a.png")
        (tmp_path / "b.jpg").write_bytes(b"not a jpeg")
        Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "c.png")
        items = list(open_stream(str(tmp_path), GREY))
        assert [item.name for item in items] == ["a.png", "b.jpg", "c.png"]
        assert [item.image is None for item in items] == [False, True, False]
        assert items[0].image.shape == (28, 28, 1)
        assert items[1].problem.endswith("b.jpg: cannot identify image file of 10 bytes.")

    def test_one_image(self, tmp_path: Path) -> None:
        for name in ("a.png", "b.png"):
            Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / name)
        (item,) = open_stream(str(tmp_path / "b.png"), GREY)
        assert item.name == "b.png" and item.image is not None
        with pytest.raises(MergettaError, match=r"Cannot read .*c.png: No such file"):
            open_stream(str(tmp_path / "c.png"), GREY)

    def test_what_is_done_is_known_by_name_and_content(self, tmp_path: Path) -> None:
        for name in ("b.png", "c.png"):
            Image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / name)
        (tmp_path / "bad.png").write_bytes(b"")
        done = {(item.name, item.content) for item in open_stream(str(tmp_path), GREY)}
        assert len(done) == 3
        Image.fromarray(np.ones((28, 28), np.uint8)).save(tmp_path / "b.png")
        shutil.copy(tmp_path / "c.png", tmp_path / "a.png")
        assert [item.name for item in open_stream(str(tmp_path), GREY, lambda: done)] == ["a.png", "b.png"]

    def test_npz_and_wrong_shapes(self, tmp_path: Path) -> None:
        path = str(tmp_path / "x.npz")
        np.savez(path, images=np.zeros((3, 6, 6, 3), np.uint8))
        assert [item.problem for item in open_stream(path, ImageShape(1, 6))] == [
            "The image has 3 channels, not 1: convert it to grey."
        ] * 3
        assert [item.image.shape for item in open_stream(path, ImageShape(3, 4))] == [(4, 4, 3)] * 3
        refused = open_stream(path, ImageShape(3, 4, resize=False))
        assert {item.problem for item in refused} == {"The image has 6x6 pixels, not 4x4."}
        with pytest.raises(MergettaError, match="has no images"):
            (tmp_path / "empty").mkdir()
            open_stream(str(tmp_path / "empty"), GREY)

    def test_raw_frames(self) -> None:
        pixels = np.arange(2 * 12, dtype=np.uint8).tobytes() + b"xyz"
        items = list(open_stream("-", ImageShape(1, 6), frame=(3, 4), stdin=io.BytesIO(pixels)))
        assert [item.image.shape for item in items[:2]] == [(6, 6, 1)] * 2
        assert items[1].image.ravel()[0] == 12
        assert "cut off after 3 of 12 bytes" in items[2].problem
        with pytest.raises(MergettaError, match="3x4 pixels, not 6x6"):
            list(open_stream("-", ImageShape(1, 6, resize=False), frame=(3, 4), stdin=io.BytesIO(pixels)))

    @pytest.mark.parametrize("channels", [1, 3])
    def test_videos(self, tmp_path: Path, channels: int) -> None:
        cv2 = pytest.importorskip("cv2")
        path = str(tmp_path / "clip.avi")
        writer = cv2.VideoWriter(path, cv2.VideoWriter.fourcc(*"MJPG"), 5, (32, 16))
        for level in (0, 100, 200):
            writer.write(np.full((16, 32, 3), (level, level, level), np.uint8))
        writer.release()
        items = list(open_stream(path, ImageShape(channels, 8)))
        assert [item.name for item in items] == ["0", "1", "2"]
        assert [item.image.shape for item in items] == [(8, 8, channels)] * 3
        np.testing.assert_allclose([item.image.mean() for item in items], [0, 100, 200], atol=4)
        done = {(item.name, item.content) for item in items[:2]}
        assert [item.name for item in open_stream(path, ImageShape(channels, 8), lambda: done)] == ["2"]
        address = open_stream(f"file://{path}", ImageShape(channels, 8))  # a live stream: its end is none of its own
        assert [next(address).name for _ in range(3)] == [""] * 3
        with pytest.raises(MergettaError, match="gives no more frames"):
            next(address)
        for source, words in (
            ("camera:x", "as in camera:0"),
            ("camera:77", "cannot open camera:77"),
            (str(tmp_path / "none.mp4"), "There is no file"),
        ):
            with pytest.raises(MergettaError, match=words):
                open_stream(source, GREY)

    def test_a_network_camera(self) -> None:
        """Frames by RTSP, each as it was shown; when the camera hangs up, that is told."""
        pytest.importorskip("cv2")
        from .rtsp_camera import RtspCamera

        shades = [20, 100, 180, 250]
        camera = RtspCamera([np.full((48, 64, 3), (shade, 0, 255 - shade), np.uint8) for shade in shades])
        found = []
        with pytest.raises(MergettaError, match="gives no more frames"):
            for item in open_stream(camera.url, ImageShape(3, 32)):
                found.append(item.image.mean(axis=(0, 1)))
        np.testing.assert_allclose(found, [(255 - shade, 0, shade) for shade in shades], atol=6)


class TestBatches:
    def test_sizes(self) -> None:
        assert [len(batch) for batch in Batches(iter([Item("", None)] * 5), 2)] == [2, 2, 1]

    def test_a_batch_does_not_wait_for_ever(self) -> None:
        more = threading.Event()

        def slow() -> Iterator[Item]:
            yield from [Item("", None)] * 3
            more.wait(60)
            yield Item("", None)

        batches = iter(Batches(slow(), 2, max_wait=0.01))
        assert [len(next(batches)) for _ in range(2)] == [2, 1]
        more.set()
        assert [len(batch) for batch in batches] == [1]

    def test_tells_when_nothing_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mergetta.device.stream.PAUSE", 0.01)
        idle = threading.Event()

        def slow() -> Iterator[Item]:
            yield Item("a", None)
            assert idle.wait(10)
            yield Item("b", None)

        assert [[item.name for item in batch] for batch in Batches(slow(), 2, idle=idle.set)] == [["a", "b"]]

    def test_stops_with_what_was_read(self) -> None:
        forever = threading.Event()

        def stuck() -> Iterator[Item]:
            yield from [Item("", None)] * 3
            batches.stop()
            forever.wait(60)
            yield Item("", None)

        batches = Batches(stuck(), 64)
        assert [len(batch) for batch in batches] == [3]
        forever.set()

    def test_what_goes_wrong_in_the_stream_is_told_after_what_came_before(self) -> None:
        def broken() -> Iterator[Item]:
            yield Item("", None)
            raise MergettaError("gone")

        batches = iter(Batches(broken(), 64))
        assert len(next(batches)) == 1
        with pytest.raises(MergettaError, match="gone"):
            next(batches)
