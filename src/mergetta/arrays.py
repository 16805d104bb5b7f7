"""The two crossings between NumPy and a runtime's own arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any


def array_namespace(array: Array) -> Any:
    """The functions of an array's library, by the array API standard.

    NumPy follows it from 2.1 on. A device is then spared `array_api_compat`'s copy of NumPy, which takes 12 MB.
    """
    if isinstance(array, np.ndarray) and hasattr(np, "__array_api_version__"):
        return np
    from array_api_compat import array_namespace as found

    return found(array)


def to_numpy(array: Array) -> NDArray[Any]:
    return array.numpy(force=True) if hasattr(array, "numpy") else np.asarray(array)


def beside(values: NDArray[Any], reference: Array) -> Array:
    """NumPy values as an array of the reference's library and device; floats take its type."""
    dtype = reference.dtype if values.dtype.kind == "f" else None
    if isinstance(reference, np.ndarray):
        return np.asarray(values, dtype=dtype)
    return array_namespace(reference).asarray(values, dtype=dtype, device=reference.device)
