"""Addresses and keys that cannot be right are refused before a connection is tried."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import openrl
from openrl.errors import NotFound, Unauthenticated, UserError


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("127.0.0.1:8000", "write it like http://127.0.0.1:8000"),
        ("localhost:8000", "write it like http://127.0.0.1:8000"),
        ("", "write it like http://127.0.0.1:8000"),
        ("http://", "write it like http://127.0.0.1:8000"),
        ("http://node:8000/api/v1", "leave /api/v1 out, routes are added to http://node:8000"),
        ("http://node:8000/api/v1/", "leave /api/v1 out, routes are added to http://node:8000"),
    ],
)
def test_an_address_that_cannot_be_one_says_how_to_write_it(url: str, advice: str) -> None:
    with pytest.raises(UserError, match=advice):
        openrl.connect(url, "tml-local")


def test_a_prefix_is_kept_and_the_last_slash_is_not() -> None:
    assert openrl.connect("https://node/team/", "tml-x").url == "https://node/team"


@pytest.mark.parametrize("key", ["", "sk-secret", "TML-x"])
def test_a_key_of_another_kind_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(Unauthenticated, match="begins with 'tml-'") as caught:
        openrl.connect("http://127.0.0.1:8000", key)
    assert not key or key not in str(caught.value)


async def test_an_api_that_is_not_ours_is_named() -> None:
    async with TestServer(web.Application(middlewares=[json_errors])) as server:
        url = str(server.make_url("/"))
        with pytest.raises(NotFound, match=r"not as an OpenRL server \(Not Found\)"):
            async with openrl.connect(url, "tml-local"):
                pass


@web.middleware
async def json_errors(request: web.Request, handler) -> web.StreamResponse:  # type: ignore[no-untyped-def]
    try:
        return await handler(request)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)
