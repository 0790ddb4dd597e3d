import contextlib
import gzip
import tracemalloc
import zlib

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from openrl.api import codec, datums, schema
from openrl.api.codec import Encoding
from openrl.config import Limits
from openrl.errors import PayloadTooLarge, UserError
from openrl.types import ForwardBackward, Malformed

BODY = b'{"request_id": "r"}' * 50

STRUCTS = [
    kind
    for kind in vars(schema).values()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
]


@pytest.mark.parametrize(
    ("coding", "compressed"),
    [
        ("", BODY),
        ("identity", BODY),
        ("zstd", zstandard.compress(BODY)),
        ("gzip", gzip.compress(BODY)),
        ("deflate", zlib.compress(BODY)),
    ],
)
def test_decompresses(coding: str, compressed: bytes) -> None:
    assert codec.decompress(compressed, coding, len(BODY)) == BODY
    with pytest.raises(PayloadTooLarge):
        codec.decompress(compressed, coding, len(BODY) - 1)


@pytest.mark.parametrize("coding", ["zstd", "gzip", "deflate", "br"])
def test_a_body_that_is_not_what_it_says(coding: str) -> None:
    with pytest.raises(UserError):
        codec.decompress(b"nothing of the kind", coding, 1000)


@pytest.mark.parametrize(
    ("coding", "compressed"),
    [("gzip", gzip.compress(BODY)[:-9]), ("zstd", zstandard.compress(BODY)[:-4])],
)
def test_a_body_that_is_cut(coding: str, compressed: bytes) -> None:
    with pytest.raises(UserError):
        codec.decompress(compressed, coding, 10_000)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zstandard.compress(bytes(500_000_000))
    assert len(bomb) < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(PayloadTooLarge):
            codec.decompress(bomb, "zstd", 1_000_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200_000_000


@pytest.mark.parametrize("encoding", [Encoding.JSON, Encoding.MSGPACK])
def test_an_error_names_the_field(encoding: Encoding) -> None:
    body = codec.encode({"model_id": "m", "seq_id": "seven"}, encoding)
    with pytest.raises(UserError, match="seq_id"):
        codec.parse(body, encoding, schema.OptimStep)


def test_a_field_that_changes_the_result_is_never_ignored() -> None:
    body = b'{"model_id": "m", "seq_id": 1, "adam_params": {"nesterov": true}}'
    with pytest.raises(UserError, match="nesterov"):
        codec.parse(body, Encoding.JSON, schema.OptimStep)


def test_what_old_clients_leave_out_has_defaults() -> None:
    step = codec.parse(
        b'{"model_id": "m", "seq_id": 1, "adam_params": {"learning_rate": 0.1}}',
        Encoding.JSON,
        schema.OptimStep,
    )
    assert step.adam_params == schema.AdamParams(learning_rate=0.1, beta2=0.95, eps=1e-12)
    sample = codec.parse(
        b'{"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"stop": null}}',
        Encoding.JSON,
        schema.Sample,
    )
    assert sample.num_samples == 1
    assert sample.sampling_params.top_k == -1


@given(st.binary(max_size=200), st.sampled_from(STRUCTS))
def test_no_bytes_break_the_json_reader(body: bytes, kind: type[msgspec.Struct]) -> None:
    _value_or_refusal(body, Encoding.JSON, kind)


@given(st.binary(max_size=200), st.sampled_from(STRUCTS))
def test_no_bytes_break_the_msgpack_reader(body: bytes, kind: type[msgspec.Struct]) -> None:
    _value_or_refusal(body, Encoding.MSGPACK, kind)


def _value_or_refusal(body: bytes, encoding: Encoding, kind: type[msgspec.Struct]) -> None:
    with contextlib.suppress(UserError):
        assert isinstance(codec.parse(body, encoding, kind), kind)


def test_deep_nesting_is_refused() -> None:
    deep = b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    _value_or_refusal(deep, Encoding.JSON, schema.GetInfo)
    with pytest.raises(UserError):
        codec.parse(b"\x91" * 100_000, Encoding.MSGPACK, schema.GetInfo)


WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=12),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)
NUMBERS = st.lists(st.integers(-(2**63), 2**64 - 1) | st.floats(), max_size=4) | st.binary(
    max_size=16
)
TENSOR = st.fixed_dictionaries(
    {"data": NUMBERS | WILD, "dtype": st.sampled_from(["float32", "int64", "int32", "odd"])},
    optional={
        "shape": st.lists(st.integers(-2, 2**40), max_size=3) | st.none(),
        "sparse_crow_indices": NUMBERS,
        "sparse_col_indices": NUMBERS,
    },
)
CHUNK = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["encoded_text", "image"]), "tokens": NUMBERS | TENSOR}
)
DATUM = st.fixed_dictionaries(
    {
        "model_input": st.fixed_dictionaries({"chunks": st.lists(CHUNK, max_size=2)}),
        "loss_fn_inputs": st.dictionaries(st.text(max_size=3), TENSOR, max_size=2),
    }
)
REQUEST = st.fixed_dictionaries(
    {
        "model_id": st.text(min_size=1, max_size=4),
        "seq_id": st.integers(0, 5),
        "forward_backward_input": st.fixed_dictionaries(
            {"data": st.lists(DATUM, max_size=3), "loss_fn": st.text(max_size=4)}
        ),
    }
)


@given(REQUEST)
def test_wild_requests_become_an_operation_or_fail_by_name(wild: dict) -> None:
    limits = Limits(tensor_elements=1000)
    body = codec.encode(wild, Encoding.MSGPACK)
    try:
        request = codec.parse(body, Encoding.MSGPACK, schema.ForwardBackward)
    except UserError:
        return
    operation = datums.from_schema(request, False, limits).operation
    assert isinstance(operation, ForwardBackward | Malformed)
