"""A device in Python: a model, a bundle or a hub, and the method that adapts one with the other."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.adapters.base import Status
from mergetta.bundle import Bundle
from mergetta.data.streams import as_input
from mergetta.device.agent import Agent, generation_of
from mergetta.device.methods import create
from mergetta.device.state import bundle_of
from mergetta.device.stream import ImageShape
from mergetta.errors import MergettaError
from mergetta.runtimes.onnx_runtime import OnnxRuntime


class Device:
    """It predicts frames and adapts to them with forward passes alone, as `mergetta run` does.

    Parameters
    ----------
    model
        The ONNX file that `mergetta export` wrote.
    bundle
        A bundle or its file.
    hub
        Instead of a bundle, the address of a hub, which is asked for newer ones.
    method
        `race-merge`, or `zo-merge`.
    options
        Of the method, by name, as `mergetta run --option` takes them.
    mirror
        Whether mirrored images are looked at too.
    runs
        Whether predictions are filtered over time where classes come in runs. Frames must come in their order in time.
    head
        Whether the classifier follows the stream, by its closed-form gradient.
    threads
        Per operator of ONNX Runtime (default: its own choice).
    resize
        Whether frames of another size are made to fit, or refused.
    state
        A file that keeps what was learnt; the next device that is given it goes on from there. It is written every ten
        seconds, with every change of bundle, and by `close`.
    out
        The file to which `mergetta run` writes; `predict` writes nothing.
    connection
        With a hub, options of `mergetta.device.hub_link.connect`: `token`, `ca`, `verify_key`, …

    Examples
    --------
    >>> device = Device("model.onnx", bundle="bundle.safetensors")  # doctest: +SKIP
    >>> device.classes[device.predict(frame).argmax()]  # doctest: +SKIP
    'Sneaker'
    """

    def __init__(
        self,
        model: str | Path | bytes,
        bundle: str | Path | Bundle | None = None,
        hub: str | None = None,
        *,
        method: str = "race-merge",
        options: Mapping[str, Any] | None = None,
        mirror: bool = False,
        runs: bool = True,
        head: bool = True,
        threads: int | None = None,
        resize: bool = True,
        state: str | Path | None = None,
        out: Path | None = None,
        **connection: Any,
    ) -> None:
        if (bundle is None) == (hub is None):
            raise MergettaError("Give one of bundle and hub.")
        if connection and hub is None:
            raise MergettaError(f"{min(connection)} goes with a hub only.")
        state = None if state is None else Path(state)
        runtime = OnnxRuntime(model, threads=threads)
        self.shape = ImageShape(int(runtime.metadata["channels"]), int(runtime.metadata["size"]), resize)
        self.classes: list[str] = runtime.metadata["classes"]
        with contextlib.ExitStack() as stack:
            link = None
            if hub is not None:
                from mergetta.device.hub_link import connect

                link = connect(hub, runtime, **connection)
                stack.callback(link.stop)
                merged = link.start(bundle_of(state) if state else None)
            else:
                merged = bundle if isinstance(bundle, Bundle) else Bundle.load(str(bundle), runtime.family)
            adapter = create(method, runtime, merged, options or {}, mirror, runs, head)
            id = link.id if link else merged.digest
            self.agent = Agent(adapter, id, self.classes, out, state, link, generation=generation_of(merged))
            stack.callback(self.agent.close)
            self._end = weakref.finalize(self, stack.pop_all().close)  # also when the program ends

    def predict(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Probabilities, (K,) of a frame or (B, K) of a batch; adapts as it predicts.

        Frames are uint8 as a camera gives them, (H, W, C) or grey (H, W), and a batch is (B, H, W, C).
        """
        began = time.perf_counter()
        frames = np.asarray(images)
        frames = frames[..., None] if frames.ndim == 2 else frames
        if frames.dtype != np.uint8 or frames.ndim not in (3, 4) or not frames.size:
            hint = ": a float image in [0, 1] becomes one by (255 * image).astype('uint8')"
            raise MergettaError(
                f"A frame is uint8 (H, W[, C]) and a batch (B, H, W, C), not {frames.dtype} {frames.shape}"
                f"{hint if frames.dtype.kind == 'f' else ''}."
            )
        batch = np.stack([self.shape.fit(frame) for frame in (frames if frames.ndim == 4 else frames[None])])
        probabilities = self.agent.predict(as_input(batch))
        self.agent.finish(began, len(batch))
        return probabilities if frames.ndim == 4 else probabilities[0]

    def status(self) -> Status:
        """Phase, steps, shifts, fallbacks, what is normalised with, and the members' weights."""
        return self.agent.adapter.status()

    def close(self) -> None:
        """Save the state, leave a last report with the hub and let go of it, as a `with` statement does by itself."""
        self._end()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()
