"""What is saved of a stream is declared once, and checked by one function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergetta.errors import MergettaError

LARGEST = 2**62
"""No count is larger."""


@dataclass(frozen=True)
class Field:
    """An array or a number of a state: its shape (None: any length), its range, and whether it counts something."""

    shape: tuple[int | None, ...] = ()
    low: float = -np.inf
    high: float = np.inf
    whole: bool = False


def checked(state: Mapping[str, Any], fields: Mapping[str, Field], prefix: str = "") -> dict[str, NDArray[Any]]:
    """The fields of a state as arrays of float64 or int64, or one sentence on the first that does not fit.

    >>> checked({"stream.count": 3}, {"count": Field(low=0, whole=True)}, "stream.")
    {'count': array(3)}
    """
    found = {}
    for name, field in fields.items():
        key = f"{prefix}{name}"
        if key not in state:
            raise MergettaError(
                f"This state does not fit the adapter: it has no {key!r}. Was it made with other options?"
            )
        try:
            array = np.array(state[key])
            fits = array.dtype.kind in ("biu" if field.whole else "fbiu")
        except (TypeError, ValueError):
            fits = False
        if fits:
            fits = array.ndim == len(field.shape)
            fits = fits and all(want in (None, has) for want, has in zip(field.shape, array.shape, strict=True))
            high = min(field.high, LARGEST) if field.whole else field.high
            fits = fits and bool(np.isfinite(array).all() and ((array >= field.low) & (array <= high)).all())
        if not fits:
            raise MergettaError(f"This state does not fit the adapter: {key!r}.")
        found[name] = array.astype(np.int64 if field.whole else np.float64)
    return found
