"""The stream goes on from a cursor, in one server's life; what it and the curves let through."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from openrl.api import live
from openrl.server import Node

from .conftest import Http
from .test_polls import forward_backward

STRANGER = {"X-API-Key": "tml-mallory"}


@asynccontextmanager
async def stream(url: str, cursor: str = "", **headers: str) -> AsyncIterator[AsyncIterator[tuple]]:
    """Events as (name, value, id)."""
    sent = {"Last-Event-ID": cursor, **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/api/v1/openrl/live", headers=sent) as response,
    ):
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield events(response)


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple]:
    while True:
        frame = (await response.content.readuntil(b"\n\n")).decode().strip()
        fields = dict(line.split(": ", 1) for line in frame.splitlines())
        yield fields["event"], json.loads(fields["data"]), fields["id"]


async def turn(found: AsyncIterator[tuple]) -> dict:
    """All up to the next clock, by name, and the last id."""
    seen: dict = {}
    async for name, value, cursor in found:
        seen[name] = value
        if name == "clock":
            return seen | {"id": cursor}
    raise AssertionError("the stream has ended")


async def test_a_stream_goes_on_where_it_was(http: Http, node: Node) -> None:
    model_id = await http.new_model()
    await http.done("forward_backward", forward_backward(model_id, 1))
    async with stream(node.address) as found:
        first = await turn(found)
        assert not first["hello"]["resumed"]
        assert [one[1] for one in first["passes"]] == ["control", "train"]
        (point,) = first["points"]
        assert point[1] == model_id
        assert "loss:sum" in point[4]
        second = await turn(found)  # nothing is new, and nothing is said again
        assert set(second) == {"clock", "id"}
    await http.done("forward_backward", forward_backward(model_id, 2))
    async with stream(node.address, first["id"]) as found:
        third = await turn(found)
        assert third["hello"]["resumed"]
        assert [one[0] for one in third["passes"]] == [first["passes"][-1][0] + 1]
        assert len(third["points"]) == 1
    for strange in ("nonsense", "a.b.c", f"{first['id'].split('.')[0]}.x.y"):
        async with stream(node.address, strange) as found:
            again = await turn(found)
            assert not again["hello"]["resumed"]
            assert len(again["passes"]) == 3


async def test_what_one_pass_took_is_split_over_its_jobs(http: Http, node: Node) -> None:
    for other in (http, http.as_other()):
        model_id = await other.new_model()
        await other.done("forward_backward", forward_backward(model_id, 1))
    async with stream(node.address) as found:
        for one in (await turn(found))["passes"]:
            assert sum(seconds for _, seconds in one[7]) == pytest.approx(one[4], abs=1e-4)


async def test_without_a_key_it_is_this_machines_alone(http: Http, node: Node) -> None:
    url = f"{node.address}/api/v1/openrl/live"
    async with aiohttp.ClientSession() as session:
        for sent in (
            {"X-Forwarded-For": "192.0.2.1"},
            {"Origin": "https://evil.example"},
            {"Host": "evil.example"},
        ):
            assert (await session.get(url, headers=sent)).status == 401
        # Being at home opens what a dashboard shows, and nothing else.
        assert (await session.get(f"{node.address}/api/v1/sessions")).status == 401


async def test_streams_are_bounded_and_end_with_the_server(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "STREAMS", 1)
    async with stream(node.address) as found, aiohttp.ClientSession() as session:
        await turn(found)
        async with session.get(f"{node.address}/api/v1/openrl/live") as refused:
            assert refused.status == 429
            assert "1 dashboards" in (await refused.json())["detail"]


async def test_a_client_logs_its_own_numbers(http: Http) -> None:
    model_id = await http.new_model()
    route = f"openrl/models/{model_id}/metrics"
    await http.good(route, {"metrics": {"reward": 0.5}, "step": 3})
    await http.good(route, {"metrics": {"reward": 0.75}})
    status, answer = await http.ask("GET", route)
    assert status == 200
    assert [(one[3], one[4]) for one in answer["points"]] == [
        (3.0, {"reward": 0.5}),
        (0, {"reward": 0.75}),
    ]
    assert (await http.as_other().post(route, {"metrics": {"reward": 1.0}}))[0] == 404
    assert (await http.as_other().ask("GET", route))[0] == 404
    for wrong, said in (
        ({}, "1 to 32"),
        ({str(n): 0.0 for n in range(33)}, "not 33"),
        ({"": 1.0}, "1 to 64 characters"),
        ({"x" * 65: 1.0}, "not 65"),
    ):
        status, answer = await http.post(route, {"metrics": wrong})
        assert status == 400
        assert said in answer["detail"]


async def test_what_is_not_finite_cannot_be_drawn(http: Http) -> None:
    import msgpack

    model_id = await http.new_model()
    body = msgpack.packb({"metrics": {"reward": float("nan")}})
    status, answer = await http.post(
        f"openrl/models/{model_id}/metrics", body, **{"Content-Type": "application/msgpack"}
    )
    assert status == 400
    assert "finite" in str(answer)


async def test_anothers_checkpoint_is_not_found(http: Http) -> None:
    model_id = await http.new_model()
    body = {"model_id": model_id, "path": "one", "seq_id": 1}
    await http.done("save_weights", body)
    route = f"openrl/checkpoints/{model_id}/weights/one"
    other = http.as_other()
    assert (await other.ask("GET", "openrl/checkpoints"))[1]["checkpoints"] == []
    for method, path in (("POST", "/publish"), ("DELETE", ""), ("GET", "/archive")):
        assert (await other.ask(method, route + path))[0] == 404
    (listed,) = (await http.ask("GET", "openrl/checkpoints"))[1]["checkpoints"]
    assert listed["run"] == model_id
    assert (await http.ask("POST", f"{route}/publish"))[0] == 200


async def test_every_answer_names_its_request(http: Http) -> None:
    _, headers, _ = await http.ask_with_headers(
        "GET", "sessions", headers={"X-Request-ID": "mine-1"}
    )
    assert headers["X-Request-ID"] == "mine-1"
    _, headers, _ = await http.ask_with_headers("GET", "sessions", headers={"X-Request-ID": "a b"})
    assert headers["X-Request-ID"] not in ("", "a b")


async def test_a_server_that_stops_does_not_wait_for_streams(http: Http, tmp_path) -> None:  # type: ignore[no-untyped-def]
    from support.node import serving

    async with asyncio.timeout(4):  # shutting down would wait 5 s for an open stream
        async with aiohttp.ClientSession() as session, serving(tmp_path / "two") as second:
            response = await session.get(f"{second.address}/api/v1/openrl/live")
            await response.content.readuntil(b"event: clock")
