"""What users of such servers report, and what recipes rely on: each with the unmodified SDK, on a
real socket, against torch.

Elsewhere: sparse inputs, losses and keys that are not there (`test_newest`), full queues
(`test_pressure`), top-k and named tokens (`test_scores`), restarts (`test_restart`), what a repeat
of each request gets (`tests/api/test_http`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker
from support.node import CONFIG, serving_in_a_thread
from tinker import types

from openrl.config import EngineConfig, ModelSource

from .lossy import lossy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

MODEL = "tiny/demo"
KEY = "tml-reported"
FILES = Path(__file__).parents[2] / "openrl" / "demo" / "model"
PROMPT = [11, 12, 13, 14]
CLOSE = 1e-4  # between two ways to compute one number in fp32


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = replace(
        CONFIG,
        models=(ModelSource(MODEL, FILES),),
        engine=EngineConfig(process="thread", device="cpu", threads=1),
        poll_seconds=20.0,
    )
    with serving_in_a_thread(tmp_path_factory.mktemp("torch"), config) as url:
        yield url


@pytest.fixture(scope="module")
def service(address: str) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=address, api_key=KEY)


@pytest.fixture(scope="module")
def base(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=MODEL).result()


def model(service: tinker.ServiceClient, seed: int = 1) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model=MODEL, rank=4, seed=seed).result()


def datum(tokens: list[int], weights: list[float] | None = None) -> types.Datum:
    given = weights if weights is not None else [1.0] * (len(tokens) - 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
            "weights": types.TensorData.from_numpy(np.array(given, np.float32)),
        },
    )


DATA = [datum([1, 2, 3, 4, 5]), datum([9, 8, 7])]


def logprobs(training: tinker.TrainingClient, data: list[types.Datum]) -> list[float]:
    output = training.forward(data, "cross_entropy").result()
    return [lp for record in output.loss_fn_outputs for lp in record["logprobs"].data]


def step(training: tinker.TrainingClient, data: list[types.Datum] | None = None, **adam: float):
    """One step at a rate at which a few of them change the model visibly."""
    params = types.AdamParams(**({"learning_rate": 0.01} | adam))
    gradient = training.forward_backward(data or DATA, "cross_entropy")
    done = training.optim_step(params)
    gradient.result()
    return done.result()


def sampled(client: tinker.SamplingClient, count: int = 1, **params: object):
    given = types.SamplingParams(**({"max_tokens": 8, "stop": []} | params))
    return client.sample(types.ModelInput.from_ints(PROMPT), count, given).result().sequences


# --- weights --------------------------------------------------------------------------------------


def test_a_fresh_adapter_is_the_base(
    service: tinker.ServiceClient, base: tinker.SamplingClient
) -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    scored = base.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None
    assert np.allclose(logprobs(model(service), [datum(tokens)]), scored[1:], atol=1e-5)


def test_sampled_and_recomputed_logprobs_agree(service: tinker.ServiceClient) -> None:
    training = model(service)
    for _ in range(3):
        step(training)
    sampler = training.save_weights_and_get_sampling_client().result()
    for sequence in sampled(sampler, 4, seed=3):
        tokens = [*PROMPT, *sequence.tokens]
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert np.allclose(scored[len(PROMPT) :], sequence.logprobs, atol=CLOSE)
        assert np.allclose(logprobs(training, [datum(tokens)]), scored[1:], atol=CLOSE)


def test_each_save_sees_the_step_before_it(service: tinker.ServiceClient) -> None:
    """Nothing is awaited in between."""
    training = model(service)
    seen = []
    tokens = [1, 2, 3, 4, 5]
    for _ in range(3):
        training.forward_backward(DATA, "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-3))
        sampler = training.save_weights_and_get_sampling_client().result()
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
        assert np.allclose(scored[1:], logprobs(training, [datum(tokens)]), atol=CLOSE)
        seen.append(sum(scored[1:]))
    assert seen[0] < seen[1] < seen[2]


def test_a_bad_batch_leaves_the_model_as_it_was(service: tinker.ServiceClient) -> None:
    disturbed, alone = model(service, seed=5), model(service, seed=5)
    step(disturbed)
    step(alone)
    for bad in ([datum([1, 2, 3], [1.0])], [datum([1, 10**6, 3])], [datum([1, 2], [np.nan])]):
        with pytest.raises(tinker.RequestFailedError, match="datum 0"):
            disturbed.forward_backward(bad, "cross_entropy").result()
    step(disturbed)
    step(alone)
    assert logprobs(disturbed, DATA) == logprobs(alone, DATA)


def test_loading_with_the_optimizer_goes_on_and_without_begins_anew(
    service: tinker.ServiceClient,
) -> None:
    training = model(service)
    for _ in range(3):
        step(training)
    path = training.save_state("middle").result().path
    with_it = service.create_training_client_from_state_with_optimizer(path).result()
    without = service.create_training_client_from_state(path).result()
    assert logprobs(with_it, DATA) == logprobs(without, DATA) == logprobs(training, DATA)
    for each in (training, with_it, without):
        step(each)
    after = [logprobs(each, DATA) for each in (training, with_it, without)]
    assert after[0] == after[1]
    assert not np.allclose(after[0], after[2], atol=1e-3)


def test_calls_add_up_to_one_gradient(service: tinker.ServiceClient) -> None:
    apart, together = model(service, seed=2), model(service, seed=2)
    for each in DATA:
        apart.forward_backward([each], "cross_entropy")
    together.forward_backward(DATA, "cross_entropy")
    for training in (apart, together):
        training.optim_step(types.AdamParams(learning_rate=0.01)).result()
    assert np.allclose(logprobs(apart, DATA), logprobs(together, DATA), atol=1e-5)


def test_decay_and_clipping_do_something(service: tinker.ServiceClient) -> None:
    """Clipped before the moments, a step of plain Adam would hardly notice: two steps with
    gradients of different sizes do."""
    large = [datum([1, 2, 3, 4, 5], [50.0] * 4)]
    after = []
    for adam in ({}, {"weight_decay": 5.0}, {"grad_clip_norm": 0.01}):
        training = model(service, seed=4)
        for data in (large, DATA):
            metrics = step(training, data, **adam).metrics
        after.append(logprobs(training, DATA))
    assert metrics is not None
    assert metrics["grad_norm"] > 0.01, "the norm is told as it was before it was clipped"
    assert not np.allclose(after[0], after[1], atol=1e-3)
    assert not np.allclose(after[0], after[2], atol=1e-3)


def test_weights_may_be_negative_and_the_loss_is_their_plain_sum(
    service: tinker.ServiceClient,
) -> None:
    training = model(service)
    weights = [0.0, -2.0, 0.5, 3.0]
    data = [datum([1, 2, 3, 4, 5], weights)]
    output = training.forward_backward(data, "cross_entropy").result()
    lps = output.loss_fn_outputs[0]["logprobs"].data
    assert np.isclose(output.metrics["loss:sum"], -np.dot(weights, lps), rtol=1e-5)


def test_chunks_are_laid_end_to_end(service: tinker.ServiceClient) -> None:
    training = model(service)
    whole = datum([1, 2, 3, 4, 5])
    pieces = [[1], [], [2, 3], [], [4], []]
    chunks = [types.EncodedTextChunk(tokens=each) for each in pieces]
    cut = types.Datum(
        model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=whole.loss_fn_inputs
    )
    assert logprobs(training, [cut]) == logprobs(training, [whole])


# --- sampling -------------------------------------------------------------------------------------


def test_a_seed_repeats_and_its_samples_differ(base: tinker.SamplingClient) -> None:
    once, again = (sampled(base, 32, seed=7, temperature=1.5) for _ in range(2))
    assert [each.tokens for each in once] == [each.tokens for each in again]
    assert len({tuple(each.tokens) for each in once}) > 16


def test_a_string_stop_that_is_no_single_token_ends_a_sample(base: tinker.SamplingClient) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FILES)
    free = sampled(base, seed=2, max_tokens=24, temperature=1.2)[0]
    text = tokenizer.decode(free.tokens)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    got = sampled(base, seed=2, max_tokens=24, temperature=1.2, stop=[stop])[0]
    assert got.stop_reason == "stop"
    assert got.tokens == free.tokens[: len(got.tokens)]
    assert stop in tokenizer.decode(got.tokens)
    assert stop not in tokenizer.decode(got.tokens[:-1])


def test_the_token_that_stops_is_given(base: tinker.SamplingClient) -> None:
    free = sampled(base, seed=2)[0]
    stop = free.tokens[4]
    got = sampled(base, seed=2, stop=[stop])[0]
    assert got.stop_reason == "stop"
    assert got.tokens == free.tokens[: free.tokens.index(stop) + 1]
    assert len(got.logprobs) == len(got.tokens)


def test_prompt_logprobs_have_the_prompts_length(base: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=1)
    prompt = types.ModelInput.from_ints(PROMPT)
    got = base.sample(
        prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=20
    ).result()
    assert [each is None for each in got.prompt_logprobs] == [True, False, False, False]
    assert [len(row or ()) for row in got.topk_prompt_logprobs] == [0, 20, 20, 20]
    for row in got.topk_prompt_logprobs[1:]:
        assert [lp for _, lp in row] == sorted((lp for _, lp in row), reverse=True)


def test_a_short_sample_passes_a_long_one(base: tinker.SamplingClient) -> None:
    prompt = types.ModelInput.from_ints(PROMPT)
    long = base.sample(prompt, 4, types.SamplingParams(max_tokens=400, stop=[]))
    for turn in range(3):  # players of a game that await each other
        sampled(base, seed=turn, max_tokens=2)
    assert not long.future().done()
    assert len(long.result().sequences[0].tokens) == 400


async def test_hearts_beat_beside_512_samples(address: str, service: tinker.ServiceClient) -> None:
    sampler = await service.create_sampling_client_async(base_model=MODEL)
    session = service.holder._session_id
    params = types.SamplingParams(max_tokens=8, stop=[])
    prompt = types.ModelInput.from_ints(PROMPT)
    many = asyncio.gather(*(sampler.sample(prompt, 1, params) for _ in range(512)))
    longest = 0.0
    async with httpx.AsyncClient(base_url=address, headers={"X-API-Key": KEY}) as http:
        while not many.done():
            started = time.monotonic()
            beat = await http.post("/api/v1/session_heartbeat", json={"session_id": session})
            longest = max(longest, time.monotonic() - started)
            assert beat.status_code == 200
            await asyncio.wait([many], timeout=0.05)
    assert all(len(each.sequences[0].tokens) == 8 for each in await many)
    assert longest < 5.0, "the SDK gives a heartbeat 10 s"


# --- what is lost on the way ----------------------------------------------------------------------


def test_lost_answers_change_nothing(address: str, service: tinker.ServiceClient) -> None:
    """Of every POST that a loop makes, and of polls: the SDK sends it again, and it is not done
    twice."""
    routes = ("forward_backward", "optim_step", "save_weights", "retrieve_future", "asample",
              "save_weights_for_sampler", "retrieve_futures")  # fmt: skip
    calm = model(service, seed=9)
    with lossy(address, *routes) as (unsteady, proxy):
        shaken = model(tinker.ServiceClient(base_url=unsteady, api_key=KEY), seed=9)
        for training in (calm, shaken):
            for _ in range(2):
                step(training)
            training.save_state("kept").result()
        sampler = shaken.save_weights_and_get_sampling_client().result()
        tokens = sampled(sampler, seed=1)[0].tokens
        assert logprobs(shaken, DATA) == logprobs(calm, DATA)
        assert set(proxy.lost) == set(routes)
    same = calm.save_weights_and_get_sampling_client().result()
    assert sampled(same, seed=1)[0].tokens == tokens


def test_a_name_is_taken_once_for_each_kind(service: tinker.ServiceClient) -> None:
    """A conflict is no 409, which the SDK would repeat for minutes."""
    training = model(service)
    paths = {training.save_state("x").result().path}
    paths.add(training.save_weights_for_sampler("x").result().path)
    assert len(paths) == 2
    assert model(service).save_state("x").result().path not in paths
    started = time.monotonic()
    with pytest.raises(tinker.RequestFailedError, match="x"):
        training.save_state("x").result()
    assert time.monotonic() - started < 20
    assert training.save_state("x", overwrite=True).result().path in paths


# --- names, and what is refused -------------------------------------------------------------------


def test_metadata_comes_back_with_the_run(service: tinker.ServiceClient, address: str) -> None:
    metadata = {"wandb_link": "w", "renderer_name": "r"}
    training = service.create_lora_training_client(
        base_model=MODEL, rank=4, user_metadata=metadata
    ).result()
    rest = tinker.RestClient(base_url=address, api_key=KEY)
    assert rest.get_training_run(training.model_id).result().user_metadata == metadata


def test_a_loss_without_a_public_formula(service: tinker.ServiceClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match=r"stable_reinforce.*importance_sampling"):
        model(service).forward_backward(DATA, "stable_reinforce").result()


def test_another_optimizer(service: tinker.ServiceClient) -> None:
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError), match="dimuon"):
        service.create_lora_training_client(
            base_model=MODEL, rank=4, optimizer=types.DimuonOptimizerConfig()
        ).result()


def test_images(service: tinker.ServiceClient, base: tinker.SamplingClient) -> None:
    image = types.ImageChunk(data=b"png", format="png", expected_tokens=4)
    prompt = types.ModelInput(chunks=[image, types.EncodedTextChunk(tokens=PROMPT)])
    with pytest.raises(tinker.APIStatusError, match="image"):
        base.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    bad = types.Datum(model_input=prompt, loss_fn_inputs=DATA[0].loss_fn_inputs)
    with pytest.raises(tinker.RequestFailedError, match="image"):
        model(service).forward_backward([bad], "cross_entropy").result()
