"""Results as the SDK's own decoders read them."""

import json

import msgpack
import numpy as np
import pytest
from tinker.proto import response_conv
from tinker.types._pydantic_types.optim_step_response import OptimStepResponse

from openrl.api import results
from openrl.api.codec import Encoding
from openrl.errors import ServerError, UserError
from openrl.types import (
    ForwardBackwardOutput,
    ModelId,
    ModelUnloaded,
    OptimStepDone,
    SampledSequence,
    SampleOutput,
    SamplerWeightsSaved,
    SamplingSessionId,
    TinkerPath,
    TopLogprobs,
    WeightsLoaded,
    WeightsSaved,
)

RAGGED = ForwardBackwardOutput(
    outputs=(
        {"logprobs": np.array([[-1, -2], [-3, -4]], np.float32), "ids": np.array([5], np.int64)},
        {"logprobs": np.array([[-5, -6]], np.float32), "ids": np.array([6, 7], np.int64)},
        {"logprobs": np.array([-7, -8, -9], np.float32), "ids": np.array([], np.int64)},
    ),
    metrics={"loss:sum": 2.5, "broken:mean": float("nan")},
)
SAMPLED = SampleOutput(
    sequences=(
        SampledSequence(np.array([4, 5], np.int32), np.array([-0.5, -1], np.float32), "stop"),
        SampledSequence(np.array([6], np.int32), np.array([-0.25], np.float32), "length"),
    ),
    prompt_logprobs=np.array([np.nan, -1.5], np.float32),
    topk_prompt_logprobs=TopLogprobs(
        np.array([[0, 0], [9, 8]], np.int32),
        np.array([[-99999.0, -99999.0], [-0.1, -3]], np.float32),
    ),
    prompt_cache_hit_tokens=1,
)


def plain(result, encoding):
    body = results.encode(result, encoding)
    return msgpack.unpackb(body) if encoding is Encoding.MSGPACK else json.loads(body)


def array(tensor: dict) -> np.ndarray:
    return np.frombuffer(tensor["data"], tensor["dtype"]).reshape(tensor["shape"])


def test_forward_backward_as_the_sdk_reads_protobuf() -> None:
    read = response_conv.deserialize_forward_backward_output(
        results.encode(RAGGED, Encoding.PROTOBUF)
    )
    assert read.metrics == {"loss:sum": 2.5}
    assert len(read.loss_fn_outputs) == 3
    for record, expected in zip(read.loss_fn_outputs, RAGGED.outputs, strict=True):
        assert record.keys() == expected.keys()
        for name in expected:
            assert np.array_equal(record[name].to_numpy(), expected[name])


def test_forward_backward_as_json() -> None:
    read = plain(RAGGED, Encoding.JSON)
    assert read["metrics"] == {"loss:sum": 2.5}
    first = read["loss_fn_outputs"][0]["logprobs"]
    assert first == {"dtype": "float32", "shape": [2, 2], "data": [-1, -2, -3, -4]}


def test_forward_backward_as_msgpack() -> None:
    read = plain(RAGGED, Encoding.MSGPACK)
    for record, expected in zip(read["loss_fn_outputs"], RAGGED.outputs, strict=True):
        for name in expected:
            assert array(record[name]).dtype == expected[name].dtype
            assert np.array_equal(array(record[name]), expected[name])


def test_json_refuses_what_it_cannot_carry() -> None:
    broken = ForwardBackwardOutput(({"logprobs": np.array([np.inf], np.float32)},), {})
    with pytest.raises(ServerError, match="not finite"):
        results.encode(broken, Encoding.JSON)


def test_sample_as_the_sdk_reads_protobuf() -> None:
    read = response_conv.deserialize_sample_response(results.encode(SAMPLED, Encoding.PROTOBUF))
    assert [sequence.tokens for sequence in read.sequences] == [[4, 5], [6]]
    assert [sequence.logprobs for sequence in read.sequences] == [[-0.5, -1.0], [-0.25]]
    assert [sequence.stop_reason for sequence in read.sequences] == ["stop", "length"]
    assert read.prompt_logprobs == [None, -1.5]
    assert read.topk_prompt_logprobs is not None
    assert read.topk_prompt_logprobs[0] is None
    assert read.topk_prompt_logprobs[1] == [(9, pytest.approx(-0.1)), (8, -3.0)]
    assert read.prompt_cache_hit_tokens == 1


def test_sample_as_json() -> None:
    read = plain(SAMPLED, Encoding.JSON)
    assert read["sequences"][1] == {"stop_reason": "length", "tokens": [6], "logprobs": [-0.25]}
    assert read["prompt_logprobs"] == [None, -1.5]
    assert read["topk_prompt_logprobs"] == [None, [[9, pytest.approx(-0.1)], [8, -3.0]]]
    assert "error" not in read


def test_sample_as_msgpack() -> None:
    read = plain(SAMPLED, Encoding.MSGPACK)
    assert array(read["sequences"][0]["tokens"]).tolist() == [4, 5]
    assert array(read["sequences"][0]["logprobs"]).tolist() == [-0.5, -1.0]
    assert np.isnan(array(read["prompt_logprobs"])[0])
    assert array(read["topk_prompt_logprobs"]["token_ids"]).tolist() == [[0, 0], [9, 8]]


def test_small_results() -> None:
    path = TinkerPath("tinker://m/weights/a")
    cases = [
        (WeightsSaved(path), {"type": "save_weights", "path": path}),
        (
            WeightsLoaded(path, ModelId("m")),
            {"type": "load_weights", "path": path, "model_id": "m"},
        ),
        (
            SamplerWeightsSaved(sampling_session_id=SamplingSessionId("s")),
            {"type": "save_weights_for_sampler", "sampling_session_id": "s"},
        ),
        (ModelUnloaded(ModelId("m")), {"type": "unload_model", "model_id": "m"}),
    ]
    for result, expected in cases:
        assert plain(result, Encoding.JSON) == expected
        assert plain(result, Encoding.MSGPACK) == expected


def test_protobuf_falls_back_to_json() -> None:
    done = OptimStepDone({"grad_norm:mean": 1.0, "bad:mean": float("inf")}, version=3)
    assert results.available(done, Encoding.PROTOBUF) is Encoding.JSON
    read = OptimStepResponse.model_validate(plain(done, Encoding.JSON))
    assert read.metrics == {"grad_norm:mean": 1.0}


def test_a_failure_says_whose_fault() -> None:
    assert results.failure(UserError("bad")) == {"error": "bad", "category": "user"}
    assert results.failure(ServerError("sorry"))["category"] == "server"
