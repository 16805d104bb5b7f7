"""`mergetta run`: the loop on a weak device, with NumPy and ONNX Runtime only."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_format
import logging
import platform
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.live import Live

if TYPE_CHECKING:
    from mergetta.device.agent import Agent, Summary
    from mergetta.device.hub_client import HubClient
    from mergetta.device.stream import Item

T = TypeVar("T")
LINK = ("verify_key", "ca", "device", "hub_folder", "refresh", "exclude", "exclude_own")
"""Options of what a hub gives."""
Token = Annotated[str | None, typer.Option(envvar="MERGETTA_TOKEN", help="What the hub knows us by.")]
Authorities = Annotated[Path | None, typer.Option(help="Certificate authorities to trust (default: the system's).")]
VerifyKey = Annotated[
    list[str] | None,
    typer.Option(help="A public key of the hub (base64, or a file): take only bundles signed by one of those given."),
]


def command(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="The ONNX file that `mergetta export` wrote.")],
    images: Annotated[str, typer.Option(help="FILE.npz, a folder of images, or `-` for raw frames on standard input.")],
    bundle: Annotated[Path | None, typer.Option(help="The bundle that `mergetta build` wrote.")] = None,
    hub: Annotated[str | None, typer.Option(help="Address of a hub, instead of --bundle.")] = None,
    method: Annotated[str, typer.Option(help="race-merge (ours), or zo-merge (the paper's steps).")] = "race-merge",
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", help="NAME=VALUE of the method, such as lr=0.01 of zo-merge; may be repeated."),
    ] = None,
    mirror: Annotated[
        bool,
        typer.Option(
            help="Look at the mirrored image too, as long as that changes predictions. Only where it means the same: "
            "not for text, digits, left and right."
        ),
    ] = False,
    out: Annotated[Path, typer.Option(help="Predictions: one JSON object per line, or CSV if it ends in .csv.")] = Path(
        "predictions.jsonl"
    ),
    state: Annotated[Path | None, typer.Option(help="Survives a crash: start again with it to go on.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    frame: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH of raw frames (default: the model's).")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads (default: ONNX Runtime's choice).")] = None,
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

    Example: `mergetta run --model m.onnx --hub https://hub.example --token … --images photos/ --batch-size 1`
    """
    from mergetta.bundle import Bundle
    from mergetta.device.agent import Agent
    from mergetta.device.methods import create
    from mergetta.device.state import bundle_of
    from mergetta.device.stream import batched, open_stream
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

    if (bundle is None) == (hub is None):
        raise typer.BadParameter("Give one of --bundle and --hub.")
    for name in () if hub else LINK:
        given = context.get_parameter_source(name)
        if given and given.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} goes with --hub only.")
    options = dict(parse_option(text) for text in option or ())
    runtime = OnnxRuntime(model, threads=threads)
    with contextlib.ExitStack() as stack:
        link = None
        if hub is not None:
            from mergetta.device.hub_link import HubLink

            client, name = client_of(hub, token, ca, verify_key), device or platform.node() or "device"
            groups = runtime.groups
            link = HubLink(client, runtime.family, hub_folder, name, refresh, exclude or (), exclude_own, groups)
            stack.callback(link.stop)
            merged = link.start(bundle_of(state) if state else None)
            digest = link.id
        else:
            assert bundle is not None
            merged = Bundle.load(bundle, runtime.family)
            digest = merged.digest
        adapter = create(method, runtime, merged, options, mirror)
        agent = Agent(adapter, digest, runtime.metadata["classes"], out, state, link)
        channels, size = runtime.metadata["channels"], runtime.metadata["size"]
        stream = open_stream(images, channels, size, agent.position, parse(frame), sys.stdin.buffer)
        follow(agent, until_interrupted(batched(stream, batch_size)))
    report(agent.summary, out, json)


def client_of(hub: str, token: str | None, ca: Path | None, verify_keys: Sequence[str] | None) -> HubClient:
    from mergetta.device.hub_client import HubClient, read_key

    logging.getLogger("urllib3").setLevel(logging.ERROR)  # it would tell of every retry, for days
    return HubClient(hub, token, ca=ca, verify_keys=[read_key(key) for key in verify_keys or ()])


def report(summary: Summary, out: Path, json: bool) -> None:
    if json:
        typer.echo(json_format.dumps(dataclasses.asdict(summary)))
        return
    Console().print(
        f"{out}: {summary.images} images ({summary.bad} bad), {summary.forwards:.2f} forward passes per image, "
        f"{summary.steps} steps, {summary.shifts} shifts, {summary.fallbacks} fallbacks, "
        f"{summary.state or 'nothing to do'}; normalised with {summary.normalises}{heaviest(summary.weights)}",
        highlight=False,
    )


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE: a number, true, false, or text."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise typer.BadParameter(f"--option must be NAME=VALUE, not {text!r}.")
    try:
        return name.replace("-", "_"), json_format.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def heaviest(weights: Mapping[str, float]) -> str:
    """The members that count most."""
    ranked = sorted(weights.items(), key=lambda item: -item[1])[:3]
    return "; merged " + ", ".join(f"{name} {weight:.2f}" for name, weight in ranked) if ranked else ""


def follow(agent: Agent, batches: Iterator[list[Item]]) -> None:
    """Run, and show how it goes."""
    with Live(console=Console(stderr=True), refresh_per_second=4, transient=True) as live:
        for summary in agent.run(batches):
            live.update(
                f"{summary.batches} batches, {summary.images} images, {summary.bad} bad · {summary.state} · "
                f"{summary.steps} steps, {summary.shifts} shifts, {summary.fallbacks} fallbacks · "
                f"entropy {summary.entropy:.3f} · {summary.forwards:.2f} passes per image · normalised with "
                f"{summary.normalises}{heaviest(summary.weights)} · {memory()}"
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
