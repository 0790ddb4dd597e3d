"""The values of `engines.base` as bytes, for an engine in a process of its own.

msgpack, with a number for each class of the vocabulary: nothing but these values can come out,
whatever goes in. Mappings come out as dicts and sequences as tuples, which is what the values
hold; arrays come out read-only, over the bytes that came in.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, BinaryIO, cast

import msgpack
import numpy as np

from openrl import errors, types
from openrl.config import EngineConfig, ModelSource
from openrl.engines import base
from openrl.errors import InvalidDatum, OpenRLError, Overloaded, Unavailable

_LENGTH = struct.Struct("<Q")


# --- what is said ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first frame: `engine` is "module:class", called with `arguments`; logging as set."""

    engine: str
    arguments: tuple[Any, ...]
    log_level: int


@dataclass(frozen=True, slots=True)
class Call:
    """`method` is one of `Engine`'s; `work` is set for `execute`."""

    method: str
    work: base.Pass | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """Instead of `Returned`."""

    error: OpenRLError


# --- the table ------------------------------------------------------------------------------

_ARRAY, _PATH, _ERROR, _ROW, _FIRST_CLASS = 0, 1, 2, 3, 10


def _values_of(module: ModuleType) -> Iterator[type]:
    for kind in vars(module).values():
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__:
            yield kind


_VALUES: tuple[type, ...] = (
    *(Hello, Call, Returned, Raised, EngineConfig, ModelSource),
    *_values_of(base),
    *_values_of(types),
)
_CODES = {kind: code for code, kind in enumerate(_VALUES, start=_FIRST_CLASS)}


def _getter(kind: type) -> Any:
    """The fields of a value as a tuple."""
    names = [field.name for field in fields(kind)]
    if not names:
        return lambda value: ()
    if len(names) == 1:
        only = attrgetter(names[0])
        return lambda value: (only(value),)
    return attrgetter(*names)


_FIELDS = {kind: _getter(kind) for kind in _VALUES}
_ERRORS = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, OpenRLError)
}


# --- bytes ----------------------------------------------------------------------------------


def pack(value: object) -> bytes:
    """Raises `TypeError` for a value that has no place in the table."""
    return cast(bytes, msgpack.packb(value, default=_marked, strict_types=True))


def unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, object_pairs_hook=_restored, use_list=False, strict_map_key=False)


def _marked(value: Any) -> Any:
    """What msgpack does not know by itself, as `{code: parts}`: the mappings that are values have
    texts for keys."""
    kind = type(value)
    if kind is tuple:
        return list(value)
    if (code := _CODES.get(kind)) is not None:
        return {code: list(_FIELDS[kind](value))}
    if kind is base.RowId:
        return {_ROW: list(value)}
    match value:
        case np.ndarray():
            return {_ARRAY: [value.dtype.str, list(value.shape), value.tobytes()]}
        case np.generic():
            return value.item()
        case PurePath():
            return {_PATH: str(value)}
        case OpenRLError():
            return {_ERROR: [kind.__name__, _arguments(value)]}
        case Mapping():
            return dict(value)
        case str():
            return str(value)
    raise TypeError(f"{kind.__name__} cannot cross to the engine's process")


def _restored(pairs: Sequence[tuple[Any, Any]]) -> Any:
    if len(pairs) != 1 or type(pairs[0][0]) is not int:
        return dict(pairs)
    ((code, parts),) = pairs
    if code >= _FIRST_CLASS:
        return _VALUES[code - _FIRST_CLASS](*parts)
    match code:
        case 0:
            dtype, shape, data = parts
            return np.frombuffer(data, dtype).reshape(shape)
        case 1:
            return Path(parts)
        case 2:
            name, arguments = parts
            return _ERRORS[name](*arguments)
        case _:
            return base.RowId(*parts)


def _arguments(error: OpenRLError) -> list[Any]:
    """What the error is made of again."""
    match error:
        case InvalidDatum():
            return [error.index, error.field, error.problem]
        case Overloaded() | Unavailable():
            return [error.message, error.retry_after]
        case _:
            return [error.message]


# --- frames on a pipe -----------------------------------------------------------------------


def send(pipe: BinaryIO, value: object) -> None:
    """Raises `OSError` when nobody reads any more."""
    body = pack(value)
    pipe.write(_LENGTH.pack(len(body)))
    pipe.write(body)
    pipe.flush()


def receive(pipe: BinaryIO) -> Any:
    """Raises `EOFError` when the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(pipe, _LENGTH.size))
    return unpack(_exactly(pipe, length))


def _exactly(pipe: BinaryIO, size: int) -> bytes:
    body = pipe.read(size)
    if len(body) < size:
        raise EOFError
    return body
