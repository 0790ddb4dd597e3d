"""What the fields of a sample and of a step become."""

import msgspec
import pytest

from openrl.api import codec, schema
from openrl.api.codec import Encoding
from openrl.api.sampling import operation_of
from openrl.api.training import adam_of
from openrl.config import Limits
from openrl.types import AdamParams, Sample, SamplingParams, Stop


def sample(params: dict, **given: object) -> Sample:
    body = {"prompt": {"chunks": [{"tokens": [5, 6]}]}, "sampling_params": params} | given
    read = codec.parse(msgspec.json.encode(body), Encoding.JSON, schema.Sample)
    return operation_of(read, Limits())


@pytest.mark.parametrize(
    ("stop", "meaning"),
    [
        (None, Stop(eos=True)),
        ([], Stop(eos=False)),
        ("end", Stop(eos=True, strings=("end",))),
        (["a", "b"], Stop(eos=True, strings=("a", "b"))),
        ([7, 8], Stop(eos=True, tokens=(7, 8))),
        ([7, "a"], Stop(eos=True, tokens=(7,), strings=("a",))),
    ],
)
def test_stops(stop: object, meaning: Stop) -> None:
    assert sample({"stop": stop}).params.stop == meaning


def test_what_is_left_out_is_the_sdks_default() -> None:
    asked = sample({})
    assert asked.params == SamplingParams(
        max_tokens=None, seed=None, stop=Stop(), temperature=1.0, top_k=-1, top_p=1.0
    )
    assert (asked.num_samples, asked.prompt_logprobs, asked.topk_prompt_logprobs) == (1, False, 0)


def test_everything_is_carried_over() -> None:
    params = {"max_tokens": 9, "seed": 2**63, "temperature": 0.5, "top_k": 4, "top_p": 0.25}
    asked = sample(
        params,
        num_samples=3,
        prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        prompt_alt_tokens_k=4,
        prompt_logprobs_last_n=1,
        target_prompt_logprobs={"data": [7, -1], "dtype": "int64", "shape": [1, 2]},
    )
    assert asked.prompt.tolist() == [5, 6]
    assert asked.params == SamplingParams(9, 2**63, Stop(), 0.5, 4, 0.25)
    assert (asked.num_samples, asked.prompt_logprobs, asked.topk_prompt_logprobs) == (3, True, 2)
    assert (asked.topk_sample_logprobs, asked.prompt_alt_tokens_k) == (3, 4)
    assert asked.prompt_logprobs_last_n == 1
    targets = asked.target_prompt_logprobs
    assert targets is not None
    assert targets.shape == (1, 2)
    assert targets.values.tolist() == [7, -1]
    assert targets.rows().tolist() == [0, 0]


def test_off_is_not_set() -> None:
    off = {"topk_sample_logprobs": 0, "record_stability_info": False, "prompt_alt_tokens_k": None}
    assert sample({}, **off).num_samples == 1


def test_a_record_for_a_loss_that_is_not_offered_is_let_through() -> None:
    assert sample({}, record_stability_info=True).num_samples == 1


def test_all_that_a_step_may_say() -> None:
    given = schema.AdamParams(
        learning_rate=0.1, beta1=0.2, beta2=0.3, eps=0.4, weight_decay=0.5, grad_clip_norm=0.6
    )
    assert adam_of(given) == AdamParams(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert adam_of(schema.AdamParams()) == AdamParams(1e-4, 0.9, 0.95, 1e-12, 0.0, 0.0)
