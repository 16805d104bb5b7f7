"""What a hub must know of a family before it can take its experts: base groups, structure, preprocessing, recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.files import decode, encode, expect, expect_names
from mergetta.groups import GroupValues, check_groups, paper_frozen
from mergetta.runtimes.base import Runtime

FORMAT, VERSION = "mergetta.family", 1


@dataclass(frozen=True, eq=False)
class FamilyFile:
    """Sent once per family by whoever contributes its first expert.

    >>> FamilyFile.from_bytes(FamilyFile("f", {"bn.weight": np.ones(2)}).to_bytes()).family
    'f'
    """

    family: str
    base: GroupValues
    frozen: tuple[str, ...] = ()
    """Groups that devices merge but do not optimise."""
    note: str = ""
    """The architecture, in words."""
    preprocessing: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.family:
            raise MergettaError("A family needs a name.")
        if not self.base:
            raise MergettaError("A family needs at least one group.")
        base = {name: np.asarray(vector, dtype=np.float32) for name, vector in self.base.items()}
        check_groups(base, base, "The family's base")
        object.__setattr__(self, "base", base)
        unknown = set(self.frozen) - set(base)
        if unknown:
            raise MergettaError(f"Cannot freeze {min(unknown)!r}: the family has no such group.")

    @classmethod
    def of_runtime(cls, runtime: Runtime, note: str = "", preprocessing: Mapping[str, Any] | None = None) -> FamilyFile:
        """Of the source model behind a runtime, with the paper's choice of what does not move."""
        groups = {name: np.asarray(vector) for name, vector in runtime.groups.items()}
        return cls(runtime.family, groups, paper_frozen(runtime.structure), note, preprocessing or {})

    def check_base(self, groups: GroupValues) -> None:
        """Raise unless these are the base groups, value by value."""
        for name in sorted({*self.base, *groups}):
            if name not in self.base or name not in groups or not np.array_equal(self.base[name], groups[name]):
                raise MergettaError(
                    f"The family {self.family!r} was registered with another source model than this one: its group "
                    f"{name!r} differs. Tell the hub's administrator; nothing was uploaded."
                )

    def to_bytes(self) -> bytes:
        header = {
            "family": self.family,
            "groups": list(self.base),
            "frozen": list(self.frozen),
            "note": self.note,
            "preprocessing": dict(self.preprocessing),
        }
        return encode({f"base/{name}": vector for name, vector in self.base.items()}, FORMAT, VERSION, header)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the family file") -> FamilyFile:
        tensors, header = decode(data, FORMAT, VERSION, source)
        names = expect_names(header, "groups", source)
        missing = [name for name in names if f"base/{name}" not in tensors]
        if missing:
            raise MergettaError(f"{source} lacks the base of group {missing[0]!r}.")
        if len(tensors) > len(names):
            raise MergettaError(f"{source} holds tensors that are no part of a family.")
        family, note = (expect(header, key, str, source) for key in ("family", "note"))
        frozen = tuple(expect_names(header, "frozen", source))
        preprocessing = expect(header, "preprocessing", dict, source)
        base = {name: tensors[f"base/{name}"] for name in names}
        try:
            return cls(family, base, frozen, note, preprocessing)
        except MergettaError as error:
            raise MergettaError(f"{source} cannot be used: {error}") from error
