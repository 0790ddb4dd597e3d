import json
import logging
import sqlite3

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import make_mocked_request

from openrl.api import middleware, versions
from openrl.api.auth import AnyKey
from openrl.errors import Overloaded, Unauthenticated, Unavailable, UserError
from openrl.server import Node


async def answer_to(error: Exception) -> web.Response:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise error

    response = await middleware.errors(make_mocked_request("POST", "/x"), handler)
    assert isinstance(response, web.Response)
    return response


async def test_a_defect_of_ours_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        response = await answer_to(KeyError("secret"))
    assert response.status == 500
    assert response.content_type == "application/json"
    detail = json.loads(response.body)["detail"]
    assert "secret" not in detail
    request_id = detail.split()[-1]
    assert request_id in caplog.text
    assert "KeyError: 'secret'" in caplog.text


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (UserError("bad"), 400, None),
        (Overloaded("full", retry_after=2.4), 429, "3"),
        (Unavailable("soon", retry_after=0.1), 503, "1"),
    ],
)
async def test_refusals(error: Exception, status: int, retry_after: str | None) -> None:
    response = await answer_to(error)
    assert response.status == status
    assert response.headers.get("Retry-After") == retry_after
    assert json.loads(response.body) == {"detail": error.args[0]}


async def test_a_full_disk_is_said_to_be_one() -> None:
    response = await answer_to(sqlite3.OperationalError("database or disk is full"))
    assert (response.status, response.headers["Retry-After"]) == (503, "5")
    assert "disk is full" in json.loads(response.body)["detail"]


@pytest.mark.parametrize("path", ["/", "/nothing/here", "/api/v1/api/v1/client/config"])
async def test_a_wrong_base_url_is_said_before_a_key_is_asked_for(path: str, node: Node) -> None:
    async with ClientSession() as http, http.post(node.address + path, json={}) as answer:
        assert answer.status == 404
        detail = (await answer.json())["detail"]
    assert detail.startswith(f"no route POST {path}: ")
    assert f"base URL for it is {node.address} alone" in detail


async def test_a_wrong_method_says_the_right_one(node: Node) -> None:
    url = f"{node.address}/api/v1/create_session"
    async with ClientSession() as http, http.get(url) as answer:
        assert answer.status == 405
        detail = (await answer.json())["detail"]
    assert detail == "no route GET /api/v1/create_session: it takes POST"


async def test_long_texts_are_cut() -> None:
    response = await answer_to(UserError("x" * 1_000_000))
    assert len(response.body) < 5000


def test_each_key_is_an_owner_of_its_own() -> None:
    keys = ["tml-a", "tml-b", "eyJa"]
    owners = [AnyKey().holder(key).owner for key in keys]
    assert len(set(owners)) == 3
    assert owners == [AnyKey().holder(key).owner for key in keys]
    assert not any(key in owner for key, owner in zip(keys, owners, strict=True))


@pytest.mark.parametrize("key", ["", "tml-", "sk-x", "tml-\n", "tml-" + "x" * 10_000, "xtml-a"])
def test_ill_formed_keys(key: str) -> None:
    with pytest.raises(Unauthenticated):
        AnyKey().holder(key)


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.24.1", (0, 24)), ("1.2", (1, 2)), ("", versions.NEWEST), ("dev", versions.NEWEST)],
)
def test_versions(text: str, version: versions.Version) -> None:
    assert versions.parse(text) == version
