"""Samples of a client that is not heard any more are taken back."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from support.node import CONFIG, MODEL, serving

from openrl.engines.base import DecodePass, TrainPass
from openrl.engines.fake import FakeEngine
from openrl.housekeeping import take_back_unheard
from openrl.server import Node

from .conftest import Http
from .test_polls import Gate, forward_backward, new_sampler, sample


@pytest.fixture
def gate() -> Gate:
    return Gate((DecodePass, TrainPass))


@pytest.fixture
async def node(tmp_path: Path, gate: Gate) -> AsyncIterator[Node]:
    async with serving(tmp_path, CONFIG, FakeEngine([MODEL], before=gate)) as running:
        yield running
        gate.open()


@pytest.fixture
async def http(node: Node) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(node.address, session)


def taken(node: Node, seconds_later: float, silence: float = 300.0) -> int:
    now = node.services.monotonic() + seconds_later
    services = replace(node.services, monotonic=lambda: now)
    return take_back_unheard(node.actor.backlog, services.admission, services, silence)


async def test_samples_of_a_silent_client_go_and_its_training_stays(
    node: Node, http: Http, gate: Gate
) -> None:
    sampler = await new_sampler(http)
    model_id = await http.new_model(sampler.split(":")[0], seq=9)
    samples = [await http.good("asample", sample(sampler, seq)) for seq in range(3)]
    trains = await http.good("forward_backward", forward_backward(model_id, 1))
    await http.good("session_heartbeat", {"session_id": sampler.split(":")[0]})
    assert taken(node, seconds_later=299.0) == 0
    assert taken(node, seconds_later=301.0) == 3
    gate.open()
    for promise in samples:
        assert (await http.result(promise))["category"] == "user"
    assert "loss:sum" in (await http.result(trains))["metrics"]


async def test_a_client_that_speaks_is_not_gone(node: Node, http: Http) -> None:
    sampler = await new_sampler(http)
    await http.good("session_heartbeat", {"session_id": sampler.split(":")[0]})
    node.services.heartbeats[sampler.split(":")[0]] -= 1000.0  # its heart has stopped
    await http.good("asample", sample(sampler, 0))
    assert taken(node, seconds_later=0.0) == 0


async def test_a_client_without_a_heart_is_not_judged_by_it(node: Node, http: Http) -> None:
    await http.good("asample", sample(await new_sampler(http), 0))
    assert taken(node, seconds_later=1e6) == 0
