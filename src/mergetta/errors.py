"""The one error that users meet: a sentence that says what is wrong and what to do about it."""

from __future__ import annotations

from pathlib import Path


class MergettaError(ValueError):
    """Input that cannot be used; the message is one sentence for a person. The command line exits with 2."""


def how_to_install(extras: str) -> str:
    """The command that adds extras: from the clone that this code is in, or to an installed wheel."""
    clone = Path(__file__).parents[2]
    if (clone / "constraints.txt").is_file():
        return f"pip install -c {clone / 'constraints.txt'} -e '{clone}[{extras}]'"
    return f"pip install 'mergetta[{extras}]'"
