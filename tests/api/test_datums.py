"""The same request in three encodings is one value; the SDK's own encoder is the reference."""

import numpy as np
import pytest
import tinker
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.image_chunk import ImageChunk

from openrl.api import codec, datums, schema, wire_pb2
from openrl.api.codec import Encoding
from openrl.config import Limits
from openrl.errors import InvalidDatum, UserError
from openrl.types import ForwardBackward, Malformed

MODEL = "s:train:0"


def of_sdk(data: list[tinker.Datum], **config: float) -> bytes:
    given = ForwardBackwardInput(data=data, loss_fn="cross_entropy", loss_fn_config=config or None)
    request = ForwardBackwardRequest(forward_backward_input=given, model_id=MODEL, seq_id=3)
    return forward_backward_request_to_proto(request).SerializeToString()


def tensor(array: np.ndarray, encoding: Encoding) -> dict:
    data = array.tobytes() if encoding is Encoding.MSGPACK else array.ravel().tolist()
    return {"data": data, "dtype": array.dtype.name, "shape": list(array.shape)}


def of_schema(encoding: Encoding, chunks: list[dict], **inputs: dict) -> datums.Call:
    datum = {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}
    body = {
        "model_id": MODEL,
        "seq_id": 3,
        "forward_backward_input": {"data": [datum], "loss_fn": "cross_entropy"},
    }
    parsed = codec.parse(codec.encode(body, encoding), encoding, schema.ForwardBackward)
    return datums.from_schema(parsed, False, Limits())


TARGETS = np.array([[2, 0, 5], [0, 0, 7]], dtype=np.int64)
WEIGHTS = np.array([[0.5, 0, -1], [0, 0, 2]], dtype=np.float32)


def check(operation: ForwardBackward | Malformed) -> None:
    assert isinstance(operation, ForwardBackward)
    (datum,) = operation.data
    assert datum.tokens.dtype == np.int32
    assert datum.tokens.tolist() == [1, 2]
    assert datum.loss_inputs["target_tokens"].dtype == np.int64
    assert np.array_equal(datum.loss_inputs["target_tokens"], TARGETS)
    assert datum.loss_inputs["weights"].dtype == np.float32
    assert np.array_equal(datum.loss_inputs["weights"], WEIGHTS)


def test_json() -> None:
    call = of_schema(
        Encoding.JSON,
        [{"type": "encoded_text", "tokens": [1]}, {"tokens": [2]}],
        target_tokens=tensor(TARGETS, Encoding.JSON),
        weights=tensor(WEIGHTS, Encoding.JSON),
    )
    check(call.operation)


def test_msgpack() -> None:
    call = of_schema(
        Encoding.MSGPACK,
        [
            {"tokens": np.array([1], "<i4").tobytes()},
            {"tokens": tensor(np.array([2], np.int32), Encoding.MSGPACK)},
        ],
        target_tokens=tensor(TARGETS, Encoding.MSGPACK),
        weights=tensor(WEIGHTS, Encoding.MSGPACK),
    )
    check(call.operation)


@pytest.mark.parametrize("sparse", [False, True])
def test_protobuf_of_the_sdk(sparse: bool) -> None:
    def as_sdk(array: np.ndarray) -> tinker.TensorData:
        if not sparse:
            return tinker.TensorData.from_numpy(array)
        rows, columns = np.nonzero(array)
        return tinker.TensorData(
            data=array[rows, columns].tolist(),
            dtype="int64" if array.dtype == np.int64 else "float32",
            shape=list(array.shape),
            sparse_crow_indices=[0, *np.cumsum(np.bincount(rows, minlength=2)).tolist()],
            sparse_col_indices=columns.tolist(),
        )

    datum = tinker.Datum(
        model_input=tinker.ModelInput(
            chunks=[tinker.EncodedTextChunk(tokens=[1]), tinker.EncodedTextChunk(tokens=[2])]
        ),
        loss_fn_inputs={"target_tokens": as_sdk(TARGETS), "weights": as_sdk(WEIGHTS)},
    )
    call = datums.from_protobuf(of_sdk([datum], beta=0.5), True, Limits())
    check(call.operation)
    assert isinstance(call.operation, ForwardBackward)
    assert call.operation.forward_only
    assert call.operation.loss_fn_config == {"beta": 0.5}


def test_config_of_the_oldest_protobuf_clients_and_strings() -> None:
    message = wire_pb2.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="ppo")
    message.loss_fn_config["beta"] = 2.0
    old = datums.from_protobuf(message.SerializeToString(), False, Limits()).operation
    message.loss_fn_config_v2["loss_id"].text = "x"
    new = datums.from_protobuf(message.SerializeToString(), False, Limits()).operation
    assert isinstance(old, ForwardBackward)
    assert isinstance(new, ForwardBackward)
    assert old.loss_fn_config == {"beta": 2.0}
    assert new.loss_fn_config == {"loss_id": "x"}


def test_provenance_is_read_past() -> None:
    message = wire_pb2.ForwardBackwardRequest.FromString(GOOD)
    span = message.data[0].model_input_spans.add().sampled_tokens
    span.sequence_id, span.length = "s:0", 2
    operation = datums.from_protobuf(message.SerializeToString(), False, Limits()).operation
    assert isinstance(operation, ForwardBackward)
    assert operation.data[0].tokens.tolist() == [1, 2]


def test_an_image_fails_the_request_and_names_its_datum() -> None:
    text = tinker.Datum(model_input=tinker.ModelInput.from_ints([1]), loss_fn_inputs={})
    image = ImageChunk(data=b"png", format="png", expected_tokens=4)
    picture = tinker.Datum(model_input=tinker.ModelInput(chunks=[image]), loss_fn_inputs={})
    operation = datums.from_protobuf(of_sdk([text, picture]), False, Limits()).operation
    assert isinstance(operation, Malformed)
    assert isinstance(operation.error, InvalidDatum)
    assert operation.error.index == 1
    assert "image" in operation.error.message


@pytest.mark.parametrize("chunk", [{"type": "image", "data": "aaaa"}, {"type": "dmel"}, {}])
def test_chunks_that_are_no_text_in_json(chunk: dict) -> None:
    operation = of_schema(Encoding.JSON, [chunk]).operation
    assert isinstance(operation, Malformed)
    assert operation.error.message.startswith("datum 0: model_input: ")


def test_a_misshapen_tensor_names_datum_and_field() -> None:
    lying = {"data": [1.0], "dtype": "float32", "shape": [2]}
    operation = of_schema(Encoding.JSON, [{"tokens": [1]}], weights=lying).operation
    assert isinstance(operation, Malformed)
    assert operation.error.message == "datum 0: weights: shape [2] does not fit 1 elements"


def test_too_many_datums() -> None:
    text = tinker.Datum(model_input=tinker.ModelInput.from_ints([1]), loss_fn_inputs={})
    operation = datums.from_protobuf(of_sdk([text] * 3), False, Limits(datums=2)).operation
    assert isinstance(operation, Malformed)
    assert "3 datums" in operation.error.message


def test_a_request_without_input_is_refused() -> None:
    body = codec.parse(b'{"model_id": "m", "seq_id": 1}', Encoding.JSON, schema.ForwardBackward)
    with pytest.raises(UserError, match="forward_backward_input"):
        datums.from_schema(body, False, Limits())


@given(st.binary(max_size=300))
def test_no_bytes_break_the_protobuf_reader(body: bytes) -> None:
    _call_or_refusal(body)


GOOD = of_sdk(
    [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([1, 2]),
            loss_fn_inputs={"weights": tinker.TensorData.from_numpy(WEIGHTS)},
        )
    ]
)


@given(st.integers(0, len(GOOD) - 1), st.integers(0, 255))
def test_no_changed_byte_breaks_the_protobuf_reader(at: int, value: int) -> None:
    _call_or_refusal(GOOD[:at] + bytes([value]) + GOOD[at + 1 :])


def _call_or_refusal(body: bytes) -> None:
    try:
        call = datums.from_protobuf(body, False, Limits(tensor_elements=1000))
    except UserError:
        return
    assert isinstance(call.operation, ForwardBackward | Malformed)
