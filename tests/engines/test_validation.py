"""What is refused at the door, and that the message names the datum and the field."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from openrl.config import Limits
from openrl.engines.base import BaseModelInfo, WeightsKey
from openrl.engines.losses import LOSSES
from openrl.engines.validation import check_sample, check_training, max_new_tokens
from openrl.errors import InvalidDatum, UserError
from openrl.types import (
    AdamParams,
    CreateModel,
    CreateModelFromCheckpoint,
    Datum,
    ForwardBackward,
    LoadWeights,
    LoraConfig,
    Malformed,
    OptimStep,
    Sample,
    SamplingParams,
    SamplingSessionId,
    SaveWeights,
    SaveWeightsForSampler,
    Stop,
    TinkerPath,
    TrainingOperation,
    UnloadModel,
)

INFO = BaseModelInfo("base", WeightsKey("w"), 16, 50, (49,), "base", 32, "llama")
LIMITS = replace(Limits(), datums=3, num_samples=4, topk_prompt_logprobs=5)


def check(operation: TrainingOperation) -> None:
    check_training(operation, INFO, LIMITS)


def message(operation: TrainingOperation) -> str:
    with pytest.raises(UserError) as refused:
        check(operation)
    return refused.value.message


def datum(n: int = 3, **inputs: Any) -> Datum:
    return Datum(np.arange(n, dtype=np.int32), inputs)


def policy(n: int = 3, **changes: Any) -> dict[str, Any]:
    inputs = {
        "target_tokens": np.arange(n),
        "logprobs": np.zeros(n, np.float32),
        "advantages": np.ones(n, np.float32),
    } | changes
    return {name: value for name, value in inputs.items() if value is not None}


def entropy(n: int = 3, **changes: Any) -> dict[str, Any]:
    inputs = {"target_tokens": np.arange(n), "weights": np.ones(n, np.float32)} | changes
    return {name: value for name, value in inputs.items() if value is not None}


def train(
    *data: Datum, loss: str = "cross_entropy", config: dict[str, float | str] | None = None
) -> ForwardBackward:
    return ForwardBackward(data, loss, config or {})


# --- forward_backward ----------------------------------------------------------------------


def test_every_loss_takes_its_inputs_and_ignores_others() -> None:
    extra = {"mask": np.full(7, np.nan, np.float32), "unheard_of": np.zeros((2, 2))}
    mask = {"sequence_ratio_mask": np.ones(3, np.float32)}
    for loss in LOSSES:
        inputs = entropy() if loss == "cross_entropy" else policy() | mask
        check(train(datum(**inputs, **extra), loss=loss))
        defaults: dict[str, float | str] = dict(LOSSES[loss].config)
        check(train(datum(**inputs), loss=loss, config=defaults))


def test_the_defaults_are_the_protocols() -> None:
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    assert LOSSES["ppo"].configured({}) == clip
    assert LOSSES["ppo"].configured({"clip_low_threshold": 0}) == clip | {"clip_low_threshold": 0}
    assert LOSSES["cispo"].configured({}) == {"clip_low_threshold": 0, "clip_high_threshold": 4}
    assert LOSSES["dro"].configured({}) == {"beta": 0.05}


def test_sparse_weights_and_many_targets_are_for_cross_entropy() -> None:
    both = entropy(target_tokens=np.zeros((3, 2), int), weights=np.ones((3, 2), np.float32))
    check(train(datum(**both)))
    check(train(datum(**entropy(weights=np.array([-1, 0, 2], np.float32)))))
    many = policy(target_tokens=np.zeros((3, 2), int))
    assert "datum 0: target_tokens: has shape [3, 2]" in message(train(datum(**many), loss="ppo"))


@pytest.mark.parametrize("loss", ["nope", "stable_reinforce", "custom", ""])
def test_an_unknown_loss_lists_the_known(loss: str) -> None:
    text = message(train(datum(**entropy()), loss=loss))
    assert all(known in text for known in LOSSES)


def test_an_unknown_config_key_lists_the_known() -> None:
    text = message(train(datum(**policy()), loss="ppo", config={"clip_lo": 0.1}))
    assert "'clip_lo'" in text
    assert "clip_low_threshold, clip_high_threshold" in text
    assert "none" in message(train(datum(**entropy()), config={"beta": 0.1}))


@pytest.mark.parametrize("value", [math.nan, math.inf, "0.8"])
def test_a_config_value_is_a_finite_number(value: float | str) -> None:
    work = train(datum(**policy()), loss="dro", config={"beta": value})
    assert "loss_fn_config.beta must be a finite number" in message(work)


def test_thresholds_do_not_cross() -> None:
    work = train(datum(**policy()), loss="ppo", config={"clip_low_threshold": 1.5})
    assert "clip_low_threshold 1.5 is above clip_high_threshold 1.2" in message(work)


@pytest.mark.parametrize(
    ("inputs", "field", "problem"),
    [
        (policy(logprobs=None), "logprobs", "is missing; ppo needs it"),
        (policy(target_tokens=None), "target_tokens", "is missing"),
        (policy(advantages=np.ones(2, np.float32)), "advantages", "has shape [2]"),
        (policy(advantages=np.float32(1)), "advantages", "has shape []"),
        (policy(advantages=np.ones(3)), "advantages", "must be float32, got float64"),
        (policy(logprobs=np.zeros(3, int)), "logprobs", "must be float32, got int64"),
        (policy(target_tokens=np.zeros(3, np.float32)), "target_tokens", "must be int64"),
        (policy(target_tokens=np.array([0, 50, 1])), "target_tokens", "token 50 at position 1"),
        (policy(target_tokens=np.array([0, 1, -1])), "target_tokens", "token -1 at position 2"),
        (policy(logprobs=np.array([0, 0, np.nan], np.float32)), "logprobs", "not finite at pos"),
        (policy(advantages=np.array([np.inf, 0, 0], np.float32)), "advantages", "not finite"),
        (policy(clip_low_threshold=np.ones(2, np.float32)), "clip_low_threshold", "has shape"),
        (
            policy(clip_high_threshold=np.full(3, np.nan, np.float32)),
            "clip_high_threshold",
            "is not finite",
        ),
    ],
)
def test_a_bad_input_names_its_datum_and_field(
    inputs: dict[str, Any], field: str, problem: str
) -> None:
    with pytest.raises(InvalidDatum) as refused:
        check(train(datum(**policy()), datum(**inputs), loss="ppo"))
    assert (refused.value.index, refused.value.field) == (1, field)
    assert problem in refused.value.problem


@pytest.mark.parametrize(
    ("bad", "field", "problem"),
    [
        (datum(0, **entropy(0)), "model_input", "is empty"),
        (datum(17, **entropy(17)), "model_input", "17 tokens, over the model's context of 16"),
        (Datum(np.array([0, 50], np.int32), entropy(2)), "model_input", "token 50 at position 1"),
        (Datum(np.array([-1, 0], np.int32), entropy(2)), "model_input", "token -1 at position 0"),
        (datum(**entropy(weights=None)), "weights", "is missing"),
        (datum(**entropy(weights=np.ones((3, 1), np.float32))), "weights", "has shape"),
        (datum(**entropy(target_tokens=np.zeros((3, 0), int))), "target_tokens", "or [3, K]"),
        (datum(**entropy(target_tokens=np.zeros((2, 3), int))), "target_tokens", "or [3, K]"),
        (datum(**entropy(target_tokens=np.zeros((3, 1, 1), int))), "target_tokens", "[3, 1, 1]"),
        (
            datum(**entropy(target_tokens=np.full((3, 2), 50))),
            "target_tokens",
            "token 50 at position [0, 0]",
        ),
    ],
)
def test_a_bad_datum_names_itself(bad: Datum, field: str, problem: str) -> None:
    with pytest.raises(InvalidDatum) as refused:
        check(train(bad))
    assert (refused.value.index, refused.value.field) == (0, field)
    assert problem in refused.value.problem


def test_a_request_holds_some_data_but_not_too_much() -> None:
    assert "at least one datum" in message(train())
    assert "4 datums, at most 3" in message(train(*[datum(**entropy())] * 4))
    check(train(datum(16, **entropy(16))))


# --- the other operations ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 0}, "lora_config.rank must be positive"),
        ({"rank": -4}, "lora_config.rank must be positive"),
        ({"rank": 12}, "lora_config.rank must be a power of 2"),
        ({"rank": 64}, "Lora_config.rank 64 exceeds max LoRA rank 32 for model base"),
        (
            {"train_attn": False, "train_mlp": False, "train_unembed": False},
            "At least one of train_unembed, train_mlp, or train_attn must be True",
        ),
        ({"alpha": math.nan}, "lora_config.alpha must be above 0 and at most 1000000, got nan"),
        ({"alpha": 0.0}, "lora_config.alpha must be above 0 and at most 1000000, got 0.0"),
        ({"alpha": 1e308}, "lora_config.alpha must be above 0 and at most 1000000, got 1e+308"),
        ({"seed": 2**64}, "lora_config.seed must fit 64 bits"),
        ({"seed": -(2**63) - 1}, "lora_config.seed must fit 64 bits"),
    ],
)
def test_lora(changes: dict[str, Any], text: str) -> None:
    lora = replace(LoraConfig(), **changes)
    path = TinkerPath("tinker://m/weights/a")
    assert message(CreateModel("base", lora)) == text
    assert message(CreateModelFromCheckpoint("base", lora, path, False)) == text


def test_good_ones_pass() -> None:
    for rank in (1, 2, 32):
        check(CreateModel("base", LoraConfig(rank=rank, train_mlp=False, train_unembed=False)))
    check(OptimStep(AdamParams(learning_rate=0.0, beta1=0.0, eps=0.0, grad_clip_norm=1e9)))
    check(SaveWeights("step-1.final", ttl_seconds=3600))
    check(SaveWeightsForSampler("a", None))
    check(SaveWeightsForSampler(None, SamplingSessionId("s:sample:0")))
    check(LoadWeights(TinkerPath("tinker://m/weights/a"), True))
    check(UnloadModel())


@pytest.mark.parametrize("field", ["learning_rate", "beta1", "eps", "weight_decay"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_adam(field: str, value: float) -> None:
    step = OptimStep(replace(AdamParams(), **{field: value}))
    assert f"adam_params.{field} must be finite, at least 0" in message(step)


def test_betas_are_below_one() -> None:
    assert "beta2" in message(OptimStep(AdamParams(beta2=1.0)))


@pytest.mark.parametrize(
    "operation",
    [
        SaveWeights("../a"),
        SaveWeights("a/b"),
        SaveWeights(""),
        SaveWeights("a", ttl_seconds=3599),
        SaveWeights("a", ttl_seconds=10**10),
        SaveWeightsForSampler("..", None),
        SaveWeightsForSampler(None, None),
        SaveWeightsForSampler("a", None, ttl_seconds=1),
        LoadWeights(TinkerPath("/etc/passwd"), False),
        Malformed(UserError("no")),
    ],
)
def test_bad_ones_do_not(operation: TrainingOperation) -> None:
    assert message(operation)


# --- samples -------------------------------------------------------------------------------


def sample(
    prompt: list[int], n: int = 1, topk: int = 0, max_tokens: int | None = 4, **params: Any
) -> Sample:
    settings = SamplingParams(max_tokens, **params)
    return Sample(np.array(prompt, np.int32), settings, n, topk_prompt_logprobs=topk)


def refused(bad: Sample) -> str:
    with pytest.raises(UserError) as error:
        check_sample(bad, INFO, LIMITS)
    return error.value.message


def test_the_context_holds_prompt_and_sample() -> None:
    check_sample(sample([0] * 12), INFO, LIMITS)
    assert refused(sample([0] * 13)) == (
        "Prompt length plus max_tokens exceeds the model's context window: 13 + 4 > 16"
    )
    assert max_new_tokens(sample([0] * 13, max_tokens=None), INFO) == 3
    assert "16 + 1 > 16" in refused(sample([0] * 16, max_tokens=None))


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (sample([]), "prompt: must hold at least one token"),
        (sample([0, 50]), "token 50 at position 1"),
        (sample([-1]), "token -1 at position 0"),
        (sample([0], n=0), "num_samples must be from 1 to 4, got 0"),
        (sample([0], n=5), "num_samples"),
        (sample([0], topk=6), "topk_prompt_logprobs must be from 0 to 5"),
        (sample([0], topk=-1), "topk_prompt_logprobs"),
        (sample([0], max_tokens=0), "max_tokens must be at least 1"),
        (sample([0], temperature=-0.1), "temperature"),
        (sample([0], temperature=math.nan), "temperature"),
        (sample([0], top_k=0), "top_k"),
        (sample([0], top_p=0.0), "top_p"),
        (sample([0], top_p=1.1), "top_p"),
        (sample([0], top_p=math.nan), "top_p"),
        (sample([0], stop=Stop(tokens=(-1,))), "stop"),
        (sample([0], stop=Stop(strings=("a", ""))), "stop"),
    ],
)
def test_a_bad_sample_is_refused(bad: Sample, text: str) -> None:
    assert text in refused(bad)


def test_good_samples_pass() -> None:
    check_sample(sample([0], n=4, topk=5, temperature=0.0, top_k=1, top_p=0.1), INFO, LIMITS)
    check_sample(sample([49], stop=Stop(False, (3,), ("x",)), seed=-(2**63)), INFO, LIMITS)
