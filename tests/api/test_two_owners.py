"""Two owners with listed keys: Bob attacks everything that Alice has, through every route.

Each route that is registered stands in one table below. A new one fails the first test until it is
said there how another owner's names could get into it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.node import CONFIG, MODEL, serving

from openrl.api.app import GROUPS
from openrl.config import AuthConfig
from openrl.key_files import KeysFile
from openrl.server import Node
from openrl.types import OwnerId

from .conftest import Http

KEPT = "{kind:weights|sampler_weights|external_weights}/{name}"
OWN = "/api/v1/training_runs/{run}/checkpoints/" + KEPT
DASHBOARD = "/api/v1/openrl/checkpoints/{run}/" + KEPT


@dataclass(frozen=True)
class Things:
    """One owner's. `request` is answered already."""

    http: Http
    owner: str
    session: str
    model: str
    request: str
    sampler: str
    weights: str
    sampler_weights: str
    external: str

    @property
    def names(self) -> set[str]:
        return {self.session, self.model, self.sampler, self.weights, self.sampler_weights}


# Routes that hold nothing of anybody's.
NOBODYS = {
    "GET /healthz",
    "GET /readyz",
    "GET /api/v1/healthz",
    "GET /api/v1/readyz",
    "GET /metrics",  # an administrator's, or this machine's: see test_metrics
    "GET /dashboard",
    "GET /dashboard/",
    r"GET /dashboard/{file:[a-z_]+\.(?:html|js|css|svg)}",
    "POST /api/v1/client/config",
    "POST /api/v1/client/dynamic_config",
    "GET /api/v1/get_server_capabilities",
    "POST /api/v1/telemetry",
    "POST /api/v1/create_session",
    "POST /api/v1/auth/token",
    "DELETE /api/v1/auth/apikey/me",
    "GET /api/v1/downloads/{token}",  # signed: see test_sharing
    "GET /api/v1/downloads/traces/{token}",
}
# Routes that show what is the caller's: none of Alice's names may be in the answer.
OWN_VIEWS: Mapping[str, Any] = {
    "GET /api/v1/auth/apikey/me": None,
    "GET /api/v1/audit": None,
    "GET /api/v1/billing/usage/events?starting_on=2026-01-01&ending_before=2026-01-14": None,
    "GET /api/v1/billing/usage/checkpoints/current": None,
    "POST /api/v1/sessions/search": {"owner": {"type": "accessible"}},
    "GET /api/v1/sessions?access_scope=accessible": None,
    "GET /api/v1/training_runs?access_scope=accessible": None,
    "GET /api/v1/checkpoints": None,
    "GET /oai/api/v1/models": None,
    "GET /api/v1/openrl/statistics": None,
    "GET /api/v1/openrl/checkpoints": None,
    "GET /api/v1/openrl/live": None,
}
TRAINING = (
    "forward_backward",
    "forward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "save_weights_external",
    "unload_model",
)
PROMPT = {"prompt": {"chunks": [{"tokens": [1, 2]}]}, "sampling_params": {"max_tokens": 1}}
TALK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def attacks(alice: Things, bob: Things) -> dict[str, list[tuple[str, Any]]]:
    """By route: the rest of its path, filled in, and a body. All of them are "not found"."""
    run = {"run": alice.model}
    paths = [alice.weights, alice.sampler_weights]
    one = {"session_id": alice.session}
    model = {"model_id": alice.model, "seq_id": 1000}
    data = {"data": [], "loss_fn": "cross_entropy"}
    kinds = [path.removeprefix("tinker://").split("/") for path in (*paths, alice.external)]
    kept = [dict(zip(("run", "kind", "name"), each, strict=True)) for each in kinds]
    found: dict[str, list[tuple[Mapping[str, str], Any]]] = {
        "PUT /api/v1/sessions/{session_id}/project": [(one, {"project_id": "p"})],
        "GET /api/v1/sessions/{session_id}/trace_export": [(one, None)],
        "GET /api/v1/sessions/{session_id}": [(one, None)],
        "POST /api/v1/sessions/{session_id}/finish": [(one, {"reason": {"type": "failed"}})],
        "POST /api/v1/session_heartbeat": [({}, one)],
        "POST /api/v1/create_model": [
            ({}, one | {"model_seq_id": 9, "base_model": MODEL, "lora_config": {"rank": 8}})
        ],
        "POST /api/v1/get_info": [({}, {"model_id": alice.model})],
        "POST /api/v1/load_weights": [
            ({}, {"path": bob.weights, "optimizer": False} | model),
            *(
                (
                    {},
                    {"path": path, "optimizer": False, "session_id": s, "model_seq_id": 9},
                )
                for path, s in ((bob.weights, alice.session), (alice.weights, bob.session))
            ),
        ],
        "POST /api/v1/create_sampling_session": [
            ({}, one | {"sampling_session_seq_id": 9, "base_model": MODEL}),
            *(
                ({}, {"session_id": bob.session, "sampling_session_seq_id": 9, "model_path": path})
                for path in paths
            ),
        ],
        "GET /api/v1/samplers/{sampler_id}": [({"sampler_id": alice.sampler}, None)],
        "POST /api/v1/join_sampling_session": [({}, {"sampling_session_id": alice.sampler})],
        "POST /api/v1/asample": [
            ({}, PROMPT | {"sampling_session_id": alice.sampler, "seq_id": 0}),
            *(({}, PROMPT | {"model_path": path}) for path in paths),
        ],
        "POST /api/v1/retrieve_future": [({}, {"request_id": alice.request})],
        "POST /api/v1/retrieve_futures": [
            ({}, {"target": {"sampling_session_id": alice.sampler}, "timeout": 0})
        ],
        "POST /api/v1/cancel_future": [({}, {"request_id": alice.request})],
        "GET /api/v1/training_runs/{run}": [(run, None)],
        "GET /api/v1/training_runs/{run}/checkpoints": [(run, None)],
        "POST /api/v1/weights_info": [({}, {"tinker_path": path}) for path in paths],
        "POST /api/v1/copy_weights": [
            ({}, {"source_path": alice.weights, "destination_project_id": "p"}),
            ({}, {"source_path": bob.weights, "model_seq_id": 9} | one),
        ],
        "POST /oai/api/v1/completions": [
            ({}, {"model": name, "prompt": "a"})
            for name in (alice.sampler_weights, f"{MODEL};{alice.sampler_weights}")
        ],
        "POST /oai/api/v1/chat/completions": [({}, {"model": alice.sampler_weights} | TALK)],
        "POST /anthropic/api/v1/messages": [({}, {"model": alice.sampler_weights} | TALK)],
        "POST /anthropic/api/v1/messages/count_tokens": [
            ({}, {"model": alice.sampler_weights, "messages": TALK["messages"]})
        ],
        "GET /api/v1/openrl/models/{model_id}/story": [({"model_id": alice.model}, None)],
        "POST /api/v1/openrl/models/{model_id}/pause": [({"model_id": alice.model}, {})],
        "POST /api/v1/openrl/models/{model_id}/resume": [({"model_id": alice.model}, {})],
        "GET /api/v1/openrl/models/{model_id}/metrics": [({"model_id": alice.model}, None)],
        "POST /api/v1/openrl/models/{model_id}/metrics": [
            ({"model_id": alice.model}, {"metrics": {"reward": 1.0}})
        ],
        "PUT /api/v1/openrl/owners/{owner}/weight": [({"owner": alice.owner}, {"weight": 2.0})],
        "GET /api/v1/openrl/owners/{owner}/quota": [({"owner": alice.owner}, None)],
        "PUT /api/v1/openrl/owners/{owner}/quota": [({"owner": alice.owner}, {"weight": 2.0})],
    }
    for route in TRAINING:
        body = model | {"path": "stolen"}
        body |= {"forward_input" if route == "forward" else "forward_backward_input": data}
        found[f"POST /api/v1/{route}"] = [({}, body)]
    for root in (OWN, DASHBOARD):
        found[f"DELETE {root}"] = [(each, None) for each in kept]
        found[f"PUT {root}/ttl"] = [(each, {"ttl_seconds": 3600}) for each in kept]
        found[f"POST {root}/publish"] = [(each, None) for each in kept]
        found[f"DELETE {root}/publish"] = [(each, None) for each in kept]
    found[f"GET {DASHBOARD}/archive"] = [(each, None) for each in kept[:2]]
    base = "/api/v1/training_runs/{run}/checkpoints/{kind:"
    found[f"GET {base}weights|sampler_weights}}/{{name}}/archive"] = [(e, None) for e in kept[:2]]
    found[f"GET {base}external_weights}}/{{name}}/external_weights_urls"] = [(kept[2], None)]
    return {route: [(filled(route, p), body) for p, body in each] for route, each in found.items()}


def filled(route: str, parts: Mapping[str, str]) -> str:
    path = route.partition(" ")[2]
    for name, value in parts.items():
        start = path.find(f"{{{name}")
        if start >= 0:
            path = path[:start] + value + path[path.index("}", start) + 1 :]
    return path


def test_every_route_stands_in_one_table() -> None:
    registered = {f"{r.method} {r.path}" for make in GROUPS for r in make(None).routes()}
    nothing = Things(None, *["tinker://a/weights/b"] * 8)  # type: ignore[arg-type]
    attacked = attacks(nothing, nothing).keys()
    shown = {route.partition("?")[0] for route in OWN_VIEWS}
    tables = [NOBODYS, set(attacked), shown]
    assert set().union(*tables) == registered, "say how another owner's names get into it"
    assert sum(map(len, tables)) == len(registered), "in one table alone"


async def things(http: Http, owner: str) -> Things:
    session = await http.new_session()
    model = await http.new_model(session)
    seq = iter(range(1, 10))

    async def saved(route: str, **body: Any) -> Any:
        return await http.done(route, {"model_id": model, "seq_id": next(seq)} | body)

    weights = (await saved("save_weights", path=f"{owner}-w"))["path"]
    sampler_weights = (await saved("save_weights_for_sampler", path=f"{owner}-s"))["path"]
    external = (await saved("save_weights_external", path=f"{owner}-e"))["path"]
    place = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampler_weights}
    sampler = (await http.good("create_sampling_session", place))["sampling_session_id"]
    return Things(
        http, owner, session, model, f"{model}:1", sampler, weights, sampler_weights, external
    )


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    file = tmp_path / "listed"
    made = {name: KeysFile(file).add(OwnerId(name), False, "")[0] for name in ("alice", "bob")}
    config = replace(CONFIG, auth=AuthConfig(keys_file=file), poll_seconds=0.05)
    async with serving(tmp_path / "data", config) as running:
        KEYS.update(made)
        yield running


KEYS: dict[str, str] = {}


@pytest.fixture
async def both(node: Node) -> AsyncIterator[tuple[Things, Things]]:
    async with aiohttp.ClientSession() as session:
        owners = [
            await things(Http(node.address, session, {"X-API-Key": KEYS[name]}), name)
            for name in ("alice", "bob")
        ]
        yield owners[0], owners[1]


async def told(http: Http, method: str, path: str, body: Any) -> tuple[int, str]:
    """Of a stream, what comes at first."""
    json = {} if body is None else {"json": body}
    async with http.session.request(
        method, http.url + path, headers=http.headers, **json
    ) as response:
        if response.content_type == "text/event-stream":
            async with asyncio.timeout(10):
                return response.status, (await response.content.readany()).decode()
        return response.status, await response.text()


def state(node: Node) -> list[Any]:
    rows = node.services.catalogue._table.sql.execute("SELECT * FROM nouns ORDER BY kind, id")
    return rows.fetchall()


async def test_bob_finds_nothing_of_alices(both: tuple[Things, Things], node: Node) -> None:
    alice, bob = both
    before = state(node)
    for route, tried in attacks(alice, bob).items():
        for path, body in tried:
            status, text = await told(bob.http, route.split()[0], path, body)
            wanted = {
                # A sample's client sends it again after a 410, whoever's the name is.
                "POST /api/v1/retrieve_future": 410,
                "PUT /api/v1/openrl/owners/{owner}/weight": 403,
                "PUT /api/v1/openrl/owners/{owner}/quota": 403,
            }.get(route, 404)
            assert status == wanted, f"{route} {path}: {text}"
    assert state(node) == before


async def test_what_is_anothers_looks_like_what_never_was(both: tuple[Things, Things]) -> None:
    """Nobody learns which names there are."""
    alice, bob = both
    kinds = ("session", "model", "request", "sampler", "weights", "sampler_weights", "external")
    changes = {}
    for kind in kinds:
        name = getattr(alice, kind)
        changes[kind] = name.replace(alice.session, f"local-{'0' * 36}")
    nobody = replace(alice, owner="zelda", **changes)
    real, unreal = attacks(alice, bob), attacks(nobody, bob)
    for route, tried in real.items():
        for (path, body), (other_path, other) in zip(tried, unreal[route], strict=True):
            method = route.split()[0]
            status, text = await told(bob.http, method, path, body)
            other_status, other_text = await told(bob.http, method, other_path, other)
            text = text.replace(alice.session, f"local-{'0' * 36}").replace("'alice'", "'zelda'")
            assert (status, text) == (other_status, other_text), route


@pytest.mark.parametrize("route", OWN_VIEWS)
async def test_lists_hold_ones_own(route: str, both: tuple[Things, Things]) -> None:
    alice, bob = both
    method, path = route.split()
    status, text = await told(bob.http, method, path, OWN_VIEWS[route])
    assert status == 200, text
    for name in (*alice.names, "alice"):
        assert name not in text


async def test_anothers_checkpoint_fails_what_would_load_it(both: tuple[Things, Things]) -> None:
    """Onto a model of one's own: bad content of training work fails through its future."""
    alice, bob = both
    body = {"model_id": bob.model, "seq_id": 4, "path": alice.weights, "optimizer": True}
    failed = await bob.http.done("load_weights", body)
    assert failed["error"] == f"no checkpoint {alice.weights!r}"
    cursor = {"last_created_at": "", "last_session_id": alice.session}
    status, _ = await bob.http.post("sessions/search", {"cursor": cursor})
    assert status == 404


async def test_alice_herself_can(both: tuple[Things, Things]) -> None:
    """Or the attacks would prove nothing. (Routes of text need a tokenizer: see test_oai.)"""
    alice, bob = both
    for route, tried in attacks(alice, bob).items():
        method = route.split()[0]
        harmless = method == "GET" and "urls" not in route
        for path, body in tried if harmless else ():
            assert (await told(alice.http, method, path, body))[0] == 200, path


async def test_a_key_that_is_revoked_is_no_key(
    both: tuple[Things, Things], node: Node, tmp_path: Path
) -> None:
    alice, bob = both
    assert (await alice.http.as_other("tml-of-nobody").ask("GET", "sessions"))[0] == 401
    KeysFile(tmp_path / "listed").revoke(lambda each: each.owner == "alice")
    async with asyncio.timeout(10):
        while (await alice.http.ask("GET", "sessions"))[0] != 401:  # noqa: ASYNC110 - a file
            await asyncio.sleep(0.1)
    assert (await bob.http.ask("GET", "sessions"))[0] == 200
