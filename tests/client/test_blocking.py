"""The same client without async, the answers of many samples, and what is told while waiting."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.node import MODEL, serving

import openrl
from openrl.client import codec
from openrl.client.transport import Transport
from openrl.errors import UserError
from openrl.server import Node
from openrl.types import Datum

KEY = "tml-ann"
SCRIPT = Path(__file__).parents[2] / "docs" / "client_stub.py"

spec = importlib.util.spec_from_file_location("client_stub", SCRIPT)
assert spec is not None
assert spec.loader is not None
client_stub = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client_stub)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with serving(tmp_path) as node:
        yield node


def datum() -> Datum:
    return Datum(
        np.arange(1, 5, dtype=np.int32),
        {"target_tokens": np.arange(2, 6), "weights": np.ones(4)},
    )


def loop_without_async(address: str) -> list[float]:
    with openrl.connect(address, KEY) as client:
        model = client.create_model(MODEL, rank=8)
        losses = []
        for _ in range(2):
            ahead = model.forward_backward([datum()]), model.optim_step()
            losses.append(ahead[0].result().metrics["loss:sum"])
            assert ahead[1].result().version == len(losses)
        sampler = model.sampler()
        assert len(sampler.sample([5, 6], 3, max_tokens=4).sequences) == 3
        seen = dict(sampler.sample_many([[5], [6], [7]], max_tokens=2, seed=1))
        assert sorted(seen) == [0, 1, 2]
        assert (seen[1].sequences[0].tokens == _one(sampler, seed=2).tokens).all()
        with pytest.raises(UserError, match="rank"):
            client.create_model(MODEL, rank=-1)
        return losses


def _one(sampler, seed):
    return sampler.sample([6], max_tokens=2, seed=seed).sequences[0]


async def test_a_loop_without_async_trains_and_samples(node: Node) -> None:
    before = threading.active_count()
    first, second = await asyncio.to_thread(loop_without_async, node.address)
    assert second < first
    running = [thread.name for thread in threading.enumerate()]
    assert "openrl" not in running, before


async def test_a_failed_connection_leaves_no_thread() -> None:
    def connect() -> None:
        with openrl.connect("http://127.0.0.1:9", KEY, patience=0.0):
            pass

    with pytest.raises(openrl.OpenRLError):
        await asyncio.to_thread(connect)
    assert "openrl" not in [thread.name for thread in threading.enumerate()]


async def test_leaving_many_samples_early_cancels_the_rest(node: Node) -> None:
    async with openrl.connect(node.address, KEY) as client:
        sampler = await client.sampler(base_model=MODEL)
        many = sampler.sample_many([[5]] * 4, max_tokens=4000)
        async for place, output in many:
            assert place in range(4)
            assert output.sequences
            break
        await many.aclose()  # type: ignore[attr-defined]
        ours = [t for t in asyncio.all_tasks() if "Sampler.sample" in repr(t.get_coro())]
        assert ours == []


def test_the_stub_is_what_the_async_classes_say() -> None:
    stub = Path(client_stub.STUB).read_text(encoding="utf-8")
    assert stub == client_stub.text(), "run python docs/client_stub.py"
    classes = {c.name: c for c in ast.parse(stub).body if isinstance(c, ast.ClassDef)}
    named = {f.name for f in classes["BlockingClient"].body if isinstance(f, ast.FunctionDef)}
    assert {"create_model", "sampler"} <= named
    assert not [f for c in classes.values() for f in c.body if isinstance(f, ast.AsyncFunctionDef)]


async def test_what_is_waited_for_is_told_with_the_reason() -> None:
    answers = [503, 200]

    async def answer(request: web.Request) -> web.Response:
        status = answers.pop(0)
        body = codec.pack({"error": "weights load", "session_id": "s"})
        return web.Response(status=status, body=body, content_type=codec.CONTENT_TYPE)

    async def no_pause(seconds: float) -> None:
        pass

    app = web.Application()
    app.router.add_post("/api/v1/create_session", answer)
    told: list[openrl.Wait] = []
    async with TestServer(app) as server:
        transport = Transport(str(server.make_url("")), KEY, 300.0, no_pause, on_wait=told.append)
        assert (await transport.submit("create_session", {}))["session_id"] == "s"
        await transport.close()
    assert [(wait.what, wait.request_id) for wait in told] == [("create_session", None)]
    assert "weights load" in told[0].why
