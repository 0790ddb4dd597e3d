"""Waiting: polls that are held, work that is taken back, queues that are full."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from support.node import CONFIG, MODEL, serving

from openrl.config import SchedulerConfig
from openrl.engines.base import (
    Capacity,
    DecodePass,
    Executed,
    LoadProgress,
    Pass,
    TrainPass,
    TrainReport,
)
from openrl.engines.fake import FakeEngine
from openrl.errors import EngineDied
from openrl.types import ForwardBackwardOutput

from .conftest import Http


class Gate:
    """Holds the engine in its next passes of one kind until it is opened."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._open = threading.Event()

    def __call__(self, work: Pass) -> None:
        if isinstance(work, self._kind):
            assert self._open.wait(30)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(request: pytest.FixtureRequest) -> Gate:
    return Gate(request.param)


@pytest.fixture
async def http(tmp_path: Path, gate: Gate) -> AsyncIterator[Http]:
    config = replace(CONFIG, poll_seconds=0.05, scheduler=SchedulerConfig(max_queued_samples=2))
    engine = FakeEngine([MODEL], before=gate)
    async with serving(tmp_path, config, engine) as node, aiohttp.ClientSession() as session:
        try:
            yield Http(node.address, session)
        finally:
            gate.open()


def forward_backward(model_id: str, seq_id: int) -> dict:
    tensor = {"data": [1], "dtype": "int64"}
    weights = {"data": [1.0], "dtype": "float32"}
    datum = {
        "model_input": {"chunks": [{"tokens": [1]}]},
        "loss_fn_inputs": {"target_tokens": tensor, "weights": weights},
    }
    content = {"data": [datum], "loss_fn": "cross_entropy"}
    return {"model_id": model_id, "seq_id": seq_id, "forward_backward_input": content}


async def new_sampler(http: Http) -> str:
    body = {"session_id": await http.new_session(), "sampling_session_seq_id": 0}
    answer = await http.good("create_sampling_session", body | {"base_model": MODEL})
    sampler: str = answer["sampling_session_id"]
    return sampler


def sample(sampler: str, seq_id: int) -> dict:
    return {
        "sampling_session_id": sampler,
        "seq_id": seq_id,
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 2},
    }


@pytest.mark.parametrize("gate", [TrainPass], indirect=True)
async def test_a_poll_says_that_and_why_it_waits(http: Http, gate: Gate) -> None:
    model_id = await http.new_model()
    promise = await http.good("forward_backward", forward_backward(model_id, 1))
    behind = await http.good("optim_step", {"model_id": model_id, "seq_id": 2})
    for each in (promise, behind):
        poll = {"request_id": each["request_id"], "allow_metadata_only": True}
        for accept in ("application/x-protobuf", "application/json"):
            status, answer = await http.post("retrieve_future", poll, Accept=accept)
            assert status == 408
            assert answer["type"] == "try_again"
            assert answer["request_id"] == each["request_id"]
            assert answer["queue_state"] in ("active", "paused_capacity", "paused_rate_limit")
            assert answer["queue_state_reason"]
    gate.open()
    assert "loss:sum" in (await http.result(promise))["metrics"]
    assert (await http.result(behind))["version"] == 1


@pytest.mark.parametrize("gate", [TrainPass], indirect=True)
async def test_a_held_poll_is_answered_as_soon_as_there_is_a_result(http: Http, gate: Gate) -> None:
    model_id = await http.new_model()
    promise = await http.good("forward_backward", forward_backward(model_id, 1))
    poll = asyncio.get_running_loop().create_task(http.result(promise))
    gate.open()
    assert "loss:sum" in (await poll)["metrics"]


@pytest.mark.parametrize("gate", [DecodePass], indirect=True)
async def test_full_queues_are_429_with_a_time(http: Http, gate: Gate) -> None:
    sampler = await new_sampler(http)
    accepted = [await http.good("asample", sample(sampler, seq)) for seq in (0, 1)]
    status, headers, answer = await http.ask_with_headers("POST", "asample", sample(sampler, 2))
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert "2 samples" in answer["detail"]
    again = await http.good("asample", sample(sampler, 1))  # a repeat is no new work
    assert again == accepted[1]
    gate.open()
    for promise in accepted:
        assert (await http.result(promise))["sequences"]
    assert (await http.done("asample", sample(sampler, 2)))["sequences"]


@pytest.mark.parametrize("gate", [DecodePass], indirect=True)
async def test_a_sample_taken_back_fails_and_frees_its_place(http: Http, gate: Gate) -> None:
    sampler = await new_sampler(http)
    promises = [await http.good("asample", sample(sampler, seq)) for seq in (0, 1)]
    for promise in promises:
        request = {"request_id": promise["request_id"]}
        assert (await http.as_other().post("cancel_future", request))[0] == 404
        assert await http.post("cancel_future", request) == (204, b"")
    gate.open()
    waiting = await http.result(promises[1])
    assert waiting["category"] == "user"
    assert await http.post("cancel_future", {"request_id": promises[1]["request_id"]}) == (204, b"")
    assert (await http.done("asample", sample(sampler, 2)))["sequences"]


class SlowToLoad(FakeEngine):
    def __init__(self) -> None:
        super().__init__([MODEL])
        self.may_load = threading.Event()

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        assert self.may_load.wait(30)
        return super().load(progress)


async def test_work_that_comes_while_weights_load_waits(tmp_path: Path) -> None:
    engine = SlowToLoad()
    config = replace(CONFIG, poll_seconds=0.05)
    async with serving(tmp_path, config, engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        try:
            _, ready = await http.ask("GET", "readyz")
            assert ready["models"][MODEL]["state"] == "loading"
            body = {"session_id": await http.new_session(), "model_seq_id": 0, "base_model": MODEL}
            promise = await http.good("create_model", body | {"lora_config": {"rank": 8}})
            model_id = promise["model_id"]
            behind = await http.good("forward_backward", forward_backward(model_id, 1))
            status, answer = await http.post("retrieve_future", behind)
            assert status == 408
            assert answer["queue_state"] == "paused_capacity"
            assert "loading" in answer["queue_state_reason"]
        finally:
            engine.may_load.set()
        assert (await http.result(promise))["model_id"] == model_id
        assert "loss:sum" in (await http.result(behind))["metrics"]
        _, ready = await http.ask("GET", "readyz")
        assert ready["models"][MODEL]["state"] == "ready"


class OddResults(FakeEngine):
    """Answers in a dtype that no wire has."""

    def execute(self, work: Pass) -> Executed:
        done = super().execute(work)
        if not isinstance(done.report, TrainReport):
            return done
        odd = ForwardBackwardOutput(({"logprobs": np.zeros(1, np.complex64)},), {"loss:sum": 0.0})
        return replace(done, report=TrainReport((odd,) * len(done.report.outcomes)))


async def test_a_result_that_cannot_be_sent_fails_and_is_not_polled_forever(tmp_path: Path) -> None:
    engine = OddResults([MODEL])
    async with serving(tmp_path, engine=engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        promise = await http.good("forward_backward", forward_backward(await http.new_model(), 1))
        for accept in ("application/x-protobuf", "application/json"):
            answer = await http.result(promise, Accept=accept)
            assert answer["category"] == "server"


async def test_a_sample_that_a_stopping_server_leaves_is_one_to_send_again(tmp_path: Path) -> None:
    """410 makes a client repeat a sample. Training work is journalled: its poll goes on with the
    next process."""
    gate = Gate(DecodePass)
    engine = FakeEngine([MODEL], before=gate)
    async with serving(tmp_path, engine=engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        model_id, sampler = await http.new_model(), await new_sampler(http)
        sampled = await http.good("asample", sample(sampler, 0))
        trained = await http.good("forward_backward", forward_backward(model_id, 1))
        assert await node.services.admission.drain(0.0) == 2
        status, _ = await http.post("retrieve_future", sampled)
        other, answer = await http.post("retrieve_future", trained)
        gate.open()
    assert status == 410
    assert (other, answer["queue_state"]) == (408, "paused_capacity")
    assert "goes on when the server is back" in answer["queue_state_reason"]


async def test_a_node_without_its_engine_is_not_ready(tmp_path: Path) -> None:
    def die(work: Pass) -> None:
        raise EngineDied("its process was killed")

    engine = FakeEngine([MODEL], before=die)
    async with serving(tmp_path, engine=engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        assert (await http.ask("GET", "readyz"))[0] == 200
        promise = await http.good("asample", sample(await new_sampler(http), 0))
        polled = await http.post("retrieve_future", promise)
        status, ready = await http.ask("GET", "readyz")
    assert polled[0] == 410, "it is to be sent again"
    assert (status, ready["status"]) == (503, "failed")
    assert "killed" in ready["models"][MODEL]["error"]
