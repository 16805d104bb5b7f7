"""Adapters around adapters: one concern each that any method may want."""

from __future__ import annotations

from mergetta.adapters.base import Adapter
from mergetta.adapters.wrappers.filtered import Filtered
from mergetta.adapters.wrappers.head import MANY, Headed
from mergetta.adapters.wrappers.mirrored import Mirrored


def wrapped(
    adapter: Adapter, mirror: bool | None = False, runs: bool | None = False, head: bool | None = False
) -> Adapter:
    """A method with what is asked for around it: runs are told by what both views of an image say to its head. With
    more than 100 classes there is no head.
    """
    adapter = Headed(adapter) if head and adapter.runtime.classes <= MANY else adapter
    adapter = Mirrored(adapter) if mirror else adapter
    return Filtered(adapter) if runs else adapter
