"""The client against the whole server on a real socket, with the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.node import CONFIG, MODEL, serving

import openrl
from openrl.config import Limits
from openrl.errors import Gone, NotFound, PayloadTooLarge, Unauthenticated, UserError
from openrl.server import Node
from openrl.types import AdamParams, Datum

KEY = "tml-ann"
T = TypeVar("T")


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with serving(tmp_path) as node:
        yield node


@pytest.fixture
async def client(node: Node) -> AsyncIterator[openrl.Client]:
    async with openrl.connect(node.address, KEY) as client:
        yield client


def datum(length: int = 4) -> Datum:
    tokens = np.arange(1, length + 1, dtype=np.int32)
    targets = np.arange(2, length + 2)
    return Datum(tokens, {"target_tokens": targets, "weights": np.ones(length)})


# --- training -------------------------------------------------------------------------------


async def test_operations_are_submitted_ahead_and_awaited_later(client: openrl.Client) -> None:
    model = await client.create_model(MODEL, rank=8)
    assert model.base_model == MODEL
    pairs = [(await model.forward_backward([datum()]), await model.optim_step()) for _ in range(3)]
    for step, (fb, optim) in enumerate(pairs, 1):
        assert (await optim).version == step
        assert "loss:sum" in (await fb).metrics


async def test_what_is_not_done_by_its_deadline_fails_alone(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    place = f"openrl/models/{model.model_id}"
    await client.transport.submit(f"{place}/pause", {})
    late = await model.forward_backward([datum()], deadline_seconds=0.05)
    with pytest.raises(UserError, match="before the deadline"):
        await late
    after = await model.forward_backward([datum()], deadline_seconds=60.0)
    await client.transport.submit(f"{place}/resume", {})
    assert "loss:sum" in (await after).metrics


async def test_a_sample_with_a_deadline_is_taken_out(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    sampler = await model.sampler()
    place = f"openrl/models/{model.model_id}"
    assert (await sampler.sample([1, 2], max_tokens=2, deadline_seconds=60.0)).sequences
    with pytest.raises(UserError, match="X-OpenRL-Deadline-Seconds"):
        await sampler.sample([1, 2], max_tokens=2, deadline_seconds=-1.0)
    await client.transport.submit(f"{place}/pause", {})
    with pytest.raises(UserError, match="before the deadline"):
        await (await model.optim_step(deadline_seconds=0.05))
    await client.transport.submit(f"{place}/resume", {})


async def test_outputs_are_numpy_of_the_targets_shape_in_order(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    many = Datum(
        np.array([1, 2], dtype=np.int32),
        {"target_tokens": [[1, 2, 3], [4, 5, 6]], "weights": np.ones((2, 3))},  # type: ignore[dict-item]
    )
    output = await (await model.forward([datum(3), many, datum(5)], "cross_entropy"))
    logprobs = [record["logprobs"] for record in output.outputs]
    assert [array.shape for array in logprobs] == [(3,), (2, 3), (5,)]
    assert {array.dtype for array in logprobs} == {np.dtype(np.float32)}


async def test_forward_leaves_nothing_to_step_with(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    await (await model.forward([datum()]))
    done = await (await model.optim_step())
    assert done.metrics["skipped_no_gradients"] == 1.0
    assert done.version == 0


async def test_calls_from_many_tasks_run_in_the_order_of_the_calls(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)

    async def step() -> int:
        await model.forward_backward([datum()])
        return (await (await model.optim_step())).version

    # Each task first submits its forward_backward, then all their steps follow: the first step
    # takes every gradient, and the others find none.
    assert await asyncio.gather(*(step() for _ in range(4))) == [1, 1, 1, 1]
    fine = [(await model.forward_backward([datum()]), await model.optim_step()) for _ in range(2)]
    assert [(await optim).version for _, optim in fine] == [2, 3]


async def test_a_failed_operation_raises_where_it_is_awaited_and_the_next_runs(
    client: openrl.Client,
) -> None:
    model = await client.create_model(MODEL)
    bad = Datum(np.array([1, 2], dtype=np.int32), {"target_tokens": np.array([1, 2])})
    failing = await model.forward_backward([datum(), bad])
    fine = await model.forward_backward([datum()])
    with pytest.raises(UserError, match="datum 1: weights"):
        await failing
    with pytest.raises(UserError, match="datum 1: weights"):
        await failing
    assert len((await fine).outputs) == 1


async def test_a_result_can_be_awaited_again_and_by_two_at_once(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    fb = await model.forward_backward([datum()])
    first, second = await asyncio.gather(_of(fb), _of(fb))
    assert first.metrics == second.metrics == (await fb).metrics


async def _of(pending: openrl.Pending[T]) -> T:
    return await pending


# --- checkpoints ----------------------------------------------------------------------------


async def test_a_saved_state_is_loaded_and_started_from(client: openrl.Client) -> None:
    model = await client.create_model(MODEL, rank=4)
    await (await model.forward_backward([datum()]))
    await (await model.optim_step())
    path = await model.save_state("one")
    assert path == f"tinker://{model.model_id}/weights/one"
    await model.load_state(path, optimizer=True)
    other = await client.create_model_from_checkpoint(path, optimizer=True)
    assert other.model_id != model.model_id
    assert other.base_model == MODEL
    await (await other.forward_backward([datum()]))


async def test_a_taken_name_is_refused_unless_overwritten(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    await model.save_state("one")
    with pytest.raises(UserError, match="one"):
        await model.save_state("one")
    await model.save_state("one", overwrite=True)


async def test_an_unloaded_model_is_gone_and_its_checkpoint_is_not(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    path = await model.save_state("one")
    await model.unload()
    with pytest.raises(UserError):
        await (await model.optim_step())
    await client.create_model_from_checkpoint(path)


# --- sampling -------------------------------------------------------------------------------


async def test_samples_of_a_model_a_checkpoint_and_a_base(client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    samplers = [
        await model.sampler(),
        await client.sampler(path=await model.save_sampler("one")),
        await client.sampler(base_model=MODEL),
    ]
    for sampler in samplers:
        output = await sampler.sample(np.array([1, 2, 3]), 2, max_tokens=5, stop=[])
        assert len(output.sequences) == 2
        for sequence in output.sequences:
            assert sequence.tokens.dtype == np.int32
            assert sequence.tokens.shape == sequence.logprobs.shape == (5,)
            assert sequence.stop_reason == "length"


async def test_prompt_logprobs_are_as_long_as_the_prompt(client: openrl.Client) -> None:
    sampler = await client.sampler(base_model=MODEL)
    logprobs = await sampler.compute_logprobs([1, 2, 3, 4])
    assert logprobs.shape == (4,)
    assert np.isnan(logprobs[0])
    assert np.isfinite(logprobs[1:]).all()
    output = await sampler.sample([1, 2, 3], max_tokens=1, topk_prompt_logprobs=2)
    assert output.topk_prompt_logprobs is not None
    assert output.topk_prompt_logprobs.token_ids.shape == (3, 2)


async def test_hundreds_of_samples_at_once(client: openrl.Client) -> None:
    sampler = await client.sampler(base_model=MODEL)
    outputs = await asyncio.gather(
        *(sampler.sample([1, 2, n % 7], max_tokens=2, stop=[]) for n in range(300))
    )
    assert {len(output.sequences[0].tokens) for output in outputs} == {2}


@pytest.mark.parametrize(
    ("prompt", "params", "problem"),
    [
        ([], {}, "prompt"),
        ([10**6], {}, "vocabulary"),
        ([1], {"max_tokens": 10**6}, "context"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
    ],
)
async def test_a_bad_sample_is_refused(
    client: openrl.Client, prompt: list[int], params: dict[str, float], problem: str
) -> None:
    sampler = await client.sampler(base_model=MODEL)
    with pytest.raises(UserError, match=problem):
        await sampler.sample(prompt, **params)  # type: ignore[arg-type]


# --- sessions and identity ------------------------------------------------------------------


async def test_an_unknown_base_model_is_named(client: openrl.Client) -> None:
    with pytest.raises(UserError, match="no/such"):
        await client.create_model("no/such")


async def test_a_bad_key_is_refused(node: Node) -> None:
    with pytest.raises(Unauthenticated, match="tml-"):
        async with openrl.connect(node.address, "sk-wrong"):
            pass


async def test_another_owners_checkpoint_is_not_there(node: Node, client: openrl.Client) -> None:
    model = await client.create_model(MODEL)
    path = await model.save_sampler("mine")
    async with openrl.connect(node.address, "tml-eve") as eve:
        with pytest.raises(NotFound):
            await eve.sampler(path=path)


async def test_leaving_finishes_the_session(node: Node) -> None:
    async with openrl.connect(node.address, KEY) as client:
        model = await client.create_model(MODEL)
        session_id = client.session_id
    with pytest.raises(UserError, match="not connected"):
        await model.optim_step()
    async with openrl.connect(node.address, KEY) as client:
        client.session_id = session_id
        with pytest.raises(Gone, match="success"):
            await client.create_model(MODEL)


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError, "errored"), (asyncio.CancelledError, "interrupted")]
)
async def test_the_reason_of_leaving_is_told(
    node: Node, error: type[BaseException], reason: str
) -> None:
    leaving = openrl.connect(node.address, KEY)
    with pytest.raises(error):
        async with leaving:
            raise error
    async with openrl.connect(node.address, KEY) as client:
        client.session_id = leaving.session_id
        with pytest.raises(Gone, match=reason):
            await client.create_model(MODEL)


# --- identity of requests -------------------------------------------------------------------


@asynccontextmanager
async def losing_answers(url: str, route: str) -> AsyncIterator[tuple[str, list[str]]]:
    """A proxy that hands on every request, and hangs up instead of giving the first answer to
    `route`. Yields its address and what it saw, as "route body"."""
    seen: list[str] = []
    lost: list[str] = []

    async def hand_on(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() in {"x-api-key", "accept"}}
        headers["Content-Type"] = request.content_type
        async with (
            aiohttp.ClientSession() as upstream,
            upstream.post(f"{url}{request.path}", data=body, headers=headers) as answer,
        ):
            data, status, kind = await answer.read(), answer.status, answer.content_type
        seen.append(f"{request.path.removeprefix('/api/v1/')} {body.hex()}")
        if request.path.endswith(f"/{route}") and not lost:
            lost.append(route)
            assert request.transport is not None
            request.transport.close()
        return web.Response(body=data, status=status, content_type=kind)

    app = web.Application()
    app.router.add_post("/{tail:.*}", hand_on)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), seen


def sent(seen: list[str], *routes: str) -> list[str]:
    return [request for request in seen if request.split()[0] in routes]


async def test_an_operation_is_sent_once_the_one_before_is_accepted(node: Node) -> None:
    async with (
        losing_answers(node.address, "forward_backward") as (url, seen),
        openrl.connect(url, KEY) as client,
    ):
        model = await client.create_model(MODEL)
        fb, optim = await asyncio.gather(model.forward_backward([datum()]), model.optim_step())
        await asyncio.gather(_of(fb), _of(optim))
    operations = sent(seen, "forward_backward", "optim_step")
    assert [request.split()[0] for request in operations] == [
        "forward_backward",
        "forward_backward",
        "optim_step",
    ]


async def test_a_step_whose_answer_was_lost_is_made_once(node: Node) -> None:
    async with (
        losing_answers(node.address, "optim_step") as (url, seen),
        openrl.connect(url, KEY) as client,
    ):
        model = await client.create_model(MODEL)
        await model.forward_backward([datum()])
        done = await (await model.optim_step(AdamParams(learning_rate=0.1)))
        assert done.version == 1
        assert "skipped_no_gradients" not in done.metrics
        first, second = sent(seen, "optim_step")
        assert first == second


async def test_a_model_whose_answer_was_lost_is_made_once(node: Node) -> None:
    async with (
        losing_answers(node.address, "create_model") as (url, seen),
        openrl.connect(url, KEY) as client,
    ):
        model = await client.create_model(MODEL)
        first, second = sent(seen, "create_model")
        assert first == second
        assert model.model_id == f"{client.session_id}:train:0"


async def test_a_refused_submit_leaves_no_hole(tmp_path: Path) -> None:
    """With a hole the next operation would wait for the gap, here longer than the test may."""
    config = replace(CONFIG, limits=Limits(body_bytes=100_000))
    async with serving(tmp_path, config) as node, openrl.connect(node.address, KEY) as client:
        model = await client.create_model(MODEL)
        with pytest.raises(PayloadTooLarge):
            await model.forward_backward([datum(50_000)])
        fb = await model.forward_backward([datum()])
        assert fb.request_id == f"{model.model_id}:1"
        await fb
