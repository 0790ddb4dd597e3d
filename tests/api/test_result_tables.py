"""The tables of a sample's answer: best tokens, named tokens, alternatives, in each encoding."""

import msgpack
import msgspec
import numpy as np

from openrl.api import wire_pb2
from openrl.api.codec import Encoding
from openrl.api.results import encode
from openrl.types import AltTokens, Cells, SampledSequence, SampleOutput, TopLogprobs

F32 = np.float32
TOP = TopLogprobs(np.array([[5, 6], [7, 0]], np.int32), np.array([[-1, -2], [-3, -99999]], F32))
SEQUENCE = SampledSequence(np.array([5, 7], np.int32), np.array([-1, -3], F32), "stop", TOP)
SPARSE = Cells(np.array([-0.5, 0], F32), (2, 9), np.array([0, 1, 2]), np.array([8, 3]))
DENSE = Cells(np.array([-0.5, 0, 0, -0.25], F32), (2, 2))
ALT = AltTokens(np.array([[1], [2]], np.int32), np.array([[-1.5], [-2.5]], F32))


def answer(targets: Cells | None) -> SampleOutput:
    return SampleOutput((SEQUENCE,), target_prompt_logprobs=targets, prompt_alt_tokens=ALT)


def test_json() -> None:
    got = msgspec.json.decode(encode(answer(SPARSE), Encoding.JSON))
    assert got["sequences"][0]["topk_logprobs"] == [[[5, -1.0], [6, -2.0]], [[7, -3.0]]]
    assert got["target_prompt_logprobs"] == {
        "dtype": "float32",
        "shape": [2, 9],
        "data": [-0.5, 0.0],
        "sparse_crow_indices": [0, 1, 2],
        "sparse_col_indices": [8, 3],
    }
    alt = got["prompt_alt_tokens"]
    assert alt["tokens"] == {"dtype": "int64", "shape": [2, 1], "data": [1, 2]}
    assert alt["logprobs"]["data"] == [-1.5, -2.5]
    dense = msgspec.json.decode(encode(answer(DENSE), Encoding.JSON))["target_prompt_logprobs"]
    assert dense == {"dtype": "float32", "shape": [2, 2], "data": [-0.5, 0.0, 0.0, -0.25]}


def test_msgpack() -> None:
    got = msgpack.unpackb(encode(answer(SPARSE), Encoding.MSGPACK))
    top = got["sequences"][0]["topk_logprobs"]
    assert np.frombuffer(top["token_ids"]["data"], np.int32).tolist() == [5, 6, 7, 0]
    targets = got["target_prompt_logprobs"]
    assert np.frombuffer(targets["data"], F32).tolist() == [-0.5, 0]
    assert np.frombuffer(targets["sparse_col_indices"], np.int64).tolist() == [8, 3]
    alt = got["prompt_alt_tokens"]["tokens"]
    assert (alt["dtype"], alt["shape"]) == ("int32", [2, 1])


def test_protobuf() -> None:
    message = wire_pb2.SampleResponse.FromString(encode(answer(SPARSE), Encoding.PROTOBUF))
    top = message.sequences[0].topk_sampled_logprobs
    assert (top.length, top.k) == (2, 2)
    assert np.frombuffer(top.logprobs, F32).tolist() == [-1, -2, -3, -99999]
    csr = message.target_prompt_logprobs.sparse_csr
    assert np.frombuffer(csr.crow_indices, np.int64).tolist() == [0, 1, 2]
    assert list(message.target_prompt_logprobs.shape) == [2, 9]
    assert np.frombuffer(message.prompt_alt_tokens.tokens.dense, np.int32).tolist() == [1, 2]


def test_what_was_not_asked_for_is_not_there() -> None:
    plain = SampledSequence(SEQUENCE.tokens, SEQUENCE.logprobs, "stop")
    for encoding, read in (
        (Encoding.JSON, msgspec.json.decode),
        (Encoding.MSGPACK, msgpack.unpackb),
    ):
        got = read(encode(SampleOutput((plain,)), encoding))
        assert not {"target_prompt_logprobs", "prompt_alt_tokens"} & got.keys()
        assert "topk_logprobs" not in got["sequences"][0]
    message = wire_pb2.SampleResponse.FromString(encode(SampleOutput((plain,)), Encoding.PROTOBUF))
    assert not message.HasField("target_prompt_logprobs")
    assert not message.HasField("prompt_alt_tokens")
    assert not message.sequences[0].HasField("topk_sampled_logprobs")
