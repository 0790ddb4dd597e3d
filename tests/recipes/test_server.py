"""The server that a recipe starts: it is there, it is gone, and its death is told."""

import asyncio

import aiohttp
import pytest

from recipes.kit.server import ServerDied, local_server

MODEL = ("--engine", "fake", "--model", "fake/model")


async def test_it_answers_while_it_is_wanted(tmp_path):
    async with (
        local_server(tmp_path, *MODEL) as server,
        aiohttp.ClientSession() as http,
        http.get(f"{server.url}/healthz") as answer,
    ):
        assert answer.ok
    assert server.process.returncode == 0
    assert (tmp_path / "data").is_dir()


async def test_a_server_that_cannot_start_says_why(tmp_path):
    with pytest.raises(ServerDied, match="no-such-directory"):
        async with local_server(tmp_path, "--model", f"some/model={tmp_path}/no-such-directory"):
            raise AssertionError("it cannot have started")


async def test_a_server_that_dies_ends_the_work(tmp_path):
    async with local_server(tmp_path, *MODEL) as server:
        asyncio.get_running_loop().call_later(0.1, server.process.kill)
        with pytest.raises(ServerDied, match="status -9"):
            await server.during(asyncio.sleep(60))


async def test_work_that_fails_raises_its_own_error(tmp_path):
    async def fail():
        raise KeyError("mine")

    async with local_server(tmp_path, *MODEL) as server:
        with pytest.raises(KeyError, match="mine"):
            await server.during(fail())
        assert await server.during(asyncio.sleep(0, "result")) == "result"
