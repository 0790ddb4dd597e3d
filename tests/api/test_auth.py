"""Whose request it is: listed keys, administrators, identities, and the time before keys."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import jwt
import pytest
from support.node import CONFIG, serving

from openrl.api.auth import authenticator_of
from openrl.config import AuthConfig, Config
from openrl.errors import Unauthenticated, UserError
from openrl.key_files import KeysFile
from openrl.server import node
from openrl.signing import Signer
from openrl.types import OwnerId

from .conftest import KEY, Http

NEAR = "tml-administrator-of-this"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def listed(tmp_path: Path, owner: str, admin: bool = False) -> str:
    return KeysFile(tmp_path / "keys").add(OwnerId(owner), admin, "")[0]


@asynccontextmanager
async def reached(tmp_path: Path, config: Config = CONFIG) -> AsyncIterator[Http]:
    async with serving(tmp_path, config) as running, aiohttp.ClientSession() as session:
        yield Http(running.address, session)


async def test_an_identity_ends_with_its_key(tmp_path: Path) -> None:
    clock, signer = Clock(), Signer(b"s" * 32)
    key = listed(tmp_path, "alice", admin=True)
    config = Config(models=(), data=tmp_path, issue_jwts=True, auth=AuthConfig(mode="keys"))
    authenticator = authenticator_of(config, signer, clock, clock)
    holder = authenticator.holder(key)
    identity = signer.sign_identity(holder.key_id, {}, expires=3600)
    assert authenticator.holder(identity) == holder
    KeysFile(tmp_path / "keys").revoke(lambda each: True)
    clock.now = 1.0
    with pytest.raises(Unauthenticated):
        authenticator.holder(identity)


def test_an_identity_that_names_no_key_is_none() -> None:
    signer = Signer(b"s" * 32)
    claims = {"owner": "alice", "aud": "openrl:identity", "exp": 100}
    with pytest.raises(Unauthenticated):
        signer.read_identity(jwt.encode(claims, b"s" * 32, "HS256"), 0.0)


async def test_listed_administrators_come_from_anywhere_and_the_configured_one_does_not(
    tmp_path: Path,
) -> None:
    alice, admin = listed(tmp_path, "alice"), listed(tmp_path, "ops", admin=True)
    away = {"X-Forwarded-For": "192.0.2.1"}
    async with reached(tmp_path, replace(CONFIG, admin_key=NEAR)) as http:
        model_id = await http.as_other(alice).new_model()
        story = f"openrl/models/{model_id}/story"
        for key, headers, status in (
            (alice, away, 200),
            (admin, {}, 200),
            (admin, away, 200),
            (NEAR, {}, 200),
            (NEAR, away, 401),
            ("tml-of-nobody-at-all", {}, 401),
        ):
            assert (await http.as_other(key).ask("GET", story, headers=headers))[0] == status, key
        # An owner like any other everywhere else.
        assert (await http.as_other(admin).ask("GET", f"training_runs/{model_id}"))[0] == 404
        _, mine = await http.as_other(alice).ask("GET", "auth/apikey/me")
        assert mine["name"] == "alice"
        assert mine["key_id"] == int(hashlib.sha256(alice.encode()).hexdigest()[:12], 16)


async def test_what_was_made_before_keys_were_listed_is_named_and_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reached(tmp_path) as http:
        session_id = await http.new_session()
    owner = hashlib.sha256(KEY.encode()).hexdigest()[:32]
    other = listed(tmp_path, "alice")
    async with reached(tmp_path) as http:
        assert f"1 owners have data here and no key: {owner}" in caplog.text
        assert (await http.ask("GET", f"sessions/{session_id}"))[0] == 401
        assert (await http.as_other(other).ask("GET", f"sessions/{session_id}"))[0] == 404
    caplog.clear()
    again = listed(tmp_path, owner)  # as `keys add --was` does it
    async with reached(tmp_path) as http:
        assert "no key" not in caplog.text
        assert (await http.as_other(again).ask("GET", f"sessions/{session_id}"))[0] == 200


async def test_any_key_is_let_in_under_a_name_of_this_machine_alone(tmp_path: Path) -> None:
    """A page of the internet whose name leads here would ask under that name."""
    elsewhere = {"Host": "evil.example:8000"}
    async with reached(tmp_path) as http:
        for host in ("localhost:1", "127.0.0.1", "[::1]:8000"):
            assert (await http.ask("GET", "sessions", headers={"Host": host}))[0] == 200
        status, answer = await http.ask("GET", "sessions", headers=elsewhere)
        assert status == 401
        assert "auth.mode = any-key" in answer["detail"]
    async with reached(tmp_path, replace(CONFIG, auth=AuthConfig(mode="any-key"))) as http:
        assert (await http.ask("GET", "sessions", headers=elsewhere))[0] == 200
    key = listed(tmp_path, "alice")
    async with reached(tmp_path) as http:
        assert (await http.as_other(key).ask("GET", "sessions", headers=elsewhere))[0] == 200


async def test_a_node_that_is_not_started_by_the_command_refuses_as_well(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="openrl keys add"):
        async with node(replace(CONFIG, data=tmp_path, host="0.0.0.0")):
            pass
