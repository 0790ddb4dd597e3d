"""Several nodes, real ones on addresses of their own, and clients that know one of them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import tinker
from aiohttp import web
from support.node import CONFIG, serving_in_a_thread
from support.nodes import SECRET, acquainted, configs, together
from tinker import types

from openrl.cluster.hops import HEADER, Hop, Hops
from openrl.cluster.placement import Report
from openrl.errors import UserError
from openrl.server import Node, node

QUICK = replace(CONFIG, poll_seconds=0.5)
SERVED = {"a": ("fake/a",), "b": ("fake/b",)}


@asynccontextmanager
async def client(owner: str = "alice") -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(headers={"X-API-Key": f"tml-{owner}"}) as session:
        yield session


class Caller:
    """Speaks JSON to one node."""

    def __init__(self, http: aiohttp.ClientSession, at: str) -> None:
        self._http = http
        self._at = at

    async def post(self, route: str, **body: Any) -> tuple[int, Any]:
        async with self._http.post(f"{self._at}/api/v1/{route}", json=body) as answer:
            return answer.status, await answer.json()

    async def get(self, route: str) -> tuple[int, Any]:
        async with self._http.get(f"{self._at}/api/v1/{route}") as answer:
            return answer.status, await answer.json()

    async def session(self) -> str:
        return str(
            (await self.post("create_session", tags=[], sdk_version="0.38.0"))[1]["session_id"]
        )

    async def model(self, session: str, base: str, number: int = 0) -> str:
        status, promise = await self.post(
            "create_model",
            session_id=session,
            model_seq_id=number,
            base_model=base,
            lora_config={"rank": 4},
        )
        assert status == 200, promise
        await self.result(promise["request_id"])
        return str(promise["model_id"])

    async def result(self, request_id: str) -> Any:
        for _ in range(20):
            status, answer = await self.post("retrieve_future", request_id=request_id)
            if status != 408:
                assert status == 200, answer
                return answer
        raise AssertionError(answer)


@asynccontextmanager
async def callers(nodes: dict[str, Node], owner: str = "alice") -> AsyncIterator[dict[str, Caller]]:
    async with client(owner) as http:
        yield {name: Caller(http, each.address) for name, each in nodes.items()}


def drive(url: str, base: str) -> tuple[str, int, int]:
    """The tinker SDK: trains, saves, samples, loads, lists. Gives the model's id, and how many runs
    and base models are listed."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-sdk")
    training = service.create_lora_training_client(base_model=base, rank=4).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
    )
    step = training.forward_backward([datum], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    assert step.result().metrics["loss:sum"] > 0
    prompt, params = types.ModelInput.from_ints([1, 2]), types.SamplingParams(max_tokens=3)
    ephemeral = training.save_weights_and_get_sampling_client().result()
    of_base = service.create_sampling_client(base_model=base).result()
    for sampler in (ephemeral, of_base):
        tokens = sampler.sample(prompt, 1, params).result().sequences[0].tokens
        assert 0 < len(tokens) <= 3  # it may have drawn an end
    path = training.save_state("x").result().path
    again = service.create_training_client_from_state(path).result()
    assert again.get_info().model_name == base
    rest = tinker.RestClient(base_url=url, api_key="tml-sdk")
    runs = rest.list_training_runs().result().training_runs
    return (
        training.model_id,
        len(runs),
        len(rest.get_server_capabilities().result().supported_models),
    )


async def test_the_sdk_works_through_any_node(tmp_path: Path) -> None:
    made = configs(tmp_path, {**SERVED, "c": ("fake/b",)})
    async with together(made) as nodes:
        for number, (name, at) in enumerate(nodes.items(), 1):
            model, runs, bases = await asyncio.to_thread(drive, at.address, "fake/a")
            assert model.startswith(f"{name}-")
            assert (runs, bases) == (2 * number, 2)
        assert len(nodes["a"].services.models.all_alive()) == 6


async def test_the_models_of_a_session_live_where_their_base_is(tmp_path: Path) -> None:
    async with together(configs(tmp_path, SERVED)) as nodes, callers(nodes) as by:
        session = await by["a"].session()
        first = await by["b"].model(session, "fake/a", 0)
        second = await by["b"].model(session, "fake/b", 1)
        assert [m.model_id for m in nodes["a"].services.models.all_alive()] == [first]
        assert [m.model_id for m in nodes["b"].services.models.all_alive()] == [second]
        for caller in by.values():
            _, known = await caller.get(f"sessions/{session}")
            assert sorted(known["training_run_ids"]) == [first, second]
            _, listed = await caller.get("training_runs?limit=1")
            assert listed["training_runs"][0]["training_run_id"] == second  # newest first
            assert listed["cursor"]["total_count"] == 2
            assert (await caller.get("sessions"))[1] == {"sessions": [session]}
        _, promise = await by["a"].post("optim_step", model_id=second, seq_id=1)
        assert promise["request_id"] == f"{second}:1@b"
        assert "error" not in await by["a"].result(promise["request_id"])
        repeat = await by["b"].post("optim_step", model_id=second, seq_id=1)
        assert repeat[1] == promise
        await by["b"].post(f"sessions/{session}/finish", reason={"type": "done"})
        for name, model in (("b", first), ("a", second)):
            status, _ = await by[name].post("optim_step", model_id=model, seq_id=2)
            assert status == 410


async def test_what_is_anothers_owner_is_not_found_through_any_node(tmp_path: Path) -> None:
    async with together(configs(tmp_path, SERVED)) as nodes, callers(nodes) as by:
        session = await by["a"].session()
        model = await by["a"].model(session, "fake/b")
        async with callers(nodes, "mallory") as others:
            for caller in others.values():
                assert (await caller.post("get_info", model_id=model))[0] == 404
                assert (await caller.get(f"sessions/{session}"))[0] == 404
                status, _ = await caller.post(
                    "create_model",
                    session_id=session,
                    model_seq_id=1,
                    base_model="fake/b",
                    lora_config={"rank": 4},
                )
                assert status == 404
                assert (await caller.get("sessions"))[1] == {"sessions": []}


async def test_a_node_that_is_away(tmp_path: Path) -> None:
    made = configs(tmp_path, SERVED, QUICK)
    async with together({"a": made["a"]}) as nodes:
        async with together({"b": made["b"]}) as away, callers({**nodes, **away}) as by:
            await acquainted({**nodes, **away})
            session = await by["b"].session()
            model = await by["b"].model(session, "fake/b")
            _, step = await by["a"].post("optim_step", model_id=model, seq_id=1)
            own = await by["a"].model(await by["a"].session(), "fake/a")
        async with callers(nodes) as by:
            status, pending = await by["a"].post("retrieve_future", request_id=step["request_id"])
            assert (status, pending["queue_state"]) == (408, "paused_capacity")
            assert "node 'b' is away" in pending["queue_state_reason"]
            sample = f"{session}:sample:0:0"
            assert (await by["a"].post("retrieve_future", request_id=sample))[0] == 410
            assert (await by["a"].post("optim_step", model_id=model, seq_id=2))[0] == 503
            assert (await by["a"].post("session_heartbeat", session_id=session))[0] == 503
            _, mine = await by["a"].post("optim_step", model_id=own, seq_id=1)  # unmoved
            assert "error" not in await by["a"].result(mine["request_id"])
            async with together({"b": made["b"]}) as back:
                await acquainted({**nodes, **back})
                assert "error" not in await by["a"].result(step["request_id"])
                _, repeat = await by["a"].post("optim_step", model_id=model, seq_id=1)
                assert repeat["request_id"] == step["request_id"]


async def test_hops_are_signed_and_go_no_further(tmp_path: Path) -> None:
    async with together(configs(tmp_path, SERVED)) as nodes, callers(nodes) as by:
        model = await by["b"].model(await by["b"].session(), "fake/b")
        route = "/api/v1/get_info"
        url = f"{nodes['a'].address}{route}"
        now = nodes["a"].services.clock()
        async with aiohttp.ClientSession() as http:
            for secret, expected in ((SECRET, 404), ("tml-some-other-secret-of-old", 401)):
                hop = Hops(secret).sign(Hop("b", "a", "POST", route), now)
                body = {"model_id": model}
                async with http.post(url, json=body, headers={HEADER: hop}) as answer:
                    assert answer.status == expected
            async with http.get(
                f"{nodes['a'].address}/cluster/v1/report", headers={"X-API-Key": "tml-alice"}
            ) as answer:
                assert answer.status == 401


async def test_an_answer_that_breaks_off_is_not_taken_for_whole(tmp_path: Path) -> None:
    """Another node promises a hundred bytes, sends five, and is gone."""
    made = configs(tmp_path, SERVED)
    hops, there = Hops(SECRET), made["b"]

    async def report(request: web.Request) -> web.Response:
        said = Report("b", there.cluster.address, ("fake/b",), ("fake/b",))
        return web.json_response({"report": hops.sign_report(said, time.time())})

    async def broken(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "100"})
        await answer.prepare(request)
        await answer.write(b"{'a':")
        assert request.transport is not None
        request.transport.abort()
        return answer

    app = web.Application()
    app.add_routes([web.get("/cluster/v1/report", report), web.post("/{any:.*}", broken)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, there.host, there.port).start()
    try:
        async with together({"a": made["a"]}) as nodes, client() as http:
            url = f"{nodes['a'].address}/api/v1/retrieve_future"
            asked = {"request_id": "b-01234567-89ab-cdef-0123-456789abcdef:train:0:1"}
            with pytest.raises(aiohttp.ClientError):
                async with http.post(url, json=asked) as answer:
                    await answer.read()
    finally:
        await runner.cleanup()


async def test_a_node_that_could_not_take_part_does_not_start(tmp_path: Path) -> None:
    config = configs(tmp_path, SERVED)["a"]
    for key in ("address", "secret"):
        wrong = replace(config, cluster=replace(config.cluster, **{key: ""}))
        with pytest.raises(UserError, match=f"cluster.{key}"):
            async with node(wrong):
                pass


def test_a_node_by_itself_has_no_part_in_this(tmp_path: Path) -> None:
    with serving_in_a_thread(tmp_path) as url:
        model, runs, bases = drive(url, "fake/tiny")
    assert model.startswith("local-")
    assert (runs, bases) == (2, 1)
