"""`mergetta hub`: serve, tokens, keys, probes, the audit log, check, backup and restore, demo."""

from __future__ import annotations

import dataclasses
import json as json_format
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mergetta.cli import hub_token
from mergetta.cli.hub_place import Blobs, Database, Folder, day, opened, settings_of
from mergetta.cli.options import Keep, MaxRank, Members, Tolerance

if TYPE_CHECKING:
    from mergetta.hub.demo import Picture
    from mergetta.hub.settings import HubSettings, Recipe

app = typer.Typer(help="The server that collects experts and hands out bundles.", no_args_is_help=True)
app.add_typer(hub_token.app, name="token")


class LogLevel(StrEnum):
    info = "info"
    warning = "warning"


@app.command("serve")
def serve(
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8321,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    signing_key: Annotated[Path | None, typer.Option(help="Sign bundles with this key (`mergetta hub key`).")] = None,
    certificate: Annotated[Path | None, typer.Option(help="TLS certificate (PEM).")] = None,
    certificate_key: Annotated[Path | None, typer.Option(help="TLS private key (PEM).")] = None,
    max_upload: Annotated[int, typer.Option(min=1024, help="Most bytes of one request.")] = 64 * 2**20,
    public: Annotated[bool, typer.Option("--public", help="Bundles need no token: a CDN may cache them.")] = False,
    screen: Annotated[bool, typer.Option(help="Quarantine experts that are unlike all others.")] = True,
    probe: Annotated[
        bool, typer.Option(help="Merge experts of a family only once it has images to try them on.")
    ] = True,
    open: Annotated[
        bool, typer.Option("--open", help="For a lab: merge uploads untried, of tokens that nobody has approved too.")
    ] = False,
    bundle_days: Annotated[
        float | None, typer.Option(min=1, help="Devices refuse a bundle that is older (default: never).")
    ] = None,
    keep: Keep = 0.4,
    max_rank: MaxRank = 5,
    tolerance: Tolerance = 1e-2,
    members: Members = 16,
    weight: Annotated[
        float, typer.Option(help="Initial coefficients of all experts together (paper: 14 × 0.1).")
    ] = 1.4,
    log_level: Annotated[LogLevel, typer.Option(help="`info` also logs every request.")] = LogLevel.warning,
) -> None:
    """Run the hub. The first start prints an administrator's token, once.

    Example: `mergetta hub serve --folder /var/lib/mergetta --host 0.0.0.0 --port 8321`
    """
    recipe = recipe_of(keep=keep, max_rank=max_rank, tolerance=tolerance, members=members, weight=weight)
    check_files(signing_key, certificate, certificate_key)
    check_port(host, port)
    settings = settings_of(
        folder, database, blobs, recipe=recipe, max_upload=max_upload, public=public, screen=screen, probe=probe,
        open=open, bundle_days=bundle_days, signing_key=str(signing_key) if signing_key else None,
    )  # fmt: skip
    greet_first_administrator(settings)
    settings.to_environment()
    scheme = "https" if certificate else "http"
    Console().print(f"mergetta hub: {scheme}://{host}:{port}  ·  API: /openapi.json", highlight=False)
    import uvicorn

    from mergetta.hub.protocol import server_options

    uvicorn.run(
        "mergetta.hub.app:from_environment", factory=True, host=host, port=port, workers=workers,
        ssl_certfile=certificate, ssl_keyfile=certificate_key, **server_options(log_level.value),
    )  # fmt: skip


def recipe_of(**values: float) -> Recipe:
    from pydantic import ValidationError

    from mergetta.errors import MergettaError
    from mergetta.hub.settings import Recipe

    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        raise MergettaError(f"--{first['loc'][0]}: {first['msg']}.") from error


def check_files(signing_key: Path | None, certificate: Path | None, certificate_key: Path | None) -> None:
    from mergetta.errors import MergettaError
    from mergetta.hub.signing import Signer

    if certificate is not None:
        check_certificate(certificate, certificate_key)
    elif certificate_key is not None:
        raise MergettaError("--certificate-key goes with --certificate.")
    if signing_key is not None:
        Signer.load(signing_key)


def greet_first_administrator(settings: HubSettings) -> None:
    from mergetta.hub.store import Store

    store = Store(settings.database, settings.blobs)
    if not store.tokens():
        secret, _ = store.create_token("first administrator", "admin")
        typer.echo(f"administrator's token, shown only now: {secret}")
    store.close()


def check_certificate(certificate: Path, key: Path | None) -> None:
    import ssl

    from mergetta.errors import MergettaError
    from mergetta.files import read_bytes

    for file in (certificate, key):
        if file is not None:
            read_bytes(file)
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise MergettaError(f"{certificate} and its key are no TLS certificate in PEM: {error}.") from error


def check_port(host: str, port: int) -> None:
    """Whether a hub can listen there; said before anything is begun."""
    import socket

    from mergetta.errors import MergettaError

    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise MergettaError(
            f"Cannot listen on port {port} of {host}: {error.strerror or error}; choose another --port or --host."
        ) from error


@app.command("key")
def key(out: Annotated[Path, typer.Argument(dir_okay=False, help="The private key to write (PEM).")]) -> None:
    """Make a key to sign bundles with, and print the public half, which devices verify with.

    Example: `mergetta hub key hub-key.pem`
    """
    from mergetta.hub.signing import Signer

    typer.echo(Signer.create(out).public_key)


@app.command("probe")
def probe(
    images: Annotated[str | None, typer.Argument(help="Clean images without labels: FILE.npz or a folder.")] = None,
    model: Annotated[Path | None, typer.Option(help="The ONNX file that `mergetta export` wrote.")] = None,
    remove: Annotated[str | None, typer.Option(help="Try the experts of this family no more.")] = None,
    count: Annotated[int, typer.Option(min=8, help="Images that are used; more take longer per upload.")] = 32,
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
) -> None:
    """Try every expert on clean images, here or by a running hub: what ruins predictions on them is quarantined.

    Registers the model's family if the hub does not know it. Until there are images, experts wait.

    Example: `mergetta hub probe photos/ --model model.onnx`
    """
    from mergetta.errors import MergettaError

    store = opened(folder, database, blobs)
    registered = {each.id for each in store.families()}
    if remove is not None:
        if images is not None or model is not None:
            raise MergettaError("--remove goes with no images and no --model.")
        if remove not in registered:
            raise MergettaError(f"The hub knows no family {remove!r}, but {', '.join(sorted(registered)) or 'none'}.")
        store.put_probes(remove, None)
        typer.echo(f"experts of {remove} are tried on no images any more; new ones wait, unless the hub asks for none")
        return
    if images is None or model is None:
        raise MergettaError("Give images and --model, or --remove FAMILY.")
    from mergetta.data.images import load_images
    from mergetta.device.stream import ImageShape
    from mergetta.family_file import FamilyFile
    from mergetta.files import read_bytes
    from mergetta.hub.probes import ProbeFile, Probes, different
    from mergetta.runtimes.onnx_runtime import OnnxRuntime

    content, runtime = read_bytes(model), OnnxRuntime(model)
    known = runtime.family in registered
    if known:
        store.family_file(runtime.family).check_base(runtime.groups)
    shape = ImageShape(runtime.metadata["channels"], runtime.metadata["size"])
    chosen = [shape.fit(image) for image in different(load_images(images, shape.channels, shape.size), count)]
    file = ProbeFile.of_images(content, np.stack(chosen))
    probes = Probes(file, runtime=runtime)
    probes.check()
    if not known:
        store.put_family(FamilyFile.of_runtime(runtime).to_bytes(), runtime.family)
        typer.echo(f"{runtime.family} is registered")
    store.put_probes(runtime.family, file.to_bytes())
    views = f"{len(file.views)} views of {len(chosen)} images"
    typer.echo(
        f"experts of {runtime.family} are tried on {views}, where the source model's own loss is {probes.own:.3g}"
    )


@app.command("audit")
def audit(
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON, one entry per line, oldest first.")] = False,
) -> None:
    """Show who did what: uploads, decisions, tokens, families, logins. The log only ever grows.

    Example: `mergetta hub audit --json`
    """
    entries = opened(folder, database, blobs).audit()[::-1]
    if json:
        for entry in entries:
            typer.echo(json_format.dumps(dataclasses.asdict(entry)))
        return
    whole = [Column(name, no_wrap=True) for name in ("time", "to")]
    who, did, family, why = (Column(name, overflow="fold") for name in ("who", "did", "family", "why"))
    table = Table(whole[0], who, did, whole[1], family, why)
    for entry in entries:
        words = (entry.name, entry.action, entry.subject[:12], entry.family, entry.why)
        table.add_row(day(entry.time), *map(escape, words))
    Console().print(table)


@app.command("check")
def check(
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what can be mended.")] = False,
) -> None:
    """Read everything that is stored, and say what is missing, damaged or named by nobody.

    Example: `mergetta hub check --repair`
    """
    from mergetta.hub.store import upkeep

    found = upkeep.check(opened(folder, database, blobs), repair)
    for finding in found:
        typer.echo(f"{finding.problem}: {finding.remedy}")
    typer.echo(f"{len(found)} problems" if found else "all is as it should be")
    if found and not repair:
        raise typer.Exit(1)


@app.command("backup")
def backup(
    out: Annotated[Path, typer.Argument(file_okay=False, help="A new folder for the copy.")],
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
) -> None:
    """Copy a hub's data as it is at this moment, while the hub runs; PostgreSQL and S3 too.

    Example: `mergetta hub backup copies/monday --folder hub`
    """
    from mergetta.hub.store import upkeep

    missing = upkeep.backup(opened(folder, database, blobs), opened(out, None, None, new=True))
    typer.echo(f"{out}: a copy" + (f", without {missing} contents that are lost" if missing else ""))


@app.command("restore")
def restore(
    source: Annotated[Path, typer.Argument(help="The folder that `backup` wrote.")],
    folder: Folder = Path("hub"),
    database: Database = None,
    blobs: Blobs = None,
) -> None:
    """Fill an empty hub from a copy. Its bundles are built again when it starts, and devices take them for newer.

    Example: `mergetta hub restore copies/monday --folder new-hub`
    """
    from mergetta.hub.store import upkeep

    missing = upkeep.restore(opened(source, None, None), opened(folder, database, blobs, new=True))
    typer.echo(f"restored from {source}" + (f", without {missing} contents that are lost" if missing else ""))


@app.command("demo")
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="How long the weak devices predict.")] = 120.0,
    headless: Annotated[bool, typer.Option("--headless", help="Print lines, not a live table.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The hub's port; 0 for any free one.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write the error over time here.")] = None,
    html: Annotated[Path, typer.Option("--html", dir_okay=False, help="The page to write.")] = Path(
        "mergetta-fleet.html"
    ),
) -> None:
    """A fleet on this machine: a hub, 4 strong and 6 weak devices as processes; watch it get better.

    Example: `mergetta hub demo --seconds 180`
    """
    import tempfile

    from rich.live import Live

    from mergetta.bench.fleet import Moment, listed, write_fleet
    from mergetta.files import write_atomically
    from mergetta.hub.demo import IMAGES, run_demo

    if port:
        check_port("127.0.0.1", port)
    console = Console()
    live = Live(console=console, auto_refresh=False, transient=True)  # the last table is printed for good
    moments: list[Moment] = []
    last: Picture | None = None
    with tempfile.TemporaryDirectory() as folder:
        for news in run_demo(Path(folder), port, seconds):
            if isinstance(news, str):
                console.print(news, highlight=False, soft_wrap=True)
                continue
            last = news
            moments.append(Moment(news.seconds, news.experts, news.errors(slice(-IMAGES, None))))
            if not headless and console.is_terminal:
                live.start()
                live.update(fleet_table(news), refresh=True)
            elif moments[-1].errors and len(moments) % 10 == 0:
                each = ", ".join(f"{domain} {error:.0f}" for domain, error in moments[-1].errors.items())
                error = news.mean(slice(-IMAGES, None))
                console.print(f"{news.seconds:4.0f} s: {news.experts:2} experts, error {error:.1f} % ({each})")
        live.stop()
        if last is None:
            return
        console.print(fleet_table(last))
        deployed = {device.domain: device.deployed for device in last.devices}
        if json:
            facts = {"deployed": deployed, "fleet": listed(moments)}
            write_atomically(json, json_format.dumps(facts, indent=1).encode())
        write_fleet(html, deployed, moments)
        console.print(f"page: {html}", highlight=False)


def fleet_table(picture: Picture) -> Table:
    """Error per weak device: as deployed, over its first images, over its latest."""
    from mergetta.hub.demo import IMAGES

    table = Table(
        "device", "meets", "images", "as deployed", f"first {IMAGES}", f"latest {IMAGES}",
        title=f"{picture.experts} experts after {picture.seconds:.0f} s · error in percent",
    )  # fmt: skip
    first, latest = slice(0, IMAGES), slice(-IMAGES, None)

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:.1f}"

    for device in picture.devices:
        errors = (percent(device.deployed), percent(device.error(first)), percent(device.error(latest)))
        table.add_row(device.name, device.domain.replace("_", " "), str(len(device.wrong)), *errors)
    deployed = sum(device.deployed for device in picture.devices) / max(1, len(picture.devices))
    table.add_section()
    table.add_row("fleet", "", "", percent(deployed), percent(picture.mean(first)), percent(picture.mean(latest)))
    return table
