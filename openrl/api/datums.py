"""forward_backward requests, of either wire form, as one frozen value.

What cannot be read at all is a `UserError` at once: nobody knows whose request it is. What can
be read but makes no sense becomes `Malformed`, and fails through the request's future: the
client may have sent already what comes after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from openrl.api import codec, schema, tensors, wire_pb2
from openrl.api.codec import Encoding
from openrl.api.malformed import or_malformed
from openrl.api.tensors import ElementBudget
from openrl.config import Limits
from openrl.errors import InvalidDatum, UserError
from openrl.types import Array, Datum, ForwardBackward, Malformed

Wire = TypeVar("Wire")
WireTensor = TypeVar("WireTensor")

_DTYPES = {
    wire_pb2.DTYPE_FLOAT32: "float32",
    wire_pb2.DTYPE_INT64: "int64",
    wire_pb2.DTYPE_INT32: "int32",
    wire_pb2.DTYPE_BFLOAT16: "bfloat16",
}


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    model_id: str
    seq_id: int
    operation: ForwardBackward | Malformed


def decode(raw: bytes, encoding: Encoding, forward_only: bool, limits: Limits) -> Call:
    """Raises `UserError` for what cannot be read at all."""
    if encoding is Encoding.PROTOBUF:
        return from_protobuf(raw, forward_only, limits)
    return from_schema(codec.parse(raw, encoding, schema.ForwardBackward), forward_only, limits)


# --- JSON and msgpack -----------------------------------------------------------------------


def from_schema(body: schema.ForwardBackward, forward_only: bool, limits: Limits) -> Call:
    """Raises `UserError` when there is no input at all."""
    given = body.forward_backward_input or body.forward_input
    if given is None:
        raise UserError("forward_backward_input is missing")
    content, config = given, given.loss_fn_config or {}  # bound here: not None from now on

    def operation() -> ForwardBackward:
        data = _data(content.data, _schema_datum, limits)
        return ForwardBackward(data, content.loss_fn, config, forward_only or body.forward_only)

    return Call(body.model_id, body.seq_id, or_malformed(operation))


def _schema_datum(index: int, datum: schema.Datum, budget: ElementBudget) -> Datum:
    return _datum(
        index, datum.model_input, prompt_tokens, datum.loss_fn_inputs, schema_tensor, budget
    )


def schema_tensor(given: schema.TensorData, budget: ElementBudget) -> Array:
    return tensors.tensor(
        given.data,
        given.dtype,
        given.shape,
        given.sparse_crow_indices,
        given.sparse_col_indices,
        budget,
    )


def prompt_tokens(given: schema.ModelInput) -> NDArray[np.int32]:
    """Raises `ValueError` for anything but text."""
    return _joined([_schema_tokens(chunk) for chunk in given.chunks])


def _schema_tokens(chunk: schema.Chunk) -> NDArray[np.int32]:
    if chunk.type != "encoded_text":
        raise ValueError(_not_text(chunk.type))
    if chunk.tokens is None:
        raise ValueError("a text chunk without tokens")
    if isinstance(chunk.tokens, schema.TensorData):
        if chunk.tokens.dtype != "int32":
            raise ValueError(f"tokens are int32, not {chunk.tokens.dtype}")
        return tensors.tokens(chunk.tokens.data)
    return tensors.tokens(chunk.tokens)


# --- protobuf -------------------------------------------------------------------------------


def from_protobuf(body: bytes, forward_only: bool, limits: Limits) -> Call:
    """Raises `UserError` for bytes that are not the message."""
    message = wire_pb2.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise UserError("malformed protobuf body: not a ForwardBackwardRequest") from error
    if not message.model_id or message.seq_id < 0:
        raise UserError("malformed protobuf body: model_id or seq_id is missing")

    def operation() -> ForwardBackward:
        data = _data(message.data, _protobuf_datum, limits)
        only = forward_only or message.forward_only
        return ForwardBackward(data, message.loss_fn, _protobuf_config(message), only)

    return Call(message.model_id, message.seq_id, or_malformed(operation))


def _protobuf_config(message: wire_pb2.ForwardBackwardRequest) -> Mapping[str, float | str]:
    if not message.loss_fn_config_v2:
        return dict(message.loss_fn_config)
    return {
        name: value.text if value.WhichOneof("value") == "text" else value.number
        for name, value in message.loss_fn_config_v2.items()
    }


def _protobuf_datum(index: int, datum: wire_pb2.Datum, budget: ElementBudget) -> Datum:
    return _datum(
        index, datum.model_input, _protobuf_prompt, datum.loss_fn_inputs, _protobuf_tensor, budget
    )


def _protobuf_prompt(chunks: Sequence[wire_pb2.Chunk]) -> NDArray[np.int32]:
    return _joined([_protobuf_tokens(chunk) for chunk in chunks])


def _protobuf_tokens(chunk: wire_pb2.Chunk) -> NDArray[np.int32]:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise ValueError(_not_text(kind or "unknown"))
    return tensors.tokens(chunk.encoded_text.tokens)


def _protobuf_tensor(given: wire_pb2.Tensor, budget: ElementBudget) -> Array:
    dtype = _DTYPES.get(given.dtype, f"number {given.dtype}")
    shape = list(given.shape) or None
    if given.WhichOneof("encoding") != "sparse_csr":
        return tensors.tensor(given.dense, dtype, shape, None, None, budget)
    csr = given.sparse_csr
    return tensors.tensor(csr.values, dtype, shape, csr.crow_indices, csr.col_indices, budget)


# --- both -----------------------------------------------------------------------------------


def _data(
    given: Sequence[Wire], read: Callable[[int, Wire, ElementBudget], Datum], limits: Limits
) -> tuple[Datum, ...]:
    if len(given) > limits.datums:
        raise UserError(f"{len(given)} datums; one request may hold {limits.datums}")
    budget = ElementBudget(limits.tensor_elements)
    data = tuple(read(index, datum, budget) for index, datum in enumerate(given))
    tokens = sum(len(datum.tokens) for datum in data)
    if tokens > limits.request_tokens:
        raise UserError(f"{tokens} tokens; one request may hold {limits.request_tokens}")
    return data


def _datum(
    index: int,
    prompt: Wire,
    read_prompt: Callable[[Wire], NDArray[np.int32]],
    inputs: Mapping[str, WireTensor],
    read_tensor: Callable[[WireTensor, ElementBudget], Array],
    budget: ElementBudget,
) -> Datum:
    field = "model_input"
    try:
        tokens = read_prompt(prompt)
        loss_inputs = {}
        for name, given in inputs.items():
            field = name
            loss_inputs[name] = read_tensor(given, budget)
    except ValueError as problem:
        raise InvalidDatum(index, field, str(problem)) from problem
    return Datum(tokens, loss_inputs)


def _joined(chunks: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    if len(chunks) == 1:
        return chunks[0]
    return np.concatenate(chunks) if chunks else np.zeros(0, dtype=np.int32)


def _not_text(kind: str) -> str:
    return f"{kind} chunks are not offered by this server: it takes encoded_text alone"
