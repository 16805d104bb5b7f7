"""`mergetta run`: the loop on a weak device, with NumPy and ONNX Runtime only."""

from __future__ import annotations

import contextlib
import dataclasses
import json as json_format
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

from mergetta.cli.options import Method, Threads

if TYPE_CHECKING:
    from mergetta.device.agent import Agent, Summary
    from mergetta.device.stream import Item

LINK = ("verify_key", "ca", "device", "hub_folder", "refresh", "exclude", "exclude_own")
"""Options of what a hub gives."""
Images = Annotated[
    str,
    typer.Option(
        help="A folder of images (read in the order of their names), FILE.npz, a video file, camera:0, rtsp://…, or "
        "`-` for raw frames on standard input."
    ),
]
MethodOption = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="NAME=VALUE of the method, such as lr=0.01 of zo-merge; may be repeated."),
]
Mirror = Annotated[
    bool,
    typer.Option(
        help="Look at the mirrored image too, as long as that changes predictions. Only where it means the same: "
        "not for text, digits, left and right."
    ),
]
Runs = Annotated[
    bool,
    typer.Option(
        help="Where the stream shows that classes come in runs, let the images before an image count. Images must come "
        "in their order in time."
    ),
]
Head = Annotated[
    bool, typer.Option(help="Let the classifier follow the stream, by its closed-form gradient: no further pass.")
]
Out = Annotated[
    Path,
    typer.Option(dir_okay=False, help="Predictions: JSON lines, or CSV if it ends in .csv; `-` is standard output."),
]
State = Annotated[Path | None, typer.Option(dir_okay=False, help="What was learnt, and how far --out has got.")]
MaxWait = Annotated[
    float | None,
    typer.Option(min=0, max=3600, help="Seconds after which a batch is predicted although it is not full."),
]
HubFolder = Annotated[
    Path, typer.Option(file_okay=False, help="For the hub's bundle and unsent reports; one per device.")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(help="A domain whose experts to leave out; a hub does so if at least three tokens contributed to it."),
]
Token = Annotated[str | None, typer.Option(envvar="MERGETTA_TOKEN", help="What the hub knows us by.")]
Authorities = Annotated[Path | None, typer.Option(help="Certificate authorities to trust (default: the system's).")]
VerifyKey = Annotated[
    list[str] | None,
    typer.Option(help="A public key of the hub (base64, or a file): take only bundles signed by one of those given."),
]


def command(
    context: typer.Context,
    model: Annotated[Path, typer.Option(help="The ONNX file that `mergetta export` wrote.")],
    images: Images,
    bundle: Annotated[Path | None, typer.Option(help="The bundle that `mergetta build` wrote.")] = None,
    hub: Annotated[str | None, typer.Option(help="Address of a hub, instead of --bundle.")] = None,
    method: Method = "race-merge",
    option: MethodOption = None,
    mirror: Mirror = False,
    runs: Runs = True,
    head: Head = True,
    out: Out = Path("predictions.jsonl"),
    state: State = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per batch.")] = 64,
    max_wait: MaxWait = None,
    resize: Annotated[bool, typer.Option(help="Make images of another size fit, or refuse them.")] = True,
    frame: Annotated[str | None, typer.Option(help="HEIGHTxWIDTH of raw frames (default: the model's).")] = None,
    threads: Threads = None,
    token: Token = None,
    verify_key: VerifyKey = None,
    ca: Authorities = None,
    device: Annotated[str | None, typer.Option(help="What reports call this device (default: its host name).")] = None,
    hub_folder: HubFolder = Path("mergetta-hub"),
    refresh: Annotated[float, typer.Option(help="Seconds between two questions for a newer bundle.")] = 60,
    exclude: Exclude = None,
    exclude_own: Annotated[bool, typer.Option(help="Leave out the experts that this token contributed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")] = False,
) -> None:
    """Predict a stream and adapt to it with forward passes alone; settle when done, wake when the domain changes.

    Example: `mergetta run --model m.onnx --bundle b.safetensors --images photos/ --state state.safetensors`

    Example: `mergetta run --model m.onnx --hub https://hub.example --token … --images photos/ --batch-size 1`
    """
    from mergetta.device.device import Device
    from mergetta.device.stream import Batches, open_stream

    check_link(context, hub)
    connection = {
        "token": token, "verify_key": verify_key, "ca": ca, "device": device, "folder": hub_folder,
        "refresh": refresh, "exclude": exclude or (), "exclude_own": exclude_own,
    }  # fmt: skip
    with Device(
        model, bundle, hub, method=method, options=dict(parse_option(text) for text in option or ()), mirror=mirror,
        runs=runs, head=head, threads=threads, resize=resize, state=state, out=out, **(connection if hub else {}),
    ) as running:  # fmt: skip
        agent = running.agent
        assert agent.predictions is not None
        stream = open_stream(images, running.shape, agent.predictions.done, parse(frame))
        batches = Batches(stream, batch_size, max_wait, agent.save)
        with ended_by_signals(batches.stop) as signals:
            follow(agent, batches, quiet or str(out) == "-")
    if not quiet:
        report(agent.summary(), out, json, bool(signals))
    if signals:
        raise typer.Exit(128 + signals[0])
    if not agent.progress.images:
        typer.echo(f"error: {images} has no image that can be read ({agent.progress.bad} bad).", err=True)
        raise typer.Exit(1)


def check_link(context: typer.Context, hub: str | None) -> None:
    """Options of a hub's link are refused without a hub."""
    for name in () if hub else LINK:
        given = context.get_parameter_source(name)
        if given and given.name == "COMMANDLINE":
            raise typer.BadParameter(f"--{name.replace('_', '-')} goes with --hub only.")


def report(summary: Summary, out: Path, json: bool, interrupted: bool) -> None:
    """On standard output, unless the predictions are there."""
    generation = f", generation {summary.generation}" if summary.generation else ""
    text = (
        f"{'interrupted: ' if interrupted else ''}{out}: {summary.images} images ({summary.bad} bad), "
        f"{summary.milliseconds:.1f} ms and {summary.forwards:.2f} forward passes per image, "
        f"{summary.steps} steps, {summary.shifts} shifts, {summary.fallbacks} fallbacks, {summary.state}; "
        f"bundle {summary.bundle[:12]}{generation}; normalised with {summary.normalises}{in_runs(summary)}"
        f"{heaviest(summary.weights)}"
    )
    facts = {**dataclasses.asdict(summary), "interrupted": interrupted}
    typer.echo(json_format.dumps(facts) if json else text, err=str(out) == "-")


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE: a number, true, false, or text."""
    name, separator, value = text.partition("=")
    if not name or not separator:
        raise typer.BadParameter(f"--option must be NAME=VALUE, not {text!r}.")
    for parse in (json_format.loads, float):
        with contextlib.suppress(ValueError):
            return name.replace("-", "_"), parse(value)
    return name.replace("-", "_"), value


def in_runs(summary: Summary) -> str:
    """Whether the images before an image count."""
    from mergetta.streams.runs import LIKELY

    return "; classes come in runs" if summary.runs is not None and summary.runs > LIKELY else ""


def heaviest(weights: Mapping[str, float]) -> str:
    """The members that count most."""
    ranked = sorted(weights.items(), key=lambda item: -item[1])[:3]
    return "; merged " + ", ".join(f"{name} {weight:.2f}" for name, weight in ranked) if ranked else ""


def follow(agent: Agent, batches: Iterable[list[Item]], quiet: bool) -> None:
    """Run, and show how it goes, a few times a second."""
    due = math.inf if quiet else 0.0
    with Live(console=Console(stderr=True, quiet=quiet), auto_refresh=False, transient=True) as live:
        for summary in agent.run(batches):
            if time.monotonic() < due:
                continue
            due = time.monotonic() + 0.25
            live.update(
                Text(  # names are no markup
                    f"{summary.batches} batches, {summary.images} images, {summary.bad} bad · {summary.state} · "
                    f"{summary.steps} steps, {summary.shifts} shifts, {summary.fallbacks} fallbacks · "
                    f"entropy {summary.entropy:.3f} · {summary.forwards:.2f} passes per image · normalised with "
                    f"{summary.normalises}{in_runs(summary)}{heaviest(summary.weights)} · {memory()}"
                ),
                refresh=True,
            )


def parse(frame: str | None) -> tuple[int, int] | None:
    if frame is None:
        return None
    height, _, width = frame.partition("x")
    if not (height.isdecimal() and width.isdecimal() and int(height) and int(width)):
        raise typer.BadParameter(f"--frame must be HEIGHTxWIDTH, not {frame!r}.")
    return int(height), int(width)


@contextlib.contextmanager
def ended_by_signals(stop: Callable[[], None]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the stream with what was read, which is predicted and written; a second one ends all.

    Gives the list of signals that came, so far.
    """
    came: list[int] = []

    def note(number: int, stack: object) -> None:
        came.append(number)
        stop()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        restore()


def memory() -> str:
    """Resident memory of this process, where the system tells."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return "memory unknown"
    return f"{pages * 4096 / 2**20:.0f} MB"
