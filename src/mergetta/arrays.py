"""The two crossings between NumPy and a runtime's own arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

Array = Any


def to_numpy(array: Array) -> NDArray[Any]:
    return array.numpy(force=True) if hasattr(array, "numpy") else np.asarray(array)


def beside(values: NDArray[Any], reference: Array) -> Array:
    """NumPy values as an array of the reference's library and device; floats take its type."""
    dtype = reference.dtype if values.dtype.kind == "f" else None
    return array_namespace(reference).asarray(values, dtype=dtype, device=device(reference))
