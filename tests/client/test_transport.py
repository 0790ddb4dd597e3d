"""Retries and long polls against a real server that misbehaves on purpose."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from openrl.client.transport import Transport
from openrl.errors import (
    Gone,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    Unauthenticated,
    Unavailable,
    UserError,
)


class Time:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@dataclass(frozen=True)
class Reply:
    """`body` None hangs up without an answer; `takes` is in seconds."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    json: bool = False
    takes: float = 0.0


HANG_UP = Reply(body=None)


@dataclass
class Script:
    """Answers with `replies` in turn, and with the last one from there on."""

    replies: list[Reply]
    time: Time
    seen: list[tuple[str, bytes]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        self.seen.append((request.path, await request.read()))
        reply = self.replies[min(len(self.seen), len(self.replies)) - 1]
        self.time.now += reply.takes
        if reply.body is None:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if reply.json:
            return web.json_response(reply.body, status=reply.status, headers=reply.headers)
        return web.Response(
            body=msgpack.packb(reply.body),
            status=reply.status,
            content_type="application/msgpack",
            headers=reply.headers,
        )


GOOD = Reply(body={"request_id": "m:1"})


@asynccontextmanager
async def against(*replies: Reply) -> AsyncIterator[tuple[Script, Transport, Time]]:
    time = Time()
    script = Script(list(replies), time)
    app = web.Application()
    app.router.add_post("/{tail:.*}", script.handle)
    async with TestServer(app) as server:
        transport = Transport(str(server.make_url("/")), "tml-x", 300.0, time.sleep, time.clock)
        try:
            yield script, transport, time
        finally:
            await transport.close()


@pytest.mark.parametrize(
    "bad",
    [
        HANG_UP,
        Reply(408),
        Reply(429, {"detail": "full"}),
        Reply(500),
        Reply(502, "<html>bad gateway</html>"),
        Reply(503),
    ],
)
async def test_a_submit_is_repeated_under_the_same_identity(bad: Reply) -> None:
    async with against(bad, bad, GOOD) as (script, transport, time):
        answer = await transport.submit("optim_step", {"model_id": "m", "seq_id": 1})
    assert answer == {"request_id": "m:1"}
    assert [path for path, _ in script.seen] == ["/api/v1/optim_step"] * 3
    assert {body for _, body in script.seen} == {msgpack.packb({"model_id": "m", "seq_id": 1})}
    assert len(time.pauses) == 2


async def test_pauses_grow() -> None:
    async with against(*[Reply(500)] * 8, GOOD) as (_, transport, time):
        await transport.submit("x", {})
    # Each is between half and the whole of a bound that doubles from 0.25 up to 15 s.
    bounds = [0.25, 0.5, 1, 2, 4, 8, 15, 15]
    assert all(b / 2 <= p <= b for b, p in zip(bounds, time.pauses, strict=True))


async def test_retry_after_is_honoured_up_to_a_minute() -> None:
    replies = (Reply(503, headers={"Retry-After": s}) for s in ("3", "86400"))
    async with against(*replies, GOOD) as (_, transport, time):
        await transport.submit("x", {})
    assert time.pauses == [3.0, 60.0]


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, UserError),
        (401, Unauthenticated),
        (404, NotFound),
        (410, Gone),
        (413, PayloadTooLarge),
        (422, UserError),
    ],
)
@pytest.mark.parametrize("json", [False, True])
async def test_a_refusal_is_final_and_typed(status: int, error: type, json: bool) -> None:
    refusal = Reply(status, {"detail": "because"}, json=json)
    async with against(refusal) as (script, transport, _):
        with pytest.raises(error, match=r"^because$") as caught:
            await transport.submit("x", {})
    assert type(caught.value) is error
    assert len(script.seen) == 1


@pytest.mark.parametrize("bad", [HANG_UP, Reply(500, {"detail": "broken"}), Reply(503)])
async def test_a_server_that_stays_away_is_given_up_after_the_patience(bad: Reply) -> None:
    async with against(bad) as (_, transport, time):
        with pytest.raises(Unavailable, match="Is the server running"):
            await transport.submit("x", {})
    assert 300 < time.now < 330


async def test_a_server_that_is_away_at_first_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with against(HANG_UP, HANG_UP, GOOD, HANG_UP, GOOD) as (_, transport, _):
        for _ in range(2):
            await transport.submit("create_session", {})
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "Is the server running?" in warning.message


PAGE = "<html>It works!</html>"


@pytest.mark.parametrize("status", [200, 400, 404, 405, 501])
async def test_another_server_at_the_address_is_said_at_once(status: int) -> None:
    async with against(Reply(status, PAGE)) as (script, transport, _):
        with pytest.raises(NotFound, match=rf"not as an OpenRL server \(HTTP {status}"):
            await transport.submit("create_session", {})
    assert len(script.seen) == 1


@pytest.mark.parametrize("status", [501, 502])
async def test_a_proxy_of_a_server_that_has_answered_is_waited_for(status: int) -> None:
    async with against(GOOD, Reply(status, PAGE), GOOD) as (script, transport, _):
        for _ in range(2):
            assert await transport.submit("x", {}) == {"request_id": "m:1"}
    assert len(script.seen) == 3


async def test_tls_to_a_server_without_it_says_http() -> None:
    time = Time()
    async with TestServer(web.Application()) as server:
        url = str(server.make_url("/")).replace("http:", "https:")
        transport = Transport(url, "tml-x", 300.0, time.sleep, time.clock)
        with pytest.raises(UserError, match="reached by http://"):
            await transport.submit("create_session", {})
        await transport.close()
    assert time.pauses == []


async def test_an_overloaded_server_is_waited_for_beyond_the_patience() -> None:
    full = Reply(429, {"detail": "full"}, {"Retry-After": "50"})
    async with against(*[full] * 20, GOOD) as (_, transport, time):
        await transport.submit("asample", {})
    assert time.now == 1000


async def test_a_poll_is_repeated_until_the_result_is_there() -> None:
    pending = Reply(408, {"type": "try_again", "queue_state": "active"})
    async with against(pending, HANG_UP, pending, Reply(body={"metrics": {}})) as (
        script,
        transport,
        _,
    ):
        assert await transport.result("m:1") == {"metrics": {}}
    assert [path for path, _ in script.seen] == ["/api/v1/retrieve_future"] * 4
    assert msgpack.unpackb(script.seen[0][1])["request_id"] == "m:1"


async def test_a_poll_that_was_held_is_followed_by_the_next_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Reply(408, {"queue_state_reason": "3 owners ahead"}, takes=30.0)
    async with against(*[held] * 20, GOOD) as (_, transport, time):
        with caplog.at_level("INFO", "openrl.client"):
            assert await transport.result("m:1") == {"request_id": "m:1"}
    assert "retrieve_future: 3 owners ahead" in caplog.messages
    assert time.pauses == []
    assert time.now == 600.0


@pytest.mark.parametrize(
    ("category", "error"), [("user", UserError), ("server", ServerError), ("odd", ServerError)]
)
async def test_a_failed_request_raises_by_its_category(category: str, error: type) -> None:
    failed = Reply(body={"error": "datum 3: weights: too long", "category": category})
    async with against(failed) as (script, transport, _):
        with pytest.raises(error, match=r"^datum 3: weights: too long$") as caught:
            await transport.result("m:1")
    assert type(caught.value) is error
    assert len(script.seen) == 1


async def test_a_single_attempt_is_single() -> None:
    for reply, error in ((HANG_UP, Unavailable), (Reply(429), Overloaded)):
        async with against(reply) as (script, transport, _):
            with pytest.raises(error):
                await transport.once("session_heartbeat", {}, 1.0)
        assert len(script.seen) == 1
