"""Who one is, what one did and used, and how sessions are found."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from support.node import CONFIG, MODEL, serving

from .conftest import Http
from .test_sharing import DATUM, route_of, trained


@pytest.fixture
async def signing(tmp_path: Path) -> AsyncIterator[Http]:
    """A server that issues identities."""
    config = replace(CONFIG, issue_jwts=True)
    async with serving(tmp_path, config) as node, aiohttp.ClientSession() as session:
        yield Http(node.address, session)


# --- identities -------------------------------------------------------------------------------


async def test_an_identity_is_a_key_for_its_holder(signing: Http) -> None:
    session = await signing.new_session()
    token = (await signing.good("auth/token", {}))["jwt"]
    claims = jwt.decode(token, options={"verify_signature": False})
    assert claims["sub"].startswith("tml:organization_user:")
    assert claims["exp"] > claims["iat"]
    assert claims["org_id"]
    assert claims["email"]
    same = signing.as_other(token)
    assert (await same.ask("GET", f"sessions/{session}"))[0] == 200
    assert (await same.post("auth/token", {}))[0] == 400  # else one could go on for ever
    assert (await signing.good("client/config", {"sdk_version": "0.38.0"}))["pjwt_auth_enabled"]


def forged(token: str) -> list[str]:
    claims = jwt.decode(token, options={"verify_signature": False})
    return [
        jwt.encode(claims, "another secret" * 4, "HS256"),
        jwt.encode(claims, None, "none"),
        token[:-4],
        "eyJnonsense",
    ]


async def test_identities_that_are_not_ours(signing: Http) -> None:
    token = (await signing.good("auth/token", {}))["jwt"]
    for other in forged(token):
        status, headers, _ = await signing.as_other(other).ask_with_headers("GET", "sessions")
        assert status == 401
        assert 'error="invalid_token"' in headers["WWW-Authenticate"]


async def test_a_link_is_no_identity(signing: Http) -> None:
    model = await trained(signing)
    path = (await model.do("save_weights", path="a"))["path"]
    _, answer = await signing.ask("GET", route_of(path, "/archive"))
    link = answer["url"].rpartition("/")[2]
    assert (await signing.as_other(link).ask("GET", "sessions"))[0] == 401


async def test_without_identities(http: Http) -> None:
    assert (await http.post("auth/token", {}))[0] == 400
    assert "pjwt_auth_enabled" not in await http.good("client/config", {"sdk_version": "0.38.0"})


async def test_a_key_of_ones_own(http: Http) -> None:
    status, mine = await http.ask("GET", "auth/apikey/me")
    _, other = await http.as_other().ask("GET", "auth/apikey/me")
    assert status == 200
    assert isinstance(mine["key_id"], int)
    assert mine["key_id"] != other["key_id"]
    assert mine["details"]["user_details"]["email"]
    assert (await http.ask("DELETE", "auth/apikey/me"))[0] == 400


# --- the audit log ------------------------------------------------------------------------------


async def events(http: Http, query: str = "") -> list[str]:
    _, answer = await http.ask("GET", f"audit{query}")
    return [each["event"] for each in answer["entries"]]


async def test_what_was_done_is_in_ones_own_log(http: Http) -> None:
    model = await trained(http)
    path = (await model.do("save_weights", path="a"))["path"]
    bob = http.as_other()
    await http.ask("POST", route_of(path, "/publish"))
    await http.ask("POST", route_of(path, "/publish"))  # nothing happens
    await http.ask("PUT", route_of(path, "/ttl"), {"ttl_seconds": 3600})
    await bob.ask("GET", route_of(path, "/archive"))
    await http.ask("DELETE", route_of(path))
    assert await events(http) == [
        "checkpoint_create",
        "checkpoint_publish",
        "checkpoint_set_ttl",
        "checkpoint_read",
        "checkpoint_delete",
    ]
    assert await events(bob) == []
    session = await http.new_session()
    await http.ask("PUT", f"sessions/{session}/project", {"project_id": "p"})
    assert await events(http, "?event_type=projects") == ["project_session_assign"]
    assert await events(http, "?day=2001-02-03") == []
    for bad in ("?day=yesterday", "?event_type=odd"):
        assert (await http.ask("GET", f"audit{bad}"))[0] == 400


# --- usage --------------------------------------------------------------------------------------


def window() -> str:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    start, end = (hour + timedelta(hours=shift) for shift in (-1, 1))
    return f"starting_on={start:%Y-%m-%dT%H:%M:%SZ}&ending_before={end:%Y-%m-%dT%H:%M:%SZ}"


async def used(http: Http) -> dict[str, int]:
    _, answer = await http.ask("GET", f"billing/usage/events?{window()}")
    amounts: dict[str, int] = {}
    for event in answer["data"]:
        assert event["base_model"] == MODEL
        info = event["event_info"]
        amount = info["count"] if info["type"] == "checkpoint" else info["token_count"]
        amounts[info["type"]] = amounts.get(info["type"], 0) + amount
    return amounts


async def test_usage_is_what_was_used(http: Http) -> None:
    model = await trained(http)  # 3 tokens
    given = {"data": [DATUM, DATUM], "loss_fn": "cross_entropy"}
    await model.do("forward_backward", forward_backward_input=given)
    failed = await model.do("forward_backward", forward_backward_input=given | {"loss_fn": "odd"})
    assert "error" in failed
    await model.do("save_weights", path="a")
    body = {
        "base_model": MODEL,
        "prompt": {"chunks": [{"tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 5, "stop": []},
        "num_samples": 2,
    }
    await http.done("asample", body)
    assert await used(http) == {
        "training": 9,
        "checkpoint": 1,
        "sampling_prefill": 2,
        "sampling_sample": 10,
    }
    assert await used(http.as_other()) == {}
    _, stored = await http.ask("GET", "billing/usage/checkpoints/current")
    assert [each["checkpoint_count"] for each in stored["data"]] == [1]
    assert stored["data"][0]["size_bytes"] > 0


@pytest.mark.parametrize(
    "query",
    [
        "",
        "starting_on=now&ending_before=then",
        "starting_on=2026-01-02T00:00:00Z&ending_before=2026-01-01T00:00:00Z",
        "starting_on=2026-01-01T00:00:00Z&ending_before=2026-02-01T00:00:00Z",
    ],
)
async def test_windows_that_are_none(http: Http, query: str) -> None:
    assert (await http.ask("GET", f"billing/usage/events?{query}"))[0] == 400


# --- finding sessions ---------------------------------------------------------------------------


async def found(http: Http, **filters: Any) -> list[str]:
    answer = await http.good("sessions/search", filters)
    return [each["session_id"] for each in answer["sessions"]]


async def named(http: Http, name: str, **more: Any) -> str:
    body = {"sdk_version": "0.38.0", "display_name": name} | more
    session: str = (await http.good("create_session", body))["session_id"]
    return session


async def test_sessions_are_found_by_what_is_known_of_them(http: Http) -> None:
    one = await named(http, "Nightly run one", user_metadata={"k": "v"}, project_id="p")
    two = await named(http, "nightly two")
    three = await named(http, "else", user_metadata={"k": "v", "l": "w"})
    await http.good(f"sessions/{two}/finish", {"reason": {"type": "errored"}, "detail": "why"})
    assert await found(http) == [three, two, one]
    assert await found(http, display_name="NIGHTLY") == [two, one]
    assert await found(http, display_name="one run") == [one]
    assert await found(http, session_id=three, display_name="two") == [three, two]
    assert await found(http, user_metadata={"k": "v"}) == [three, one]
    assert await found(http, project_ids=["p"]) == [one]
    assert await found(http, statuses=[{"type": "client_finished"}]) == [two]
    reasons = [{"type": "client_finished", "reasons": ["success"]}]
    assert await found(http, statuses=reasons) == []
    assert await found(http.as_other(), owner={"type": "accessible"}) == []
    assert await found(http, statuses=[{"type": "active"}]) == [three, one]
    status, _ = await http.post("sessions/search", {"made_up": 1})
    assert status == 400


async def test_pages_of_sessions(http: Http) -> None:
    made = [await named(http, "x") for _ in range(5)]
    walked: list[str] = []
    cursor = None
    while True:
        body: dict[str, Any] = {"limit": 2} | ({"cursor": cursor} if cursor else {})
        page = await http.good("sessions/search", body)
        walked += [each["session_id"] for each in page["sessions"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert walked == made[::-1]


# --- samplers' clones ---------------------------------------------------------------------------


async def test_each_clone_of_a_sampler_has_a_number(http: Http) -> None:
    session = await http.new_session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    sampler = (await http.good("create_sampling_session", body))["sampling_session_id"]
    join = {"sampling_session_id": sampler}
    numbers = [(await http.good("join_sampling_session", join))["client_counter"] for _ in "ab"]
    assert numbers == [1, 2]
    assert (await http.as_other().post("join_sampling_session", join))[0] == 404


@pytest.mark.parametrize(("version", "status"), [("0.11.0", 400), ("0.12.0", 200), ("", 200)])
async def test_sdks_that_are_too_old(http: Http, version: str, status: int) -> None:
    header = {"X-Stainless-Package-Version": version}
    assert (await http.ask("POST", "create_session", {}, header))[0] == status
