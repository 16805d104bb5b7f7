"""The one error that users meet: a sentence that says what is wrong and what to do about it."""

from __future__ import annotations

from pathlib import Path


class MergettaError(ValueError):
    """Input that cannot be used; the message is one sentence for a person. The command line exits with 2."""


def how_to_install(extras: str) -> str:
    """The command that adds extras: from the clone that this code is in, or from where it was installed."""
    clone = Path(__file__).parents[2]
    place = clone if (clone / "constraints.txt").is_file() else installed_from()
    if place is None or not place.exists():
        return f"pip install 'mergetta[{extras}]'"
    limits = f"-c {place / 'constraints.txt'} " if (place / "constraints.txt").is_file() else ""
    return f"pip install {limits}{'-e ' if place == clone else ''}'{place}[{extras}]'"


def installed_from() -> Path | None:
    """The clone or the wheel that pip was given; None if it came from an index."""
    import json  # here, because all modules import this one, and these would take 9 MB of a device's memory
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        told = json.loads(distribution("mergetta").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return None
    parts = urlsplit(told.get("url", ""))
    return Path(url2pathname(parts.path)) if parts.scheme == "file" else None
