"""What goes wrong around one job ends in a clear error or a retry. The server stays up, and a job
beside it does not notice: its numbers are those of a quiet day."""

from __future__ import annotations

import asyncio
import json
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.node import MODEL, serving

import openrl
from openrl.engines.base import Pass, TrainPass
from openrl.engines.fake import FakeEngine
from openrl.errors import OpenRLError
from openrl.housekeeping import end_leases, take_back_unheard, tidy
from openrl.server import Node
from openrl.types import AdamParams, Datum, ModelId

STEPS = 8
TOKENS = np.arange(3, 20)
DATA = [
    Datum(
        TOKENS[:-1].astype(np.int32),
        {"target_tokens": TOKENS[1:], "weights": np.ones(16, np.float32)},
    )
]


@dataclass
class Beside:
    """A job in good health; `go_on` lets it do its second half."""

    go_on: asyncio.Event
    half: asyncio.Event

    async def train(self, address: str) -> list[float]:
        losses = []
        async with openrl.connect(address, "tml-beside") as client:
            model = await client.create_model(MODEL, rank=4, seed=1)
            for step in range(STEPS):
                if step == STEPS // 2:
                    self.half.set()
                    await self.go_on.wait()
                done = await (await model.forward_backward(DATA))
                losses.append(done.metrics["loss:sum"])
                await (await model.optim_step(AdamParams(learning_rate=0.05)))
            await model.save_state("end", overwrite=True)
        return losses


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    async def calm() -> list[float]:
        beside = Beside(asyncio.Event(), asyncio.Event())
        beside.go_on.set()
        async with serving(tmp_path_factory.mktemp("calm")) as node:
            return await beside.train(node.address)

    losses = asyncio.run(calm())
    assert len(set(losses)) == STEPS
    return losses


@asynccontextmanager
async def unnoticed(
    directory: Path, expected: list[float], engine: FakeEngine | None = None
) -> AsyncIterator[Node]:
    """What happens inside happens while the job beside is half done; afterwards it ends as on
    any day, and so does a new one."""
    beside = Beside(asyncio.Event(), asyncio.Event())
    async with serving(directory, engine=engine) as node:
        task = asyncio.create_task(beside.train(node.address))
        await asyncio.wait(
            [task, asyncio.create_task(beside.half.wait())], return_when="FIRST_COMPLETED"
        )
        yield node
        beside.go_on.set()
        assert await task == expected
        assert await beside.train(node.address) == expected


class Faulty:
    """Raises `error` in training passes of one model."""

    def __init__(self, error: Exception) -> None:
        self.victim: ModelId | None = None
        self._error = error

    def __call__(self, work: Pass) -> None:
        if isinstance(work, TrainPass) and {p.model_id for p in work.pieces} == {self.victim}:
            raise self._error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "ran out of memory: send smaller requests"),
        (RuntimeError("a bolt fell off"), "a bolt fell off"),
    ],
)
async def test_a_pass_that_fails_costs_its_own_job_one_request(
    tmp_path: Path, expected: list[float], error: Exception, words: str
) -> None:
    fault = Faulty(error)
    engine = FakeEngine([MODEL], before=fault)
    async with (
        unnoticed(tmp_path, expected, engine) as node,
        openrl.connect(node.address, "tml-victim") as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        fault.victim = ModelId(model.model_id)
        with pytest.raises(OpenRLError, match=words):
            await (await model.forward_backward(DATA))
        fault.victim = None
        done = await (await model.forward_backward(DATA))
        assert done.metrics["loss:sum"] == expected[0]


# --- connections ---------------------------------------------------------------------------


def dropped(
    address: str, request: bytes, read: int = 0, when: Callable[[], bool] = lambda: True
) -> None:
    """Sends that, reads so many bytes of the answer, and resets the connection `when` it may."""
    host, port = address.removeprefix("http://").split(":")
    with closing(socket.create_connection((host, int(port)), timeout=20)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(request)
        while read > 0:
            read -= len(connection.recv(read))
        until = time.monotonic() + 20
        while not when() and time.monotonic() < until:
            time.sleep(0.001)
        assert when()


def post(route: str, body: Any, length: int | None = None) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST /api/v1/{route} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-victim\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content


async def test_a_connection_that_is_cut_in_its_body_leaves_nothing(
    tmp_path: Path, expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        unnoticed(tmp_path, expected) as node,
        openrl.connect(node.address, "tml-victim") as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        half = post("forward_backward", {"model_id": model.model_id, "seq_id": 1}, length=10_000)
        for _ in range(5):
            await asyncio.to_thread(dropped, node.address, half)
        done = await (await model.forward_backward(DATA))
        assert done.metrics["loss:sum"] == expected[0]
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_an_answer_that_is_cut_can_be_had_again(
    tmp_path: Path, expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        unnoticed(tmp_path, expected) as node,
        openrl.connect(node.address, "tml-victim") as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        pending = await model.forward(DATA * 2000)
        poll = {"request_id": pending.request_id, "allow_metadata_only": False}
        for read in (1, 1000):
            await asyncio.to_thread(dropped, node.address, post("retrieve_future", poll), read)
        whole = await pending
        assert len(whole.outputs) == 2000
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


async def test_a_client_that_leaves_its_poll_can_come_back(
    tmp_path: Path, expected: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    gate, entered = threading.Event(), threading.Event()
    fault = Faulty(RuntimeError("not used"))

    def hold(work: Pass) -> None:
        if isinstance(work, TrainPass) and work.pieces[0].model_id == fault.victim:
            entered.set()
            assert gate.wait(30)

    engine = FakeEngine([MODEL], before=hold)
    async with (
        unnoticed(tmp_path, expected, engine) as node,
        openrl.connect(node.address, "tml-victim") as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        fault.victim = ModelId(model.model_id)
        pending = await model.forward_backward(DATA)
        assert await asyncio.to_thread(entered.wait, 20)
        poll = post("retrieve_future", {"request_id": pending.request_id})
        held = node.services.polls.held
        drops = (
            asyncio.to_thread(dropped, node.address, poll, 0, lambda: sum(held().values()) == 5)
            for _ in range(5)
        )
        await asyncio.gather(*drops)
        gate.set()
        assert (await pending).metrics["loss:sum"] == expected[0]
        await model.save_state("here")
        assert not held(), "polls whose client has left end with their request"
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


# --- disks -----------------------------------------------------------------------------------


async def test_a_catalogue_that_takes_nothing_stops_only_what_needs_it(
    tmp_path: Path, expected: list[float]
) -> None:
    async with (
        unnoticed(tmp_path, expected) as node,
        openrl.connect(node.address, "tml-victim", patience=0.5) as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        with closing(sqlite3.connect(tmp_path / "catalogue.sqlite", timeout=20)) as disk:
            disk.execute(
                "CREATE TRIGGER full BEFORE INSERT ON nouns "
                "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
            )
            with pytest.raises(OpenRLError, match="disk is full"):
                await openrl.connect(node.address, "tml-victim", patience=0.5).__aenter__()
            with pytest.raises(OpenRLError, match="full"):
                await model.save_state("lost")
            done = await (await model.forward_backward(DATA))
            assert done.metrics["loss:sum"] == expected[0]
            disk.execute("DROP TRIGGER full")
        await model.save_state("lost")


async def test_a_server_ends_well_on_a_full_disk(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as node,
        openrl.connect(node.address, "tml-victim", patience=0.5) as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        await (await model.forward_backward(DATA))
        with closing(sqlite3.connect(tmp_path / "catalogue.sqlite", timeout=20)) as disk:
            disk.execute(
                "CREATE TRIGGER full BEFORE INSERT ON nouns "
                "BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END"
            )


async def test_checkpoints_that_cannot_be_written_fail_their_save(
    tmp_path: Path, expected: list[float]
) -> None:
    """A file where the directory was: that stops root too, whom no mode does."""
    checkpoints, aside = tmp_path / "checkpoints", tmp_path / "aside"
    async with (
        unnoticed(tmp_path, expected) as node,
        openrl.connect(node.address, "tml-victim") as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        await model.save_state("before")
        checkpoints.rename(aside)
        checkpoints.write_text("")
        with pytest.raises(OpenRLError, match="cannot make a directory for"):
            await model.save_state("lost")
        done = await (await model.forward_backward(DATA))
        assert done.metrics["loss:sum"] == expected[0]
        checkpoints.unlink()
        aside.rename(checkpoints)
        await model.save_state("lost")


# --- clocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [-86_400.0, 86_400.0], ids=["back", "forth"])
async def test_a_wall_clock_that_jumps_changes_nothing(
    tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    """Whoever was heard a moment ago has not been silent for a day."""
    real, skew = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + skew[0])
    async with (
        unnoticed(tmp_path, expected) as node,
        openrl.connect(node.address, "tml-victim") as client,
    ):
        model = await client.create_model(MODEL, rank=4, seed=1)
        first = await (await model.forward_backward(DATA))
        path = await model.save_state("here")
        await (await model.optim_step(AdamParams(learning_rate=0.05)))
        skew[0] = step
        services, actor = node.services, node.actor
        await tidy(services.catalogue, services.checkpoints, services.futures, time.time())
        assert take_back_unheard(actor.backlog, services.admission, services, 300.0) == 0
        assert end_leases(actor.backlog, actor.leases, services, 300.0) == 0
        second = await (await model.forward_backward(DATA))
        assert second.metrics["loss:sum"] != first.metrics["loss:sum"]
        assert await model.save_state("here", overwrite=True) == path
        await (await model.optim_step(AdamParams(learning_rate=0.05)))
        await model.load_state(path, optimizer=True)
        again = await (await model.forward_backward(DATA))
        assert again.metrics["loss:sum"] == second.metrics["loss:sum"], "it is the later one"
