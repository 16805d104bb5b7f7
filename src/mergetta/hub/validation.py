"""What may be stored of a file that came from outside, beyond its being well-formed."""

from __future__ import annotations

import json
import math
import unicodedata
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.expert import Expert
from mergetta.family_file import FamilyFile
from mergetta.groups import GroupValues, learnable

LARGEST = 1e4
"""No norm layer has weights of this size; sums of squares of larger ones drown everything else in rounding."""

LARGEST_MOMENT = 1e6
"""No layer's outputs are of this size either; what is taken out of sums of squares of larger ones leaves rounding."""

MOST_CHANNELS = 2**16
"""Of a signature, or of features: all clusters of a pool hold some."""

MOST_GROUPS = 4096
"""Of a family: no network has as many norm layers."""

SHORTEST = 1e-6
"""Of a task vector, as a share of the base's length: what 32 bits can tell apart."""

FURTHEST = 100.0
"""No domain shifts the moments of a network by so many standard deviations, or powers of e, on average."""


def check_text(text: str, what: str, longest: int) -> None:
    """Refuse what a database, a page or a terminal would choke on."""
    if len(text) > longest:
        raise MergettaError(f"{what} is longer than {longest} characters.")
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in text):
        raise MergettaError(f"{what} holds control characters or broken text.")


def check_expert(expert: Expert) -> None:
    check_text(expert.domain, "The name of the domain", 200)
    if not expert.domain.isprintable():  # it becomes the name of a member, which devices refuse then
        raise MergettaError("The name of the domain holds invisible characters.")
    check_text(str(expert.provenance.get("method", "")), "The name of the method", 100)
    if max(float(np.abs(expert.groups[name]).max()) for name in learnable(expert.groups)) > LARGEST:
        raise MergettaError(f"This expert has weights above {LARGEST:g}: it has diverged.")
    for kind, moments in (("signature", expert.signature), ("features", expert.features)):
        if moments is not None and moments.shape[1] > MOST_CHANNELS:
            raise MergettaError(f"This expert's {kind} has more than {MOST_CHANNELS} channels.")
        if moments is not None and (np.abs(moments[0]).max() > LARGEST_MOMENT or moments[1].max() > LARGEST_MOMENT**2):
            raise MergettaError(f"This expert's {kind} has values above {LARGEST_MOMENT:g}: it has diverged.")


def check_length(norm: float, base: GroupValues) -> None:
    """Of a task vector: experts of no length would decide what is a usual one."""
    if norm <= SHORTEST * math.sqrt(sum(float(np.square(base[name]).sum()) for name in learnable(base))):
        raise MergettaError("This expert has learnt nothing: its scales and shifts are the source model's.")


def check_family(file: FamilyFile, memory: int) -> None:
    check_text(file.note, "The note", 2000)
    if len(file.base) > MOST_GROUPS:
        raise MergettaError(f"This family has {len(file.base)} groups, and the hub allows {MOST_GROUPS}.")
    for name in file.base:
        check_text(name, "The name of a group", 200)
    needed = sum(8 * vector.size**2 for vector in file.base.values())
    if needed > memory:
        raise MergettaError(f"This family needs {needed:,} bytes of scatter matrices, and the hub allows {memory:,}.")
    check_json(dict(file.preprocessing), "The preprocessing", 10_000)


def check_json(value: Any, what: str, longest: int) -> None:
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (ValueError, RecursionError) as error:
        raise MergettaError(f"{what} cannot be written as JSON.") from error
    check_text(text, what, longest)
    if depth(value) > 8:
        raise MergettaError(f"{what} is nested too deeply.")


def depth(value: Any) -> int:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max((depth(part) for part in parts), default=0)
