"""An expert: the groups that a strong device adapted on one domain, with moments, signature and provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.family_file import FamilyFile
from mergetta.files import decode, encode, expect, read_bytes, write_atomically
from mergetta.groups import GroupValues, as_float32, check_groups

FORMAT, VERSION = "mergetta.expert", 3
PARTS = ("signature", "features", "spread")


def check_moments(moments: NDArray[Any], what: str) -> None:
    """Raise unless this is a mean and a variance per channel."""
    if moments.ndim != 2 or len(moments) != 2 or not moments.size:
        raise MergettaError(f"{what} must have shape (2, channels), not {moments.shape}.")
    if not np.isfinite(moments).all() or (moments[1] < 0).any():
        raise MergettaError(f"{what} must be finite, with variances that are not negative.")


@dataclass(frozen=True, eq=False)
class Expert:
    """What a strong device shares: a few kilobytes, never an image.

    >>> expert = Expert({"bn.weight": np.ones(2)}, family="f", domain="fog")
    >>> Expert.from_bytes(expert.to_bytes()).domain
    'fog'
    """

    groups: GroupValues
    """Adapted scales and shifts and, for BatchNorm, the moments that belong to them; one vector per group."""
    family: str = ""
    """Fingerprint of the source model that was adapted."""
    domain: str = ""
    """What the device calls its domain."""
    signature: NDArray[np.floating[Any]] | None = None
    """Per-channel mean and variance after the stem, (2, C): how one domain is told from another."""
    features: NDArray[np.floating[Any]] | None = None
    """Mean and variance of the classifier's input, (2, F): what alignment goes by where there is no BatchNorm."""
    spread: NDArray[np.floating[Any]] | None = None
    """(2, layers): how much an image's own mean, and second moment, varies between images, on average over the channels
    of each BatchNorm layer (or of the features); so it is known how many images tell the domain.
    """
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: method, samples, seed, settings."""
    source: FamilyFile | None = None
    """The source model's own groups, so that whoever has experts can merge them."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise MergettaError("An expert needs at least one group.")
        groups = as_float32(self.groups)
        check_groups(groups, groups, "The expert")
        object.__setattr__(self, "groups", groups)
        for part in PARTS:
            if getattr(self, part) is not None:
                moments = np.asarray(getattr(self, part), dtype=np.float32)
                check_moments(moments, f"The expert's {part}")
                if part == "spread" and (moments < 0).any():
                    raise MergettaError("The expert's spread must not be negative.")
                object.__setattr__(self, part, moments)
        if self.source is not None:
            if self.source.family != self.family:
                raise MergettaError(f"The expert's source model is {self.source.family!r}, not {self.family!r}.")
            check_groups(groups, self.source.base, "The expert")

    def to_bytes(self) -> bytes:
        tensors = {f"group/{name}": vector for name, vector in self.groups.items()}
        tensors |= {part: value for part in PARTS if (value := getattr(self, part)) is not None}
        header: dict[str, Any] = {"family": self.family, "domain": self.domain, "provenance": dict(self.provenance)}
        if self.source is not None:
            base, header["source"] = self.source.parts()
            tensors |= base
        return encode(tensors, FORMAT, VERSION, header)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the expert") -> Expert:
        tensors, header = decode(data, FORMAT, VERSION, source, "make it anew with `mergetta adapt`")
        groups = {name.removeprefix("group/"): t for name, t in tensors.items() if name.startswith("group/")}
        base = {name: t for name, t in tensors.items() if name.startswith("base/")} if "source" in header else {}
        unknown = tensors.keys() - base.keys() - {*PARTS, *(f"group/{name}" for name in groups)}
        if unknown:
            raise MergettaError(f"{source} holds {min(unknown)!r}, which is no part of an expert.")
        family, domain = (expect(header, key, str, source) for key in ("family", "domain"))
        provenance = expect(header, "provenance", dict, source)
        model = (
            FamilyFile.of_parts(base, expect(header, "source", dict, source), source) if "source" in header else None
        )
        try:
            parts = {part: tensors.get(part) for part in PARTS}
            return cls(groups, family, domain, **parts, provenance=provenance, source=model)
        except MergettaError as error:
            raise MergettaError(f"{source} cannot be used: {error}") from error

    def save(self, path: str | Path) -> None:
        write_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path, family: str | None = None) -> Expert:
        """Read an expert; with `family`, refuse one that was made from another source model."""
        expert = cls.from_bytes(read_bytes(path), str(path))
        if family is not None and expert.family != family:
            raise MergettaError(f"{path} belongs to the family {expert.family!r}, but this is {family!r}.")
        return expert
