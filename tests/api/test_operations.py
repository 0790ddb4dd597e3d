"""Who sees what of the engine's work, and what an administrator changes."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from support.node import CONFIG, MODEL, serving

from openrl.engines.base import DecodePass, TrainPass
from openrl.engines.fake import FakeEngine
from openrl.server import Node

from .conftest import Http
from .test_polls import Gate, forward_backward, new_sampler, sample

ADMIN = "tml-administrator-of-this"
KEY = replace(CONFIG, admin_key=ADMIN, poll_seconds=0.05)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with serving(tmp_path, KEY) as running:
        yield running


async def stats(http: Http, query: str = "") -> dict:
    status, answer = await http.ask("GET", f"openrl/statistics{query}")
    assert status == 200
    return answer


async def train(http: Http) -> str:
    model_id = await http.new_model()
    await http.done("forward_backward", forward_backward(model_id, 1))
    return model_id


async def test_an_owner_sees_its_own_accounts_and_how_busy_the_engine_is(http: Http) -> None:
    mine, theirs = await train(http), await train(http.as_other())
    seen = await stats(http)
    assert list(seen["accounts"]["owner"]) == [seen["owner"]]
    assert list(seen["accounts"]["lane"]) == [mine]
    assert list(seen["accounts"]["session"]) == [mine.split(":")[0]]
    account = seen["accounts"]["lane"][mine]
    assert account["tokens"] == 1
    assert account["requests"] == 2  # with the making of the model
    assert seen["engine"]["ready"]
    timeline = seen["timeline"]
    assert len(timeline) == sum(seen["passes"].values()) == 4
    assert sum(each["seconds"] for each in timeline) == pytest.approx(seen["engine"]["seconds"])
    assert all(each["start"] <= each["end"] <= seen["clock"] for each in timeline)
    assert {lane for each in timeline for lane in each["lanes"]} == {mine}
    assert theirs not in str(seen)
    assert (await stats(http.as_other()))["owner"] not in str(seen)


async def test_an_administrator_sees_everybody(http: Http) -> None:
    models = {await train(http), await train(http.as_other())}
    seen = await stats(http.as_other(ADMIN))
    assert set(seen["accounts"]["lane"]) == models
    assert len(seen["accounts"]["owner"]) == 2
    assert all(each["who"] and each["lanes"] for each in seen["timeline"])


async def test_the_timeline_is_as_long_as_asked_for(http: Http) -> None:
    await train(http)
    assert [each["kind"] for each in (await stats(http, "?limit=1"))["timeline"]] == ["train"]


async def test_the_timeline_is_read_on_from_the_last_pass_seen(http: Http) -> None:
    await train(http)
    first = (await stats(http, "?limit=1&after=0"))["timeline"]
    rest = (await stats(http, f"?after={first[-1]['pass_id']}"))["timeline"]
    assert [*first, *rest] == (await stats(http))["timeline"]
    assert [each["kind"] for each in (*first, *rest)] == ["control", "train"]
    assert (await stats(http, f"?after={rest[-1]['pass_id']}"))["timeline"] == []
    assert all(0.0 <= wait < 60.0 for each in rest for wait in each["waits"])
    assert (await http.ask("GET", "openrl/statistics?after=x"))[0] == 400


async def test_a_models_story_is_its_owners(http: Http) -> None:
    model_id = await train(http)
    status, story = await http.ask("GET", f"openrl/models/{model_id}/story")
    assert status == 200
    told = [(line["request_id"], line["what"]) for line in story["lines"]]
    assert told[-3:] == [
        (f"{model_id}:1", "queued"),
        (f"{model_id}:1", told[-2][1]),
        (f"{model_id}:1", "done"),
    ]
    assert (await http.as_other().ask("GET", f"openrl/models/{model_id}/story"))[0] == 404
    assert (await http.as_other(ADMIN).ask("GET", f"openrl/models/{model_id}/story"))[0] == 200


async def test_a_paused_model_waits_and_says_so(http: Http) -> None:
    model_id = await http.new_model()
    route = f"openrl/models/{model_id}"
    assert (await http.as_other().post(f"{route}/pause", {}))[0] == 404
    await http.as_other(ADMIN).good(f"{route}/pause", {})
    promise = await http.good("forward_backward", forward_backward(model_id, 1))
    status, answer = await http.post("retrieve_future", promise)
    assert status == 408
    assert answer["queue_state"] == "paused_capacity"
    assert answer["queue_state_reason"] == "paused"
    await http.good(f"{route}/resume", {})  # its owner may as well
    assert "loss:sum" in (await http.result(promise))["metrics"]


async def test_quotas_are_an_administrators_to_change_and_ones_own_to_see(http: Http) -> None:
    owner = (await stats(http))["owner"]
    route = f"openrl/owners/{owner}/quota"
    assert (await http.ask("PUT", route, {"max_models": 4}))[0] == 403
    assert (await http.as_other().ask("GET", route))[0] == 404
    admin = http.as_other(ADMIN)
    for wrong in ({"max_models": -1}, {"max_adapters": 3}, {"weight": 0}):
        assert (await admin.ask("PUT", route, wrong))[0] == 400
    status, changed = await admin.ask("PUT", route, {"max_models": 1, "weight": 4.0})
    assert (status, changed["max_models"], changed["weight"]) == (200, 1, 4.0)
    status, seen = await http.ask("GET", route)
    assert (status, seen) == (200, changed)
    session_id = await http.new_session()
    await http.new_model(session_id)
    creation = {"session_id": session_id, "base_model": MODEL, "lora_config": {"rank": 8}}
    refused = await http.done("create_model", {**creation, "model_seq_id": 1})
    assert "1 models are in memory for you" in refused["error"]


async def test_weights_are_an_administrators(http: Http, node: Node) -> None:
    owner = (await stats(http))["owner"]
    route = f"openrl/owners/{owner}/weight"
    assert (await http.ask("PUT", route, {"weight": 4.0}))[0] == 403
    admin = http.as_other(ADMIN)
    for wrong in (0, -1, 1e9, "x", None):
        assert (await admin.ask("PUT", route, {"weight": wrong}))[0] == 400
    assert (await admin.ask("PUT", route, {"weight": 4.0}))[0] == 200
    await train(http)
    assert node.actor.enquiries.owner_weight(owner) == 4.0


async def test_without_a_configured_key_nobody_is_an_administrator(tmp_path: Path) -> None:
    async with serving(tmp_path) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        model_id = await http.new_model()
        for key in (ADMIN, "tml-"):
            other = http.as_other(f"{key}x" if key == "tml-" else key)
            assert (await other.post(f"openrl/models/{model_id}/pause", {}))[0] == 404
            assert (await other.ask("PUT", "openrl/owners/a/weight", {"weight": 2.0}))[0] == 403
            assert not (await stats(other))["accounts"]["owner"]


@pytest.mark.parametrize("kind", [DecodePass, TrainPass])
async def test_a_poll_tells_whether_others_keep_it(tmp_path: Path, kind: type) -> None:
    """What runs, and what waits for its own model, is active; what waits for others is paused."""
    gate = Gate(kind)
    engine = FakeEngine([MODEL], before=gate)
    async with serving(tmp_path, KEY, engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        try:
            model_id, other_id = await http.new_model(), await http.as_other().new_model()
            if kind is TrainPass:
                runs = await http.good("forward_backward", forward_backward(model_id, 1))
            else:
                runs = await http.good("asample", sample(await new_sampler(http), 0))
            assert await state(http, runs) == "active"
            waits = await http.as_other().good("forward_backward", forward_backward(other_id, 1))
            behind = await http.as_other().good("optim_step", {"model_id": other_id, "seq_id": 2})
            assert await state(http.as_other(), waits) == "paused_capacity"
            assert await state(http.as_other(), behind) == "active"
        finally:
            gate.open()


async def state(http: Http, promise: dict) -> str:
    status, answer = await http.post("retrieve_future", promise)
    assert status == 408
    return answer["queue_state"]
