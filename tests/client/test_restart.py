"""Our client goes on by itself when the server is killed and started again: the loop does not
notice, and its numbers are those of a quiet day."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.crash_server import FAKE
from support.crash_stage import Kill, Stage, end

import openrl
import openrl.client

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts on Linux's signals")

STEPS = 4


def datum(step: int) -> openrl.Datum:
    tokens = np.arange(2, 12) + step
    return openrl.Datum(tokens, {"target_tokens": tokens + 1, "weights": np.ones(10)})


async def waited(pending: openrl.client.Pending[Any]) -> Any:
    return await pending


async def sampled(model: openrl.client.Model, step: int) -> openrl.SampleOutput:
    sampler = await model.sampler()
    return await sampler.sample([3, 4, 5], 2, max_tokens=8, seed=step)


async def loop(stage: Stage, between: Callable[[int], Awaitable[None]]) -> list[Any]:
    """When `between` is called two results are polled for, and a sampler is asked for."""
    numbers: list[Any] = []
    async with openrl.connect(stage.url, "tml-restart", patience=60.0) as client:
        model = await client.create_model(FAKE, rank=8, seed=5)
        for step in range(STEPS):
            fb = await model.forward_backward([datum(step)])
            optim = await model.optim_step(openrl.AdamParams(learning_rate=1e-2))
            result, done, sample, _ = await asyncio.gather(
                waited(fb), waited(optim), sampled(model, step), between(step)
            )
            numbers += [
                result.metrics["loss:sum"],
                result.outputs[0]["logprobs"].tolist(),
                done.version,
                [sequence.tokens.tolist() for sequence in sample.sequences],
            ]
        numbers.append((await model.save_state("end")).rpartition("/")[2])
    return numbers


async def test_a_loop_goes_on_across_kills_of_the_server(tmp_path: Path) -> None:
    async def nothing(step: int) -> None:
        pass

    calm = Stage(tmp_path / "calm")
    server = calm.start(Kill())
    try:
        expected = await loop(calm, nothing)
    finally:
        end(server)

    storm = Stage(tmp_path / "storm")
    servers = [storm.start(Kill())]

    async def kill(step: int) -> None:
        """While all that is under way; the next server takes a while to come."""
        if step in (1, 2):
            end(servers[-1])
            servers.append(await asyncio.to_thread(storm.start, Kill()))

    try:
        numbers = await loop(storm, kill)
    finally:
        end(servers[-1])
    assert len(servers) == 3
    assert numbers == expected
