"""Frozen values as bytes that a later version of the code can read.

msgpack. Of a value stand its class and its fields, by name: fields that are not known any more
are passed over, and fields that are missing take their defaults. What is no text, number, list or
mapping with texts for keys is a mapping with one number for its key. Sequences come out as tuples,
and arrays read-only over the bytes that came in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, cast

import msgpack
import numpy as np

from openrl import errors, types
from openrl.errors import OpenRLError, ServerError, UserError

_VALUE, _ARRAY, _ERROR, _LARGE = 1, 2, 3, 4

_CLASSES: Mapping[str, type] = {
    name: kind
    for name, kind in vars(types).items()
    if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == types.__name__
}
_FIELDS: Mapping[type, tuple[Field[Any], ...]] = {kind: fields(kind) for kind in _CLASSES.values()}
_ERRORS: Mapping[str, type[OpenRLError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, OpenRLError)
}


def pack(value: object) -> bytes:
    """Raises `TypeError` for what is none of the values in `types`."""
    return cast(bytes, msgpack.packb(value, default=_marked, strict_types=True))


def unpack(body: bytes) -> Any:
    """Raises `ValueError` for what this version of the code cannot make sense of."""
    try:
        return msgpack.unpackb(
            body, object_pairs_hook=_restored, use_list=False, strict_map_key=False
        )
    except (TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"it is no value of this version: {error}") from error


def _marked(value: Any) -> Any:
    kind = type(value)
    if kind is tuple:
        return list(value)
    if (members := _FIELDS.get(kind)) is not None:
        return {_VALUE: [kind.__name__, {each.name: getattr(value, each.name) for each in members}]}
    match value:
        case np.ndarray() if value.dtype.hasobject:
            raise TypeError("an array of objects cannot be journalled")
        case np.ndarray():
            return {_ARRAY: [value.dtype.str, list(value.shape), value.tobytes()]}
        case int():  # of more than 64 bits: callers may send those
            return {_LARGE: hex(value)}
        case np.generic():
            return value.item()
        case OpenRLError():
            return {_ERROR: [kind.__name__, value.category, _parts(value)]}
        case Mapping():
            return dict(value)
        case str():
            return str(value)
    raise TypeError(f"{kind.__name__} cannot be journalled")


def _restored(pairs: Sequence[tuple[Any, Any]]) -> Any:
    if len(pairs) != 1 or type(pairs[0][0]) is not int:
        return dict(pairs)
    ((mark, content),) = pairs
    match mark:
        case 1:
            return _value(*content)
        case 2:
            dtype, shape, data = content
            return np.frombuffer(data, dtype).reshape(shape)
        case 3:
            return _error(*content)
        case 4:
            return int(content, 16)
    raise ValueError(f"unknown mark {mark}")


def _value(name: str, parts: Mapping[str, Any]) -> Any:
    if (kind := _CLASSES.get(name)) is None:
        raise ValueError(f"{name} is unknown to this version")
    known = {each.name: parts[each.name] for each in _FIELDS[kind] if each.name in parts}
    for each in _FIELDS[kind]:
        if each.name not in known and each.default is each.default_factory is MISSING:
            raise ValueError(f"{name} is without {each.name}, which this version needs")
    return kind(**known)


def _parts(error: OpenRLError) -> Mapping[str, Any]:
    """What the error is made of again."""
    match error:
        case errors.InvalidDatum():
            return {"index": error.index, "field": error.field, "problem": error.problem}
        case errors.Overloaded() | errors.Unavailable():
            return {"message": error.message, "retry_after": error.retry_after}
        case _:
            return {"message": error.message}


def _error(name: str, category: str, parts: Mapping[str, Any]) -> OpenRLError:
    """Of a class that is not known any more, what it said: it was a caller's fault or ours."""
    match _ERRORS.get(name):
        case errors.InvalidDatum as kind:
            return kind(parts["index"], parts["field"], parts["problem"])
        case errors.Overloaded | errors.Unavailable as kind:
            return kind(parts["message"], parts["retry_after"])
        case None:
            return (UserError if category == "user" else ServerError)(str(parts.get("message")))
        case kind:
            return kind(parts["message"])
