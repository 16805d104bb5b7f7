"""`mergetta hub demo`: a whole fleet on one machine, every device a process of its own, as in the field.

Strong devices adapt to one corruption after the other (`mergetta adapt --hub`), weak ones predict a stream of images
that never ends (`mergetta run --hub`), each without the experts of its own corruption. Only the demo knows the labels,
so only the demo can tell how well the fleet does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mergetta.data.corruptions import corrupt
from mergetta.data.fashion import load_fashion
from mergetta.data.streams import as_input
from mergetta.errors import MergettaError
from mergetta.hub.settings import HubSettings
from mergetta.hub.store import Store
from mergetta.models.family import load_family
from mergetta.runtimes.export import export_onnx
from mergetta.runtimes.torch_runtime import TorchRuntime

WEAK = ("gaussian_noise", "fog", "contrast", "motion_blur", "pixelate", "snow")
STRONG = 4
ORDER = (
    "jpeg_compression", "brightness", "elastic_transform", "zoom_blur", "contrast", "fog", "pixelate", "motion_blur",
    "defocus_blur", "frost", "glass_blur", "impulse_noise", "snow", "shot_noise", "gaussian_noise",
)  # fmt: skip
"""In which corruptions are met: those that help the weak devices most come last, so that the fleet gets better."""
IMAGES = 640
"""Of a stream, which repeats: the error over as many predictions is always over the same images."""
BATCH = 32


@dataclass
class WeakDevice:
    name: str
    domain: str
    labels: Any
    folder: Path
    process: subprocess.Popen[bytes]
    deployed: float
    """Error of the model as it was deployed, without any adaptation."""
    wrong: list[bool] = field(default_factory=list)
    read: int = 0

    def look(self) -> None:
        """Read the predictions that have come since the last look."""
        path = self.folder / "predictions.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self.read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.read += len(line)
                row = json.loads(line)
                if "label" in row:
                    self.wrong.append(row["label"] != self.labels[row["index"] % len(self.labels)])

    def error(self, of: slice) -> float | None:
        chosen = self.wrong[of]
        return 100 * sum(chosen) / len(chosen) if chosen else None


@dataclass
class Picture:
    """The fleet at a moment."""

    seconds: float
    experts: int
    devices: list[WeakDevice]

    def errors(self, of: slice) -> dict[str, float]:
        """In percent, by what a device meets; of those that have predicted enough."""
        return {device.domain: error for device in self.devices if (error := device.error(of)) is not None}

    def mean(self, of: slice) -> float | None:
        errors = list(self.errors(of).values())
        return float(np.mean(errors)) if errors else None


class Fleet:
    """A hub, four strong devices, six weak ones. `close` ends all of them."""

    def __init__(self, folder: Path, port: int, frames_per_second: float) -> None:
        self.folder, self.pace = folder, 1 / frames_per_second
        self.stopping = threading.Event()
        self.processes: list[subprocess.Popen[bytes]] = []
        settings = HubSettings.in_folder(folder / "hub")
        store = Store(settings.database, settings.blobs)
        roles = {"admin": "admin", "strong": "contribute", "weak": "consume"}
        self.tokens = {name: store.create_token(f"{name} (demo)", role)[0] for name, role in roles.items()}
        store.close()
        self.url = f"http://127.0.0.1:{port or free_port()}"
        self.weak: list[WeakDevice] = []
        self.labels: Any = None
        self.frames: dict[str, Any] = {}
        self.deployed: dict[str, float] = {}

    @property
    def dashboard(self) -> str:
        return f"{self.url}/#token={self.tokens['admin']}"

    def start_hub(self) -> None:
        port = self.url.rpartition(":")[2]
        self.spawn("hub", "hub", "serve", "--open", "--folder", str(self.folder / "hub"), "--port", port)
        self.wait_for(lambda: self.get("/v1/health") is not None, 60, "The hub does not start")

    def start_strong(self) -> None:
        for number in range(STRONG):
            threading.Thread(target=self._contribute, args=(number, ORDER[number::STRONG]), daemon=True).start()
        self.wait_for(self.has_bundle, 300, "No experts have arrived")

    def _contribute(self, number: int, domains: Sequence[str]) -> None:
        for domain in domains:
            if self.stopping.is_set():
                return
            photos, out = self.folder / f"{domain}.npz", self.folder / f"{domain}.safetensors"
            np.savez(photos, images=corrupt(load_fashion()[0][:IMAGES], domain, 5))
            adapt = ("adapt", str(photos), "--domain", domain, "--out", str(out), "--batch-size", "40")
            self.spawn(f"strong-{number + 1}", *adapt, "--hub", self.url, token="strong").wait()

    def prepare(self) -> None:
        """Export the model, make the streams, and see how the model does on them as it was deployed."""
        family = load_family("fashion-bn")
        export_onnx(family, self.folder / "model.onnx")
        runtime = TorchRuntime(family)
        images, self.labels = load_fashion()[0][:IMAGES], load_fashion()[1][:IMAGES]
        for domain in WEAK:
            frames = self.frames[domain] = corrupt(images, domain, 5)
            logits = [runtime(as_input(frames[i : i + 160]), given=1.0).logits for i in range(0, IMAGES, 160)]
            self.deployed[domain] = 100 * float(np.mean(np.argmax(np.concatenate(logits), axis=1) != self.labels))

    def start_weak(self) -> None:
        for number, domain in enumerate(WEAK, 1):
            name, folder = f"camera-{number}", self.folder / f"camera-{number}"
            folder.mkdir()
            process = self.spawn(
                name, "run", "--model", str(self.folder / "model.onnx"), "--hub", self.url, "--images", "-",
                "--device", name, "--out", str(folder / "predictions.jsonl"), "--hub-folder", str(folder),
                "--batch-size", str(BATCH), "--refresh", "3", "--exclude", domain, "--threads", "1",
                token="weak", stdin=subprocess.PIPE,
            )  # fmt: skip
            self.weak.append(WeakDevice(name, domain, self.labels, folder, process, self.deployed[domain]))
            threading.Thread(target=self._feed, args=(process, self.frames[domain]), daemon=True).start()

    def _feed(self, process: subprocess.Popen[bytes], frames: Any) -> None:
        assert process.stdin is not None
        start = time.monotonic()
        with contextlib.suppress(OSError):
            for number, frame in enumerate(itertools.cycle(frames)):
                if self.stopping.wait(max(0.0, start + number * self.pace - time.monotonic())):
                    return
                process.stdin.write(frame.tobytes())

    def look(self, since: float) -> Picture:
        for device in self.weak:
            device.look()
            if device.process.poll() is not None:
                raise MergettaError(f"{device.name} has stopped: {self.last_words(device.name)}")
        families = self.get("/v1/families") or [{"experts": {}}]
        return Picture(time.monotonic() - since, families[0]["experts"].get("active", 0), self.weak)

    def has_bundle(self) -> bool:
        """Of two experts: who leaves out its own corruption needs another one."""
        families = self.get("/v1/families")
        return bool(families and families[0]["bundle"] and families[0]["experts"].get("active", 0) >= 2)

    def spawn(self, name: str, *arguments: str, token: str = "admin", **options: Any) -> subprocess.Popen[bytes]:
        """A `mergetta` process; what it says goes to a file."""
        program = shutil.which("mergetta", path=str(Path(sys.executable).parent)) or "mergetta"
        environment = {**os.environ, "MERGETTA_TOKEN": self.tokens[token], "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([program, *arguments], env=environment, stdout=log, stderr=log, **options)
        self.processes.append(process)
        return process

    def last_words(self, name: str) -> str:
        lines = (self.folder / f"{name}.log").read_text().strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def get(self, path: str) -> Any:
        request = urllib.request.Request(self.url + path, headers={"Authorization": f"Bearer {self.tokens['admin']}"})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return json.load(answer)
        except (OSError, ValueError):
            return None

    def wait_for(self, condition: Callable[[], bool], seconds: float, problem: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            ended = next((p for p in self.processes if p.poll() not in (None, 0)), None)
            if time.monotonic() > deadline or ended is not None:
                said = "; ".join(f"{log.stem}: {self.last_words(log.stem)}" for log in self.folder.glob("*.log"))
                raise MergettaError(f"{problem}: {said}")
            time.sleep(0.1)

    def close(self) -> None:
        self.stopping.set()
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()


def run_demo(folder: Path, port: int, seconds: float, frames_per_second: float = 40) -> Iterator[str | Picture]:
    """What is going on, in words, then one picture per second."""
    fleet = Fleet(folder, port, frames_per_second)
    try:
        yield "starting the hub"
        fleet.start_hub()
        yield f"dashboard: {fleet.dashboard}"
        yield "preparing the streams of the weak devices"
        fleet.prepare()
        yield f"{STRONG} strong devices adapt to their first corruptions"
        fleet.start_strong()
        yield f"the first bundle is there: {len(WEAK)} weak devices start to predict"
        fleet.start_weak()
        start = time.monotonic()
        while time.monotonic() - start < seconds:
            time.sleep(1.0)
            yield fleet.look(start)
    finally:
        fleet.close()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
