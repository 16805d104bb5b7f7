"""`mergetta run`: the loop on a weak device, with NumPy and ONNX Runtime only."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_format
import logging
import platform
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.live import Live

if TYPE_CHECKING:
    from mergetta.device.agent import Agent
    from mergetta.device.stream import Item
    from mergetta.expert import Expert

T = TypeVar("T")
STEPS = ("loss", "lr", "delta", "sides", "every", "max_steps", "budget", "seed")
"""Options of the paper's method."""
PLUS = ("mirror",)
"""Options of zo-merge-plus."""
LINK = ("verify_key", "ca", "device", "hub_folder", "refresh", "exclude", "exclude_own")
"""Options of what a hub gives."""
Token = Annotated[str | None, typer.Option(envvar="MERGETTA_TOKEN", help="What the hub knows us by.")]
Authorities = Annotated[Path | None, typer.Option(help="Certificate authorities to trust (default: the system's).")]
VerifyKey = Annotated[
    str | None, typer.Option(help="The hub's public key (base64, or a file): take only bundles signed by it.")
]


def command(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="The ONNX file that `mergetta export` wrote.")],
    images: Annotated[str, typer.Option(help="FILE.npz, a folder of images, or `-` for raw frames on standard input.")],
    bundle: Annotated[Path | None, typer.Option(help="The bundle that `mergetta build` wrote.")] = None,
    hub: Annotated[str | None, typer.Option(help="Address of a hub, instead of --bundle.")] = None,
    experts: Annotated[
        Path | None,
        typer.Option(
            help="A folder of experts, instead of --bundle: run zo-merge-plus, which has none of the options of steps "
            "(--loss, --lr, --delta, --sides, --every, --max-steps, --budget, --seed)."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Predictions: one JSON object per line, or CSV if it ends in .csv.")] = Path(
        "predictions.jsonl"
    ),
    state: Annotated[Path | None, typer.Option(help="Survives a crash: start again with it to go on.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    loss: Annotated[str | None, typer.Option(help="`entropy`, `roid` or `deyo` (default: the experts' own).")] = None,
    lr: Annotated[float, typer.Option(help="Step size η.")] = 5e-3,
    delta: Annotated[
        float | None, typer.Option(help="Perturbation δ (default: what `mergetta calibrate` found, else 0.1).")
    ] = None,
    sides: Annotated[int, typer.Option(min=1, max=2, help="1: one loss evaluation less per step, noisier.")] = 2,
    every: Annotated[int, typer.Option(min=1, help="Adapt on every k-th batch only.")] = 1,
    max_steps: Annotated[int, typer.Option(min=1, help="Most steps before settling in a domain.")] = 10,
    budget: Annotated[float | None, typer.Option(help="Most forward passes per image, on average.")] = None,
    mirror: Annotated[
        bool,
        typer.Option(
            help="With --experts: look at the mirrored image too, as long as that changes predictions. Only where it "
            "means the same: not for text, digits, left and right."
        ),
    ] = True,
    frame: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH of raw frames (default: the model's).")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads (default: ONNX Runtime's choice).")] = None,
    seed: Annotated[int, typer.Option(help="Of the random directions.")] = 0,
    token: Token = None,
    verify_key: VerifyKey = None,
    ca: Authorities = None,
    device: Annotated[str | None, typer.Option(help="What reports call this device (default: its host name).")] = None,
    hub_folder: Annotated[Path, typer.Option(help="For the hub's bundle and unsent reports; one per device.")] = Path(
        "mergetta-hub"
    ),
    refresh: Annotated[float, typer.Option(help="Seconds between two questions for a newer bundle.")] = 60,
    exclude: Annotated[list[str] | None, typer.Option(help="A domain whose experts to leave out.")] = None,
    exclude_own: Annotated[bool, typer.Option(help="Leave out the experts that this token contributed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Predict a stream and adapt to it with forward passes alone; settle when done, wake when the domain changes.

    Example: `mergetta run --model m.onnx --bundle b.safetensors --images photos/ --state state.safetensors`

    Example: `mergetta run --model m.onnx --experts experts/ --images photos/`
    """
    from mergetta.adapters.forward_only.normaliser import Normaliser
    from mergetta.adapters.forward_only.zo_merge import ZOMerge
    from mergetta.adapters.forward_only.zo_merge_plus import ZOMergePlus
    from mergetta.bundle import Bundle
    from mergetta.device.agent import Agent
    from mergetta.device.governor import Governor
    from mergetta.device.state import bundle_of
    from mergetta.device.steady import Steady
    from mergetta.device.stream import batched, open_stream
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

    if sum(given is not None for given in (bundle, hub, experts)) != 1:
        raise typer.BadParameter("Give one of --bundle, --hub and --experts.")
    for name in (*(STEPS if experts else PLUS), *(() if hub else LINK)):
        given = context.get_parameter_source(name)
        if given and given.name == "COMMANDLINE":
            place = "--bundle or --hub" if name in STEPS else "--experts" if name in PLUS else "--hub"
            raise typer.BadParameter(f"--{name.replace('_', '-')} goes with {place} only.")
    runtime = OnnxRuntime(model, threads=threads)
    with contextlib.ExitStack() as stack:
        link = None
        if hub is not None:
            from mergetta.device.hub_client import HubClient, read_key
            from mergetta.device.hub_link import HubLink

            logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would tell of every retry, for days
            client = HubClient(hub, token, ca=ca, verify_key=None if verify_key is None else read_key(verify_key))
            name = device or platform.node() or "device"
            groups = runtime.groups
            link = HubLink(client, runtime.family, hub_folder, name, refresh, exclude or (), exclude_own, groups)
            stack.callback(link.stop)
            merged = link.start(bundle_of(state) if state else None)
        elif bundle is not None:
            merged = Bundle.load(bundle, runtime.family)
        governor: Governor | Steady
        if experts is not None:
            pool, source = load_experts(experts, runtime.family), runtime.metadata.get("features")
            governor = Steady(ZOMergePlus(runtime, pool, source, mirror=mirror))
        else:
            if delta is None:
                delta = float(runtime.metadata.get("delta", 0.1))
            chosen = str(loss or merged.settings.get("loss") or "roid")
            normalise = Normaliser.of_bundle(runtime, merged)
            adapter = ZOMerge(runtime, merged, chosen, lr, delta, 5.0, seed, sides, 1000, normalise)
            governor = Governor(adapter, max_steps=max_steps, every=every, budget=budget)
        agent = Agent(governor, runtime.metadata["classes"], out, state, link)
        channels, size = runtime.metadata["channels"], runtime.metadata["size"]
        stream = open_stream(images, channels, size, agent.position, parse(frame), sys.stdin.buffer)
        follow(agent, until_interrupted(batched(stream, batch_size)))
    summary = agent.summary
    if json:
        typer.echo(json_format.dumps(dataclasses.asdict(summary)))
        return
    Console().print(
        f"{out}: {summary.images} images ({summary.bad} bad), {summary.forwards:.2f} forward passes per image, "
        f"{summary.steps} steps, {summary.shifts} shifts, {summary.rollbacks} rollbacks, "
        f"{summary.state or 'nothing to do'}; normalised with {summary.normalises}",
        highlight=False,
    )


def load_experts(folder: Path, family: str) -> list[Expert]:
    from mergetta.expert import Expert

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise typer.BadParameter(f"There are no experts (*.safetensors) in {folder}.")
    return [Expert.load(file, family) for file in files]


def follow(agent: Agent, batches: Iterator[list[Item]]) -> None:
    """Run, and show how it goes."""
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        for summary in agent.run(batches):
            live.update(
                f"{summary.batches} batches, {summary.images} images, {summary.bad} bad · {summary.state} · "
                f"{summary.steps} steps, {summary.shifts} shifts, {summary.rollbacks} rollbacks · "
                f"entropy {summary.entropy:.3f} · {summary.forwards:.2f} passes per image · normalised with "
                f"{summary.normalises} · {memory()}"
            )


def parse(frame: str | None) -> tuple[int, int] | None:
    if frame is None:
        return None
    height, _, width = frame.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise typer.BadParameter(f"--frame must be HEIGHTxWIDTH, not {frame!r}.")
    return int(height), int(width)


def until_interrupted(items: Iterator[T]) -> Iterator[T]:
    """Ctrl-C ends the stream after the current item, so that everything is written."""
    stop = False

    def note(number: int, stack: object) -> None:
        nonlocal stop
        stop = True

    before = signal.signal(signal.SIGINT, note)
    try:
        for item in items:
            if stop:
                return
            yield item
            if stop:
                return
    finally:
        signal.signal(signal.SIGINT, before)


def memory() -> str:
    """Resident memory of this process, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return "memory unknown"
    return f"{pages * 4096 / 2**20:.0f} MB"
