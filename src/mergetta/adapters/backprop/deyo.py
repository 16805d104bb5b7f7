"""DeYO (Lee et al. 2024): entropy of the samples that are certain and depend on the object's shape."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from mergetta.adapters.backprop.base import BackpropAdapter
from mergetta.groups import paper_frozen
from mergetta.losses import Deyo
from mergetta.runtimes.torch_runtime import TorchRuntime


class DeYO(BackpropAdapter):
    """The last block (CNN) or the last three (transformer) stay as they are, unless `frozen` says otherwise."""

    def __init__(
        self,
        runtime: TorchRuntime,
        plpd: float = 0.2,
        destroy: str = "patch",
        frozen: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        frozen = paper_frozen(runtime.structure) if frozen is None else frozen
        super().__init__(runtime, Deyo(plpd=plpd, destroy=destroy), frozen=frozen, **options)
