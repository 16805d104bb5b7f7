"""What must be known of a family to merge its experts: base groups, their blocks, preprocessing, a note."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mergetta.errors import MergettaError
from mergetta.files import Tensors, decode, encode, expect, expect_names
from mergetta.groups import Group, GroupValues, as_float32, check_groups, kind_of, last_blocks, paper_frozen
from mergetta.runtimes.base import Runtime

FORMAT, VERSION = "mergetta.family", 2


@dataclass(frozen=True, eq=False)
class FamilyFile:
    """Part of every expert file, and sent once per family to a hub by whoever registers it.

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
    blocks: tuple[int, ...] = ()
    """Of each group, in the order of the base; none where nobody has told."""

    def __post_init__(self) -> None:
        if not self.family:
            raise MergettaError("A family needs a name.")
        if not self.base:
            raise MergettaError("A family needs at least one group.")
        base = as_float32(self.base)
        check_groups(base, base, "The family's base")
        object.__setattr__(self, "base", base)
        unknown = set(self.frozen) - set(base)
        if unknown:
            raise MergettaError(f"Cannot freeze {min(unknown)!r}: the family has no such group.")
        if self.blocks and len(self.blocks) != len(base):
            raise MergettaError(f"The family has {len(base)} groups, but blocks of {len(self.blocks)}.")

    @classmethod
    def of_runtime(cls, runtime: Runtime, note: str = "", preprocessing: Mapping[str, Any] | None = None) -> FamilyFile:
        """Of the source model behind a runtime, with the paper's choice of what does not move."""
        groups = {group.name: np.asarray(runtime.groups[group.name]) for group in runtime.structure}
        blocks = tuple(group.block for group in runtime.structure)
        return cls(runtime.family, groups, paper_frozen(runtime.structure), note, preprocessing or {}, blocks)

    def check_base(self, groups: GroupValues) -> None:
        """Raise unless these are the base groups, value by value."""
        for name in sorted({*self.base, *groups}):
            if name not in self.base or name not in groups or not np.array_equal(self.base[name], groups[name]):
                raise MergettaError(
                    f"The family {self.family!r} was registered with another source model than this one: its group "
                    f"{name!r} differs. Tell the hub's administrator; nothing was uploaded."
                )

    def last_blocks(self, count: int) -> tuple[str, ...]:
        """The groups of the last `count` blocks."""
        places = zip(self.base.items(), self.blocks or (0,) * len(self.base), strict=True)
        return last_blocks([Group(name, vector.size, block, kind_of(name)) for (name, vector), block in places], count)

    def parts(self) -> tuple[Tensors, dict[str, Any]]:
        """Tensors and header, of a file of its own or of an expert's."""
        header = {
            "family": self.family,
            "groups": list(self.base),
            "frozen": list(self.frozen),
            "note": self.note,
            "preprocessing": dict(self.preprocessing),
            "blocks": list(self.blocks),
        }
        return {f"base/{name}": vector for name, vector in self.base.items()}, header

    def to_bytes(self) -> bytes:
        tensors, header = self.parts()
        return encode(tensors, FORMAT, VERSION, header)

    @classmethod
    def from_bytes(cls, data: bytes, source: str = "the family file") -> FamilyFile:
        tensors, header = decode(data, FORMAT, VERSION, source)
        return cls.of_parts(tensors, header, source)

    @classmethod
    def of_parts(cls, tensors: Tensors, header: Mapping[str, Any], source: str) -> FamilyFile:
        names = expect_names(header, "groups", source)
        missing = [name for name in names if f"base/{name}" not in tensors]
        if missing:
            raise MergettaError(f"{source} lacks the base of group {missing[0]!r}.")
        if len(tensors) > len(names):
            raise MergettaError(f"{source} holds tensors that are no part of a family.")
        family, note = (expect(header, key, str, source) for key in ("family", "note"))
        frozen = tuple(expect_names(header, "frozen", source))
        preprocessing = expect(header, "preprocessing", dict, source)
        blocks = expect(header, "blocks", list, source)
        if not all(isinstance(block, int) and block >= 0 for block in blocks):
            raise MergettaError(f"{source} has no valid 'blocks' in its header.")
        base = {name: tensors[f"base/{name}"] for name in names}
        try:
            return cls(family, base, frozen, note, preprocessing, tuple(blocks))
        except MergettaError as error:
            raise MergettaError(f"{source} cannot be used: {error}") from error
