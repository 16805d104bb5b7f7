"""An expert: the groups that a strong device adapted on one domain, with feature statistics and provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError
from mergetta.files import decode, encode, expect, read_bytes, write_atomically
from mergetta.groups import GroupValues, check_groups

FORMAT, VERSION = "mergetta.expert", 1


def check_statistics(statistics: NDArray[Any]) -> None:
    """Raise unless this is a mean and a variance per channel."""
    if statistics.ndim != 2 or len(statistics) != 2 or not statistics.size:
        raise MergettaError(f"Feature statistics must have shape (2, channels), not {statistics.shape}.")
    if not np.isfinite(statistics).all() or (statistics[1] < 0).any():
        raise MergettaError("Feature statistics must be finite, with variances that are not negative.")


@dataclass(frozen=True, eq=False)
class Expert:
    """What a strong device shares: a few kilobytes, never an image.

    >>> expert = Expert({"bn.weight": np.ones(2)}, family="f", domain="fog")
    >>> Expert.from_bytes(expert.to_bytes()).domain
    'fog'
    """

    groups: GroupValues
    """Adapted values, one vector per group."""
    family: str = ""
    """Fingerprint of the source model that was adapted."""
    domain: str = ""
    statistics: NDArray[np.floating[Any]] | None = None
    """Per-channel mean and variance after the stem, (2, C): how CoLA tells domains apart."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """How it was made: method, samples, seed, settings."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise MergettaError("An expert needs at least one group.")
        groups = {name: np.asarray(vector, dtype=np.float32) for name, vector in self.groups.items()}
        check_groups(groups, groups, "The expert")
        object.__setattr__(self, "groups", groups)
        if self.statistics is not None:
            statistics = np.asarray(self.statistics, dtype=np.float32)
            check_statistics(statistics)
            object.__setattr__(self, "statistics", statistics)

    def to_bytes(self) -> bytes:
        tensors = {f"group/{name}": vector for name, vector in self.groups.items()}
        if self.statistics is not None:
            tensors["statistics"] = self.statistics
        header = {"family": self.family, "domain": self.domain, "provenance": dict(self.provenance)}
        return encode(tensors, FORMAT, VERSION, header)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the expert") -> Expert:
        tensors, header = decode(data, FORMAT, VERSION, source)
        groups = {name.removeprefix("group/"): t for name, t in tensors.items() if name.startswith("group/")}
        unknown = [name for name in tensors if not name.startswith("group/") and name != "statistics"]
        if unknown:
            raise MergettaError(f"{source} holds {min(unknown)!r}, which is no part of an expert.")
        family, domain = (expect(header, key, str, source) for key in ("family", "domain"))
        provenance = expect(header, "provenance", dict, source)
        try:
            return cls(groups, family, domain, tensors.get("statistics"), provenance)
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
