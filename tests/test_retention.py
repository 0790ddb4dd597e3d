"""What a node holds does not depend on how many came and went."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.held_objects import holdings
from support.node import CONFIG, MODEL, serving

import openrl
from openrl.catalogue import catalogue
from openrl.engines.base import DecodePass, Pass, TrainPass
from openrl.engines.fake import FakeEngine
from openrl.errors import OpenRLError
from openrl.housekeeping import end_leases, tidy
from openrl.scheduler import backlog, curves, models, pins
from openrl.scheduler.core import residency, story
from openrl.server import Node
from openrl.types import AdamParams, Datum

SESSIONS = 12
FEW = 8
"""What is remembered of the last thousands is of the last few here."""

TOKENS = np.arange(3, 20)
DATA = [
    Datum(
        TOKENS[:-1].astype(np.int32),
        {"target_tokens": TOKENS[1:], "weights": np.ones(16, np.float32)},
    )
]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "openrl")  # what is caught of a log holds frames
    for module, name in (
        (backlog, "OWNERS"),
        (catalogue, "REMEMBERED"),
        (curves, "MODELS"),
        (models, "CLOSED_KEPT"),
        (pins, "REMOVED"),
        (residency, "OWNERS"),
        (story, "ACCOUNTS"),
        (story, "STORY"),
        (story, "TIMELINE"),
    ):
        monkeypatch.setattr(module, name, FEW)


def falls_ill(work: Pass) -> None:
    """At a batch of two, and at a prompt of two."""
    match work:
        case TrainPass(pieces=pieces) if any(len(piece.data) == 2 for piece in pieces):
            raise RuntimeError("a bolt fell off")
        case DecodePass(admit=admit) if any(len(row.sample.prompt) == 2 for row in admit):
            raise RuntimeError("a bolt fell off")


async def fails(what: Awaitable[object]) -> None:
    with pytest.raises(OpenRLError):
        await what


async def session(node: Node, number: int) -> None:
    """All of a short life, of an owner of its own: what goes well and what does not."""
    async with openrl.connect(node.address, f"tml-{number}") as client:
        model = await client.create_model(MODEL, rank=4, seed=1)
        sampler = await model.sampler()
        await sampler.sample(TOKENS, 2, max_tokens=4, seed=1, deadline_seconds=1e6)
        await fails(sampler.sample([99_999]))
        await fails(sampler.sample([1, 2]))
        done = await model.forward_backward(DATA, deadline_seconds=1e6)
        await (await model.optim_step(AdamParams(learning_rate=0.01)))
        await done
        await fails(await model.forward_backward(DATA, "no such loss"))
        await fails(await model.forward_backward([*DATA, *DATA]))
        await fails(client.create_model("no such model"))
        path = await model.save_state("here")
        await model.load_state(path, optimizer=True)
        await fails(model.load_state(path.replace("here", "nowhere")))
        await model.log_metrics({"reward": 1.0})
        if number % 3 == 0:
            await model.unload()
            await fails(model.save_state("late"))
    await node.actor.backlog.empty()


async def tidied(node: Node) -> None:
    """As when all that is kept for a time has been kept for so long."""
    services = node.services
    await tidy(services.catalogue, services.checkpoints, services.futures, services.clock() + 1e9)
    services.feeds.sweep()
    later = services.monotonic() + 1e9
    silent = replace(services, monotonic=lambda: later)
    end_leases(node.actor.backlog, node.actor.leases, silent, 0.0)
    for _ in range(2):  # of what the first has copied, the second erases
        await services.journal.clean()
    gc.collect()


@pytest.mark.usefixtures("forgetful")
async def test_what_is_held_does_not_depend_on_how_many_came(tmp_path: Path) -> None:
    config = replace(CONFIG, retention_seconds=0.0)
    engine = FakeEngine([MODEL], before=falls_ill)
    async with serving(tmp_path, config, engine) as node:
        held = []
        for number in range(2 * SESSIONS):
            await session(node, number)
            if number % SESSIONS == SESSIONS - 1:
                await asyncio.sleep(0)
                await tidied(node)
                held.append(holdings(node, engine))
        few, many = held
        assert few["Session"] <= FEW + 1
        grown = {name: (few[name], n) for name, n in many.items() if n - few[name] >= SESSIONS / 2}
        assert not grown, "and more with each session"


async def test_what_is_over_goes_without_the_collector(tmp_path: Path) -> None:
    """It looks seldom, so that it never stops the event loop for long: a cycle stays for days."""
    engine = FakeEngine([MODEL], before=falls_ill)
    async with serving(tmp_path, engine=engine) as node:
        await session(node, 0)
        gc.collect()
        gc.disable()
        try:
            for number in range(1, 4):
                await session(node, number)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            ours = [type(each) for each in gc.garbage if type(each).__module__[:6] == "openrl"]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        servers = Counter(each.__qualname__ for each in ours if "client" not in each.__module__)
        assert not servers


async def test_answers_that_are_kept_keep_nothing_alive(tmp_path: Path) -> None:
    """A failure's traceback would: its frames hold the request, and what the engine was at."""
    engine = FakeEngine([MODEL], before=falls_ill)
    async with serving(tmp_path, engine=engine) as node:
        await session(node, 0)
        gc.collect()
        held = holdings(*node.services.futures._entries.values())
        assert held["Failed"] == 6
        assert held["traceback"] == 0
        assert held["Datum"] == 0
