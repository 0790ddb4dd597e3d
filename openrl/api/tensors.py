"""Numbers from the wire to numpy. Every problem is a `ValueError` that says what is wrong;
the caller knows where.

What comes out is int64 or float32, C-contiguous, of one or two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from openrl.types import Array, Cells

Numbers: TypeAlias = memoryview | bytes | Sequence[int | float]

_WIRE_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int64": np.dtype("<i8"),
    "int32": np.dtype("<i4"),
    "bfloat16": np.dtype("<u2"),  # numpy has none: the upper half of a float32
}


@dataclass(slots=True)
class ElementBudget:
    """How many elements the tensors of one request may still have, once dense.

    A sparse tensor names its own dense size in a few bytes: without a bound over the whole
    request, a small body could ask for all memory.
    """

    left: int

    def spend(self, elements: int) -> None:
        if elements > self.left:
            raise ValueError("the request's tensors have more elements than this server accepts")
        self.left -= elements


def tensor(
    data: Numbers,
    dtype: str,
    shape: Sequence[int] | None,
    crow: Numbers | None,
    col: Numbers | None,
    budget: ElementBudget,
) -> Array:
    """Dense, or CSR of a two-dimensional tensor when `crow` and `col` are given; cells that a
    sparse tensor does not list are 0."""
    values = numbers(data, dtype)
    if crow is None and col is None:
        budget.spend(values.size)
        return _shaped(values, shape)
    sparse = _sparse(values, shape, crow, col)
    rows, columns = sparse.shape
    budget.spend(rows * columns)
    dense = np.zeros((rows, columns), dtype=values.dtype)
    dense[sparse.rows(), sparse.col] = values
    return dense


def cells(
    data: Numbers,
    dtype: str,
    shape: Sequence[int] | None,
    crow: Numbers | None,
    col: Numbers | None,
    budget: ElementBudget,
) -> Cells:
    """Of a two-dimensional tensor, in the layout that it came in."""
    values = numbers(data, dtype)
    budget.spend(values.size)
    if crow is not None or col is not None:
        return _sparse(values, shape, crow, col)
    if shape is None or len(shape) != 2:
        raise ValueError("the shape must be [N, K]")
    rows, columns = _shaped(values, shape).shape
    return Cells(values, (rows, columns))


def _sparse(
    values: Array, shape: Sequence[int] | None, crow: Numbers | None, col: Numbers | None
) -> Cells:
    if crow is None or col is None:
        raise ValueError("a sparse tensor needs both its row pointers and its column indices")
    rows, columns = _matrix_shape(shape)
    pointers, places = numbers(crow, "int64"), numbers(col, "int64")
    _check_csr(values, pointers, places, rows, columns)
    return Cells(values, (rows, columns), pointers, places)


def numbers(data: Numbers, dtype: str) -> Array:
    """Flat int64 or float32, from little-endian bytes of `dtype` or from a list."""
    wire = _WIRE_DTYPES.get(dtype)
    if wire is None:
        raise ValueError(f"dtype {dtype!r} is not known: {', '.join(_WIRE_DTYPES)}")
    if isinstance(data, memoryview | bytes):
        return _widened(_from_bytes(data, wire, dtype), dtype)
    return _from_list(data, integral=dtype.startswith("int"))


def tokens(data: Numbers) -> NDArray[np.int32]:
    """Token ids, int32 [N], from int32 bytes or from a list."""
    if isinstance(data, memoryview | bytes):
        return _from_bytes(data, _WIRE_DTYPES["int32"], "int32").astype(np.int32, copy=False)
    ids = _from_list(data, integral=True)
    if ids.size and (ids.min() < 0 or ids.max() > np.iinfo(np.int32).max):
        raise ValueError("token ids are between 0 and 2147483647")
    return ids.astype(np.int32)


def _from_bytes(data: memoryview | bytes, wire: np.dtype[Any], dtype: str) -> Array:
    size = memoryview(data).nbytes
    if size % wire.itemsize:
        raise ValueError(f"{size} bytes are no whole number of {dtype}")
    flat = np.frombuffer(data, dtype=wire)
    # A view into a message may start anywhere; tensor libraries want aligned memory.
    return flat if flat.flags.aligned else flat.copy()


def _widened(flat: Array, dtype: str) -> Array:
    if dtype == "int32":
        return flat.astype(np.int64)
    if dtype == "bfloat16":
        return (flat.astype(np.uint32) << 16).view(np.float32)
    return flat


def _from_list(data: Sequence[int | float], *, integral: bool) -> Array:
    try:
        if not integral:
            with np.errstate(over="ignore"):  # what overflows is infinite, and refused as such
                return np.array(data, dtype=np.float64).astype(np.float32)
        exact = np.array(data) if len(data) else np.zeros(0, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError("a number is out of range") from error
    if exact.dtype != np.int64:
        raise ValueError("integers of 64 bits are expected")
    return exact


def _shaped(flat: Array, shape: Sequence[int] | None) -> Array:
    if shape is None or (len(shape) == 1 and shape[0] == flat.size):
        return flat
    if len(shape) not in (1, 2) or any(size < 0 for size in shape):
        raise ValueError(f"shape {list(shape)} is not [N] or [N, K]")
    if math.prod(shape) != flat.size:
        raise ValueError(f"shape {list(shape)} does not fit {flat.size} elements")
    if flat.size == 0 and any(size > np.iinfo(np.int32).max for size in shape):
        raise ValueError(f"shape {list(shape)} is out of range")
    return flat.reshape(tuple(shape))


def _matrix_shape(shape: Sequence[int] | None) -> tuple[int, int]:
    if shape is None or len(shape) != 2 or any(size < 0 for size in shape):
        raise ValueError("a sparse tensor needs its shape [N, K]")
    if any(size > np.iinfo(np.int32).max for size in shape):
        raise ValueError(f"shape {list(shape)} is out of range")
    return shape[0], shape[1]


def _check_csr(values: Array, crow: Array, col: Array, rows: int, columns: int) -> None:
    if crow.size != rows + 1:
        raise ValueError(f"{crow.size} row pointers for {rows} rows: there must be one more")
    if values.size != col.size:
        raise ValueError(f"{values.size} values but {col.size} column indices")
    # The bounds come first: differences of wild 64-bit pointers wrap around.
    inside = crow.min() == crow[0] == 0 and crow.max() == crow[-1] == col.size
    if not inside or np.diff(crow).min(initial=0) < 0:
        raise ValueError("row pointers must rise from 0 to the number of values")
    if col.size and (col.min() < 0 or col.max() >= columns):
        raise ValueError(f"a column index is outside of 0 … {columns - 1}")
