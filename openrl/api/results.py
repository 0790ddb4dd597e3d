"""Results to bodies, in each encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from math import isfinite
from typing import Any, TypeAlias

import numpy as np

from openrl.api import codec, wire_pb2
from openrl.api.codec import Encoding
from openrl.errors import OpenRLError, ServerError
from openrl.types import (
    Array,
    Cells,
    ExternalWeightsSaved,
    ForwardBackwardOutput,
    ModelCreated,
    ModelUnloaded,
    OptimStepDone,
    Result,
    SampledSequence,
    SampleOutput,
    SamplerWeightsSaved,
    TopLogprobs,
    WeightsLoaded,
    WeightsSaved,
)

Plain: TypeAlias = dict[str, Any]

EMPTY_LOGPROB = -99999.0
OUTPUT_TYPE = "ArrayRecord"

_PROTO_DTYPES = {
    "float32": wire_pb2.DTYPE_FLOAT32,
    "int64": wire_pb2.DTYPE_INT64,
    "int32": wire_pb2.DTYPE_INT32,
}

_STOP_REASONS = {"stop": wire_pb2.STOP_REASON_STOP, "length": wire_pb2.STOP_REASON_LENGTH}


def available(result: Result, wanted: Encoding) -> Encoding:
    """protobuf exists for two kinds of result only."""
    large = isinstance(result, ForwardBackwardOutput | SampleOutput)
    return Encoding.JSON if wanted is Encoding.PROTOBUF and not large else wanted


def encode(result: Result, encoding: Encoding) -> bytes:
    """Raises `ServerError` for a number that the encoding cannot carry."""
    match result:
        case ForwardBackwardOutput():
            if encoding is Encoding.PROTOBUF:
                return _forward_backward_protobuf(result)
            return codec.encode(_forward_backward(result, encoding), encoding)
        case SampleOutput():
            if encoding is Encoding.PROTOBUF:
                return _sample_protobuf(result)
            return codec.encode(_sample(result, encoding), encoding)
        case _:
            return codec.encode(_small(result), encoding)


def failure(error: OpenRLError) -> Plain:
    return {"error": codec.shortened(error.message), "category": error.category}


def _small(
    result: ModelCreated
    | OptimStepDone
    | WeightsSaved
    | SamplerWeightsSaved
    | ExternalWeightsSaved
    | WeightsLoaded
    | ModelUnloaded,
) -> Plain:
    match result:
        case ModelCreated():
            return {"type": "create_model", "model_id": result.model_id}
        case OptimStepDone():
            return {"metrics": _finite_metrics(result.metrics), "version": result.version}
        case WeightsSaved():
            return {"type": "save_weights", "path": result.path}
        case SamplerWeightsSaved():
            saved = {"path": result.path, "sampling_session_id": result.sampling_session_id}
            set_one = {key: value for key, value in saved.items() if value is not None}
            return {"type": "save_weights_for_sampler"} | set_one
        case ExternalWeightsSaved(path=path, size_bytes=size):
            return {"type": "save_weights_external", "path": path, "size_bytes": size}
        case WeightsLoaded():
            return {"type": "load_weights", "path": result.path, "model_id": result.model_id}
        case ModelUnloaded():
            return {"type": "unload_model", "model_id": result.model_id}


def _finite_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The wire's metrics are finite numbers: one that is not is left out."""
    return {name: float(value) for name, value in metrics.items() if isfinite(value)}


# --- forward_backward -----------------------------------------------------------------------


def _forward_backward(result: ForwardBackwardOutput, encoding: Encoding) -> Plain:
    tensor = _binary if encoding is Encoding.MSGPACK else _listed
    return {
        "loss_fn_output_type": OUTPUT_TYPE,
        "loss_fn_outputs": [
            {name: tensor(array) for name, array in record.items()} for record in result.outputs
        ],
        "metrics": _finite_metrics(result.metrics),
    }


def _binary(array: Array) -> Plain:
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": array.tobytes()}


def _listed(array: Array) -> Plain:
    """JSON knows float32 and int64 alone."""
    dtype = "float32" if array.dtype.kind == "f" else "int64"
    return {"dtype": dtype, "shape": list(array.shape), "data": _finite_list(array.ravel())}


def _finite_list(array: Array) -> list[Any]:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ServerError("the result holds a number that is not finite, which JSON cannot carry")
    numbers: list[Any] = array.tolist()
    return numbers


def _forward_backward_protobuf(result: ForwardBackwardOutput) -> bytes:
    message = wire_pb2.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    for records in _alike(result.outputs):
        record = message.loss_fn_outputs.add(num_datums=len(records))
        for name in records[0]:
            _batch([each[name] for each in records], record.fields[name])
    for name, value in _finite_metrics(result.metrics).items():
        message.metrics[name] = value
    body: bytes = message.SerializeToString()
    return body


def _alike(outputs: Sequence[Mapping[str, Array]]) -> Iterator[list[Mapping[str, Array]]]:
    """Neighbours that fit one record: the same fields, dtypes and trailing shapes."""
    for _, records in groupby(outputs, key=_signature):
        yield list(records)


def _signature(record: Mapping[str, Array]) -> list[tuple[str, str, tuple[int, ...]]]:
    return sorted((name, array.dtype.name, array.shape[1:]) for name, array in record.items())


def _batch(arrays: Sequence[Array], into: wire_pb2.BatchedTensor) -> None:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([array.nbytes for array in arrays], out=offsets[1:])
    into.data = b"".join(array.tobytes() for array in arrays)
    into.offsets = offsets.tobytes()
    into.dtype = _PROTO_DTYPES[arrays[0].dtype.name]
    into.trailing_shape.extend(arrays[0].shape[1:])


# --- sample ---------------------------------------------------------------------------------


def _sample(result: SampleOutput, encoding: Encoding) -> Plain:
    native = encoding is Encoding.MSGPACK
    scores: Callable[[Array], Any] = _binary if native else _nulls
    table: Callable[[TopLogprobs], Any] = _top_binary if native else _top_listed
    prompt, top = result.prompt_logprobs, result.topk_prompt_logprobs
    answer = {
        "type": "sample",
        "sequences": [_sequence(each, native) for each in result.sequences],
        "prompt_logprobs": None if prompt is None else scores(prompt),
        "topk_prompt_logprobs": None if top is None else table(top),
        "prompt_cache_hit_tokens": result.prompt_cache_hit_tokens,
    }
    tensor = _binary if native else _listed
    if (targets := result.target_prompt_logprobs) is not None:
        answer["target_prompt_logprobs"] = _cells(targets, native)
    if (alt := result.prompt_alt_tokens) is not None:
        tables = {"tokens": tensor(alt.token_ids), "logprobs": tensor(alt.logprobs)}
        answer["prompt_alt_tokens"] = tables
    return answer


def _sequence(sequence: SampledSequence, native: bool) -> Plain:
    top = sequence.topk_logprobs
    answer: Plain = {"stop_reason": sequence.stop_reason}
    if native:
        answer |= {"tokens": _binary(sequence.tokens), "logprobs": _binary(sequence.logprobs)}
    else:
        answer["tokens"] = sequence.tokens.tolist()
        answer["logprobs"] = _finite_list(sequence.logprobs)
    if top is not None:
        answer["topk_logprobs"] = _top_binary(top) if native else _top_listed(top)
    return answer


def _cells(given: Cells, native: bool) -> Plain:
    """A tensor in the layout that it was asked for in."""
    if given.crow is None or given.col is None:
        return (_binary if native else _listed)(given.values.reshape(given.shape))
    values = given.values.tobytes() if native else _finite_list(given.values)
    crow, col = (part.tobytes() if native else part.tolist() for part in (given.crow, given.col))
    return {
        "dtype": given.values.dtype.name,
        "shape": list(given.shape),
        "data": values,
        "sparse_crow_indices": crow,
        "sparse_col_indices": col,
    }


def _nulls(logprobs: Array) -> list[float | None]:
    """NaN means "not scored", which JSON writes as null."""
    return [value if isfinite(value) else None for value in logprobs.tolist()]


def _top_binary(top: TopLogprobs) -> Plain:
    return {"token_ids": _binary(top.token_ids), "logprobs": _binary(top.logprobs)}


def _top_listed(top: TopLogprobs) -> list[list[tuple[int, float]] | None]:
    return [
        _top_row(*row) for row in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
    ]


def _top_row(ids: list[int], logprobs: list[float]) -> list[tuple[int, float]] | None:
    """None for a position that nothing precedes."""
    filled = [pair for pair in zip(ids, logprobs, strict=True) if pair[1] > EMPTY_LOGPROB]
    return filled or None


def _sample_protobuf(result: SampleOutput) -> bytes:
    message = wire_pb2.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        added = message.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=sequence.tokens.tobytes(),
            logprobs=sequence.logprobs.tobytes(),
        )
        if sequence.topk_logprobs is not None:
            _top_protobuf(sequence.topk_logprobs, added.topk_sampled_logprobs)
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = result.prompt_logprobs.tobytes()
    if result.topk_prompt_logprobs is not None:
        _top_protobuf(result.topk_prompt_logprobs, message.topk_prompt_logprobs)
    if (targets := result.target_prompt_logprobs) is not None:
        _cells_protobuf(targets, message.target_prompt_logprobs)
    if (alt := result.prompt_alt_tokens) is not None:
        _dense_protobuf(alt.token_ids, message.prompt_alt_tokens.tokens)
        _dense_protobuf(alt.logprobs, message.prompt_alt_tokens.logprobs)
    body: bytes = message.SerializeToString()
    return body


def _top_protobuf(top: TopLogprobs, into: wire_pb2.TopkLogprobs) -> None:
    into.token_ids, into.logprobs = top.token_ids.tobytes(), top.logprobs.tobytes()
    into.length, into.k = top.token_ids.shape


def _dense_protobuf(array: Array, into: wire_pb2.Tensor) -> None:
    into.dense, into.dtype = array.tobytes(), _PROTO_DTYPES[array.dtype.name]
    into.shape.extend(array.shape)


def _cells_protobuf(given: Cells, into: wire_pb2.Tensor) -> None:
    if given.crow is None or given.col is None:
        _dense_protobuf(given.values.reshape(given.shape), into)
        return
    into.sparse_csr.values = given.values.tobytes()
    into.sparse_csr.crow_indices = given.crow.tobytes()
    into.sparse_csr.col_indices = given.col.tobytes()
    into.dtype = _PROTO_DTYPES[given.values.dtype.name]
    into.shape.extend(given.shape)
