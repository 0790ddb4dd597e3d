"""Models of silent clients leave the device's memory, and come back as they were."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.node import serving

import openrl
from openrl import demo
from openrl.config import Config, EngineConfig, ModelSource
from openrl.engines.base import ControlPass, Executed, PageOut, Pass
from openrl.engines.fake import FakeEngine
from openrl.engines.pytorch.deferred import DeferredTorchEngine
from openrl.housekeeping import end_leases
from openrl.server import Node, node
from openrl.types import AdamParams, Datum, ModelId

TORCH = Config(
    models=(ModelSource("openrl/sql-demo", demo.model_directory()),),
    port=0,
    engine=EngineConfig(process="thread", threads=1),
)
TOKENS = np.arange(3, 20)
DATA = [
    Datum(
        TOKENS[:-1].astype(np.int32),
        {"target_tokens": TOKENS[1:], "weights": np.ones(16, np.float32)},
    )
]
SILENCE = 300.0


def ended(running: Node, seconds_later: float) -> int:
    now = running.services.monotonic() + seconds_later
    services = replace(running.services, monotonic=lambda: now)
    return end_leases(running.actor.backlog, running.actor.leases, services, SILENCE)


class Torch(DeferredTorchEngine):
    """Remembers how many models were in memory after each that left it."""

    def __init__(self, pages: Path) -> None:
        super().__init__(TORCH.engine, TORCH.models, pages)
        self.in_memory: list[int] = []
        self._left = threading.Semaphore(0)

    def execute(self, work: Pass) -> Executed:
        executed = super().execute(work)
        if isinstance(work, ControlPass) and isinstance(work.control, PageOut):
            self.in_memory.append(executed.capacity.slots_used)
            self._left.release()
        return executed

    async def one_leaves(self) -> None:
        assert await asyncio.to_thread(self._left.acquire, timeout=20.0)


async def train(directory: Path, engine: Torch, leases_end: Iterable[int] = ()) -> list[float]:
    """Losses of a job beside which another one trains; at the steps `leases_end`, between a
    gradient and its step, both have been silent for too long."""
    losses = []
    async with (
        node(replace(TORCH, data=directory), engine=engine) as running,
        openrl.connect(running.address, "tml-a") as one,
        openrl.connect(running.address, "tml-b") as two,
    ):
        models = [await each.create_model("openrl/sql-demo", rank=4, seed=1) for each in (one, two)]
        for step in range(4):
            done = [await (await model.forward_backward(DATA)) for model in models]
            losses += [each.metrics["loss:sum"] for each in done]
            if step in leases_end:
                assert ended(running, seconds_later=SILENCE + 60.0) == 2
                await engine.one_leaves()
                await engine.one_leaves()
            for model in models:
                await (await model.optim_step(AdamParams(learning_rate=0.05)))
        return losses


async def test_a_model_goes_on_to_the_bit_where_its_lease_ended(tmp_path: Path) -> None:
    calm, leased = Torch(tmp_path / "idle-calm"), Torch(tmp_path / "idle-leased")
    expected = await train(tmp_path / "calm", calm)
    assert await train(tmp_path / "leased", leased, leases_end=(1, 2)) == expected
    assert leased.in_memory == [1, 0, 1, 0]
    assert len(set(expected)) == 4, "each step changes something, for both alike"


class Watched(FakeEngine):
    def __init__(self) -> None:
        super().__init__(["fake/tiny"])
        self.paged: list[ModelId] = []

    def execute(self, work: Pass) -> Executed:
        if isinstance(work, ControlPass) and isinstance(work.control, PageOut):
            self.paged.append(work.control.model_id)
        return super().execute(work)


@pytest.fixture
def engine() -> Watched:
    return Watched()


@pytest.fixture
async def running(tmp_path: Path, engine: Watched) -> AsyncIterator[Node]:
    async with serving(tmp_path, engine=engine) as one:
        yield one


async def test_once_for_each_silence(running: Node, engine: Watched) -> None:
    async with openrl.connect(running.address, "tml-a") as client:
        model = await client.create_model("fake/tiny", rank=4)
        assert ended(running, SILENCE - 60.0) == 0
        assert ended(running, SILENCE + 60.0) == 1
        assert ended(running, SILENCE + 70.0) == 0
        await model.save_state("here")  # by then the engine has had the other
        assert engine.paged == [model.model_id]
        running.services.heard[client.session_id] += 100.0
        assert ended(running, SILENCE + 60.0) == 0
        assert ended(running, SILENCE + 170.0) == 1


async def test_sessions_that_have_nothing_here_are_forgotten(running: Node) -> None:
    services = running.services
    for _ in range(5):
        async with openrl.connect(running.address, "tml-a") as client:
            await client.create_model("fake/tiny", rank=4)
    async with openrl.connect(running.address, "tml-a") as client:
        stays = await client.create_model("fake/tiny", rank=4)
        assert len(services.heard) == 6
        await running.actor.backlog.empty()
        ended(running, SILENCE + 60.0)
        assert set(services.heard) == {client.session_id}
        assert set(services.heartbeats) <= {client.session_id}
        await stays.save_state("here")
