"""Who holds which key: the file, what follows it, and the commands that change it."""

from __future__ import annotations

import hashlib
import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from openrl.commands import cli
from openrl.config import AuthConfig, Config
from openrl.errors import UserError
from openrl.key_files import KeyRing, KeysFile
from openrl.keys import KeyEntry, checks_keys, digest_of, from_settings, new_key, parse
from openrl.startup import who_is_let_in
from openrl.types import OwnerId

ALICE = OwnerId("alice")
SECRET = "tml-" + "k" * 16


def openrl(*arguments: str, **env: str) -> Result:
    unset = {"OPENRL_CONFIG": None, "OPENRL_AUTH__KEYS": None, "OPENRL_AUTH__KEYS_FILE": None}
    return CliRunner().invoke(cli, arguments, env={**unset, **env})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def keys(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path / "data" / "keys")


# --- the file -------------------------------------------------------------------------------


def test_a_key_is_random_and_long_and_its_hash_is_sha256() -> None:
    made = {new_key() for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("tml-") and len(key) >= 4 + 43 for key in made)
    assert digest_of("tml-x") == hashlib.sha256(b"tml-x").hexdigest()


def test_the_file_holds_hashes_and_is_its_owners_alone(keys: KeysFile) -> None:
    key, entry = keys.add(ALICE, True, "2026-11-30T00:00:00+00:00")
    text = keys.path.read_text()
    assert key not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.path.parent.stat().st_mode) == 0o700
    assert keys.entries() == (entry,)
    assert tuple(parse(text, "here")) == (entry,)


def test_what_people_wrote_into_the_file_stays(keys: KeysFile) -> None:
    written(keys, f"# the lab\n\nbob sha256:{'0' * 64}\n")
    _, entry = keys.add(ALICE, False, "")
    assert keys.path.read_text() == f"# the lab\n\nbob sha256:{'0' * 64}\n{entry.line}\n"
    (gone,) = keys.revoke(lambda each: each.owner == "bob")
    assert gone.digest == "0" * 64
    assert keys.path.read_text() == f"# the lab\n\n{entry.line}\n"


def written(keys: KeysFile, text: str) -> None:
    keys.path.parent.mkdir(exist_ok=True)
    keys.path.write_text(text)
    keys.path.chmod(0o600)


def test_two_at_a_time_lose_nothing(keys: KeysFile) -> None:
    def make() -> None:
        for _ in range(10):
            keys.add(ALICE, False, "")

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys.entries())) == 40


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("alice", "expected OWNER"),
        ("alice tml-secret-key-that-is-plain", "expected OWNER"),
        ("alice sha256:12", "expected OWNER"),
        (f"-x sha256:{'0' * 64}", "owner '-x'"),
        (f"alice sha256:{'0' * 64} root", "'root' is not known"),
    ],
)
def test_a_line_that_is_wrong_is_named_and_not_repeated(
    text: str, problem: str, keys: KeysFile
) -> None:
    written(keys, f"# one\n{text}\n")
    with pytest.raises(UserError, match=f"line 2: {problem}") as refused:
        keys.entries()
    assert "tml-" not in refused.value.message
    with pytest.raises(UserError):
        keys.add(ALICE, False, "")
    assert keys.path.read_text() == f"# one\n{text}\n"


def test_a_file_that_others_may_write_is_refused(keys: KeysFile) -> None:
    keys.add(ALICE, False, "")
    keys.path.chmod(0o660)
    with pytest.raises(UserError, match="chmod go-w"):
        keys.entries()


def test_keys_of_the_settings_are_plain_or_hashed() -> None:
    plain, hashed = from_settings({"alice": SECRET, "bob": f"sha256:{'1' * 64}"})
    assert plain == KeyEntry(ALICE, hashlib.sha256(SECRET.encode()).hexdigest())
    assert hashed.digest == "1" * 64


# --- what a server knows --------------------------------------------------------------------


def test_a_server_follows_the_file_within_a_second(keys: KeysFile) -> None:
    clock = Clock()
    first, entry = keys.add(ALICE, False, "")
    ring = KeyRing(keys.path, (), clock)
    found = ring.find(first)
    assert found is not None
    assert (found.owner, found.admin, found.key_id) == ("alice", False, entry.key_id)
    second, _ = keys.add(OwnerId("bob"), True, "")
    keys.revoke(lambda each: each == entry)
    clock.now = 0.99
    assert ring.find(second) is None  # not looked yet: once a second, however many ask
    clock.now = 1.0
    found = ring.find(second)
    assert found is not None
    assert (found.owner, found.admin) == ("bob", True)
    assert ring.find(first) is None
    assert ring.named(entry.key_id) is None


def test_a_mistake_in_the_file_keeps_the_keys_of_before(
    keys: KeysFile, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    key, _ = keys.add(ALICE, False, "")
    good = keys.path.read_text()
    ring = KeyRing(keys.path, (), clock)
    keys.path.write_text("nonsense\n")
    clock.now = 1.0
    assert ring.find(key) is not None
    assert "line 1: expected OWNER" in caplog.text
    keys.path.unlink()
    clock.now = 2.0
    assert ring.find(key) is None  # no file, nobody
    written(keys, good)
    clock.now = 3.0
    assert ring.find(key) is not None


def test_a_secret_that_moves_is_followed(tmp_path: Path) -> None:
    """Kubernetes swaps a link to the directory that holds the file."""
    clock = Clock()
    made = {}
    for name in ("one", "two"):
        made[name] = KeysFile(tmp_path / name / "keys").add(OwnerId(name), False, "")[0]
    data = tmp_path / "..data"
    data.symlink_to("one")
    (tmp_path / "keys").symlink_to("..data/keys")
    ring = KeyRing(tmp_path / "keys", (), clock)
    assert ring.find(made["one"]) is not None
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").replace(data)
    clock.now = 1.0
    assert ring.find(made["one"]) is None
    assert ring.find(made["two"]) is not None


@pytest.mark.parametrize("key", ["", "tml-", "tml-wrong", "tml-" + "é" * 9])
def test_other_keys_are_nobodys(key: str, keys: KeysFile) -> None:
    keys.add(ALICE, False, "")
    assert KeyRing(keys.path, (), Clock()).find(key) is None


def test_a_key_that_agrees_in_its_id_alone_is_nobodys(keys: KeysFile) -> None:
    """The id is looked up, the whole hash is compared."""
    key = new_key()
    near = digest_of(key)[:12] + "0" * 52
    ring = KeyRing(keys.path, [KeyEntry(ALICE, near)], Clock())
    assert ring.named(near[:12]) is not None
    assert ring.find(key) is None


# --- whose keys are let in ------------------------------------------------------------------


def config(tmp_path: Path, host: str, **auth: Any) -> Config:
    return Config(models=(), host=host, data=tmp_path, auth=AuthConfig(**auth))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_without_keys_loopback_lets_any_in_and_says_so(host: str, tmp_path: Path) -> None:
    given = config(tmp_path, host)
    assert not checks_keys(given)
    assert "only this machine can connect" in who_is_let_in(given)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "", "node.example"])
def test_without_keys_others_are_refused_at_the_start(host: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="openrl keys add") as refused:
        checks_keys(config(tmp_path, host))
    assert "auth.mode = any-key" in refused.value.message
    by_name = config(tmp_path, host, mode="any-key")
    assert not checks_keys(by_name)
    assert "ANY is let in" in who_is_let_in(by_name)


def test_with_keys_they_are_checked_everywhere(tmp_path: Path) -> None:
    KeysFile(tmp_path / "keys").add(ALICE, False, "")
    for host in ("127.0.0.1", "0.0.0.0"):
        assert checks_keys(config(tmp_path, host))
    assert "1 is listed" in who_is_let_in(config(tmp_path, "127.0.0.1"))
    KeysFile(tmp_path / "keys").revoke(lambda each: True)
    assert checks_keys(config(tmp_path, "127.0.0.1")), "an empty list lets nobody in"
    assert checks_keys(config(tmp_path / "no", "0.0.0.0", keys={"alice": SECRET}))


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    for mode in ("auto", "keys"):
        with pytest.raises(UserError, match="is not there"):
            checks_keys(config(tmp_path, "127.0.0.1", mode=mode, keys_file=tmp_path / "nope"))


def test_serve_refuses_before_anything_is_started(tmp_path: Path) -> None:
    model = ("--engine", "fake", "--model", "a", "--data", str(tmp_path / "data"))
    refused = openrl("serve", "--host", "0.0.0.0", *model)
    assert refused.exit_code == 1
    assert "there are no keys, and others can connect to '0.0.0.0'" in refused.output
    assert not (tmp_path / "data").exists()
    assert openrl("config", "check", "--host", "0.0.0.0", *model).exit_code == 1
    assert openrl("keys", "add", "--owner", "a", "--data", str(tmp_path / "data")).exit_code == 0
    assert openrl("config", "check", "--host", "0.0.0.0", *model).exit_code == 0


# --- the commands ---------------------------------------------------------------------------


def test_add_list_and_revoke(tmp_path: Path) -> None:
    data = ("--data", str(tmp_path / "data"))
    added = openrl("keys", "add", "--owner", "alice", *data)
    assert added.exit_code == 0, added.output
    key = added.stdout.strip()
    assert key.startswith("tml-")
    assert "not shown again" in added.stderr
    assert "first key" in added.stderr
    second = openrl("keys", "add", "--owner", "ops", "--admin", *data, "--json")
    told = json.loads(second.stdout)
    assert (told["owner"], told["admin"]) == ("ops", True)
    assert told["id"] == hashlib.sha256(told["key"].encode()).hexdigest()[:12]
    listed = openrl("keys", "list", *data)
    assert "alice" in listed.output
    assert "admin" in listed.output
    assert key not in listed.output
    assert told["key"] not in listed.output
    entries = json.loads(openrl("keys", "list", *data, "--json").stdout)
    assert [each["owner"] for each in entries] == ["alice", "ops"]
    assert openrl("keys", "revoke", entries[0]["id"], *data).exit_code == 0
    again = openrl("keys", "revoke", entries[0]["id"], *data)
    assert (again.exit_code, "no such key" in again.output) == (1, True)
    assert openrl("keys", "revoke", "--owner", "ops", *data).exit_code == 0
    assert json.loads(openrl("keys", "list", *data, "--json").stdout) == []


def test_a_key_for_what_was_made_before_keys_were_listed(tmp_path: Path) -> None:
    made = openrl("keys", "add", "--was", "tml-local", "--data", str(tmp_path), "--json")
    told = json.loads(made.stdout)
    assert told["owner"] == hashlib.sha256(b"tml-local").hexdigest()[:32]
    assert told["key"] != "tml-local"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("add",), "--owner NAME, or --was KEY"),
        (("add", "--owner", "a", "--was", "tml-local"), "--owner NAME, or --was KEY"),
        (("add", "--owner", "a b"), "letters, digits"),
        (("revoke",), "say which keys"),
        (("revoke", "abc"), "no such key"),
    ],
)
def test_what_is_missing_is_said(arguments: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    refused = openrl("keys", *arguments, "--data", str(tmp_path))
    assert refused.exit_code == 1
    assert problem in refused.output


def test_a_key_of_the_environment_is_listed_and_not_revoked_here(tmp_path: Path) -> None:
    env = {"OPENRL_AUTH__KEYS": f"carol={SECRET}"}
    listed = openrl("keys", "list", "--data", str(tmp_path), "--json", **env)
    (entry,) = json.loads(listed.stdout)
    assert (entry["owner"], entry["place"]) == ("carol", "auth.keys")
    refused = openrl("keys", "revoke", entry["id"], "--data", str(tmp_path), **env)
    assert "where it is set" in refused.output


@pytest.mark.parametrize(
    "env",
    [
        {"OPENRL_AUTH__KEYS": f"carol={SECRET}"},
        {"OPENRL_AUTH__KEYS": "carol=tml-kkk"},
        {"OPENRL_SERVER__ADMIN_KEY": "tml-kkk"},
    ],
)
def test_no_command_shows_a_secret(env: dict[str, str]) -> None:
    shown = openrl("config", "show", **env)
    assert "(a secret)" in shown.output
    assert "kkk" not in shown.output
