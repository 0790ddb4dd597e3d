"""The wire against bytes that the tinker SDK 0.38 itself produced."""

import numpy as np
import pytest

from openrl.api import datums, results
from openrl.api.codec import Encoding
from openrl.config import Limits
from openrl.errors import UserError
from openrl.types import ForwardBackward, ForwardBackwardOutput, SampledSequence, SampleOutput

REQUEST = bytes.fromhex(
    "0a09733a747261696e3a3010011a640a100a0e0a0c01000000020000000300000012300a0d7461726765745f746f"
    "6b656e73121f0a180200000000000000030000000000000004000000000000001802220103121e0a0777656967"
    "68747312130a0c000000000000803f0000803f1801220103220370706f2a1d0a12636c69705f6c6f775f746872"
    "6573686f6c6411000000000000e03f30013a1f0a12636c69705f6c6f775f7468726573686f6c64120909000000"
    "000000e03f"
)
FORWARD_BACKWARD = (
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000040c0121800"
    "0000000000000008000000000000000c00000000000000180118021a130a086c6f73733a73756d110000000000"
    "00f83f"
)
SAMPLE = "0a160801120807000000080000001a08000000bf000080be12080000c07f000080bf"


def test_request_of_the_sdk_is_read() -> None:
    call = datums.from_protobuf(REQUEST, False, Limits())
    assert (call.model_id, call.seq_id) == ("s:train:0", 1)
    assert isinstance(call.operation, ForwardBackward)
    assert call.operation.loss_fn == "ppo"
    assert call.operation.loss_fn_config == {"clip_low_threshold": 0.5}
    assert call.operation.forward_only
    (datum,) = call.operation.data
    assert datum.tokens.dtype == np.int32
    assert datum.tokens.tolist() == [1, 2, 3]
    assert datum.loss_inputs["target_tokens"].dtype == np.int64
    assert datum.loss_inputs["target_tokens"].tolist() == [2, 3, 4]
    assert datum.loss_inputs["weights"].dtype == np.float32
    assert datum.loss_inputs["weights"].tolist() == [0, 1, 1]


def test_a_cut_request_is_refused() -> None:
    with pytest.raises(UserError, match="malformed protobuf"):
        datums.from_protobuf(REQUEST[:-3], False, Limits())


def test_forward_backward_output_is_what_the_sdk_expects() -> None:
    output = ForwardBackwardOutput(
        outputs=(
            {"logprobs": np.array([-1, -2], dtype=np.float32)},
            {"logprobs": np.array([-3], dtype=np.float32)},
        ),
        metrics={"loss:sum": 1.5},
    )
    assert results.encode(output, Encoding.PROTOBUF).hex() == FORWARD_BACKWARD


def test_sample_output_is_what_the_sdk_expects() -> None:
    output = SampleOutput(
        sequences=(
            SampledSequence(
                np.array([7, 8], dtype=np.int32),
                np.array([-0.5, -0.25], dtype=np.float32),
                "length",
            ),
        ),
        prompt_logprobs=np.array([np.nan, -1], dtype=np.float32),
    )
    assert results.encode(output, Encoding.PROTOBUF).hex() == SAMPLE
