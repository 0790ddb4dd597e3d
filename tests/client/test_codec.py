"""The msgpack bodies, read back with msgpack alone."""

from __future__ import annotations

import struct

import msgpack
import numpy as np
import pytest

from openrl.client import codec
from openrl.errors import ServerError, UserError
from openrl.types import Datum


def test_an_array_travels_as_its_own_little_endian_bytes() -> None:
    packed = codec.pack({"x": np.array([[1.0, 2.0], [3.0, 4.0]], dtype=np.float32)})
    assert msgpack.unpackb(packed) == {
        "x": {"dtype": "float32", "shape": [2, 2], "data": struct.pack("<4f", 1, 2, 3, 4)}
    }


def test_a_strided_array_is_sent_in_c_order() -> None:
    columns = np.arange(6, dtype=np.int64).reshape(2, 3).T
    wire = msgpack.unpackb(codec.pack({"x": columns}))["x"]
    assert wire["shape"] == [3, 2]
    assert wire["data"] == struct.pack("<6q", 0, 3, 1, 4, 2, 5)


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
def test_an_empty_array_keeps_its_shape(shape: tuple[int, ...]) -> None:
    back = codec.unpack(codec.pack({"x": np.zeros(shape, dtype=np.float32)}))["x"]
    assert back.shape == shape
    assert back.dtype == np.float32


def test_an_array_in_an_answer_is_a_view_that_nobody_can_write_to() -> None:
    packed = msgpack.packb({"dtype": "int32", "shape": [2], "data": struct.pack("<2i", 7, 8)})
    array = codec.unpack(packed)
    assert array.tolist() == [7, 8]
    assert array.dtype == np.int32
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_a_map_that_only_looks_like_an_array_is_left_alone() -> None:
    odd = {"dtype": "banana", "shape": [1], "data": b"1"}
    assert codec.unpack(msgpack.packb(odd)) == odd


def test_what_has_no_place_in_a_request_is_refused() -> None:
    with pytest.raises(TypeError, match="ndarray"):
        codec.pack({"x": np.zeros(1, dtype=np.complex128)})


def test_a_datum_of_lists_gets_the_dtypes_of_the_wire() -> None:
    datum = Datum(
        tokens=[1, 2, 3],  # type: ignore[arg-type]
        loss_inputs={"target_tokens": [2, 3, 4], "weights": [0, 1, 1]},  # type: ignore[dict-item]
    )
    wire = codec.datum_to_wire(datum)
    (chunk,) = wire["model_input"]["chunks"]
    assert chunk["tokens"].dtype == np.int32
    assert wire["loss_fn_inputs"]["target_tokens"].dtype == np.int64
    assert wire["loss_fn_inputs"]["weights"].dtype == np.float32


def test_arrays_of_the_right_dtype_are_not_copied() -> None:
    tokens = np.arange(4, dtype=np.int32)
    weights = np.ones(4, dtype=np.float32)
    wire = codec.datum_to_wire(Datum(tokens, {"weights": weights}))
    assert wire["model_input"]["chunks"][0]["tokens"] is tokens
    assert wire["loss_fn_inputs"]["weights"] is weights


@pytest.mark.parametrize("tokens", [[[1, 2]], [1.5, 2.0]])
def test_tokens_that_are_no_tokens_are_refused(tokens: list[object]) -> None:
    with pytest.raises(UserError, match="whole numbers"):
        codec.tokens_to_wire(tokens)  # type: ignore[arg-type]


def test_an_answer_of_another_kind_is_the_servers_fault() -> None:
    with pytest.raises(ServerError, match="loss_fn_outputs"):
        codec.read({"surprise": 1}, codec.forward_backward_output)
