"""Bodies: msgpack with the wire's JSON schema, and arrays as raw bytes.

An array is a map `{"dtype", "shape", "data"}` with little-endian, C-ordered bytes. Arrays that
already have the wire's dtype are packed from their own memory, and arrays in an answer are
read-only views of its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgpack
import numpy as np
from numpy.typing import ArrayLike

from openrl.errors import ServerError, UserError
from openrl.types import (
    Array,
    Datum,
    ForwardBackwardOutput,
    OptimStepDone,
    SampledSequence,
    SampleOutput,
    TopLogprobs,
)

T = TypeVar("T")
Body = Mapping[str, Any]

CONTENT_TYPE = "application/msgpack"

_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("float32", "int32", "int64")}
_NAMES = {
    (dtype.kind, dtype.itemsize): name for name, dtype in _DTYPES.items()
}  # quicker than .name
_ROOM = 4 << 20
"""Bytes that a body may take before its buffer grows, which copies it. Untouched ones are free."""
_ARRAY_KEYS = {"dtype", "shape", "data"}


def pack(body: Body) -> bytes:
    packed: bytes = msgpack.Packer(default=_plain, buf_size=_ROOM).pack(body)
    return packed


def unpack(data: bytes) -> Any:
    """Arrays come out as numpy. Raises `ValueError` for anything that is not msgpack."""
    return msgpack.unpackb(data, object_hook=_revive)


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray) and (name := _name(value.dtype)) is not None:
        wire = np.ascontiguousarray(value, dtype=_DTYPES[name])
        return {"dtype": name, "shape": list(wire.shape), "data": _bytes(wire)}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no place in a request")


def _name(dtype: np.dtype[Any]) -> str | None:
    return _NAMES.get((dtype.kind, dtype.itemsize))


def _bytes(array: Array) -> memoryview:
    """The array's own memory; an empty one cannot be cast and needs none."""
    return array.data.cast("B") if array.size else memoryview(b"")


def _revive(value: dict[str, Any]) -> Any:
    if value.keys() != _ARRAY_KEYS or value["dtype"] not in _DTYPES:
        return value
    return np.frombuffer(value["data"], _DTYPES[value["dtype"]]).reshape(value["shape"])


# --- what is sent ---------------------------------------------------------------------------


def tokens_to_wire(tokens: ArrayLike) -> dict[str, Any]:
    """A model input of one chunk. `tokens` [N] of any integer kind."""
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UserError(f"tokens must be whole numbers [N], not {array.dtype} {array.shape}")
    return {"chunks": [{"type": "encoded_text", "tokens": array.astype(np.int32, copy=False)}]}


def datum_to_wire(datum: Datum) -> dict[str, Any]:
    return {
        "model_input": tokens_to_wire(datum.tokens),
        "loss_fn_inputs": {name: _loss_input(name, x) for name, x in datum.loss_inputs.items()},
    }


def _loss_input(name: str, values: ArrayLike) -> Array:
    """`target_tokens` are int64 and everything else float32, whatever the caller wrote."""
    return np.asarray(values, dtype=np.int64 if name == "target_tokens" else np.float32)


# --- what comes back ------------------------------------------------------------------------


def read(answer: Body, reader: Callable[[Body], T]) -> T:
    """Raises `ServerError` for an answer that is not of its kind."""
    try:
        return reader(answer)
    except (KeyError, TypeError) as error:
        raise ServerError(f"the answer is not what was asked for: {error!r}") from error


def forward_backward_output(answer: Body) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(tuple(answer["loss_fn_outputs"]), answer["metrics"])


def optim_step_done(answer: Body) -> OptimStepDone:
    return OptimStepDone(answer.get("metrics") or {}, answer.get("version", 0))


def sample_output(answer: Body) -> SampleOutput:
    top = answer.get("topk_prompt_logprobs")
    return SampleOutput(
        sequences=tuple(_sequence(each) for each in answer["sequences"]),
        prompt_logprobs=answer.get("prompt_logprobs"),
        topk_prompt_logprobs=top and TopLogprobs(top["token_ids"], top["logprobs"]),
        prompt_cache_hit_tokens=answer.get("prompt_cache_hit_tokens") or 0,
    )


def _sequence(answer: Body) -> SampledSequence:
    return SampledSequence(answer["tokens"], answer["logprobs"], answer["stop_reason"])
