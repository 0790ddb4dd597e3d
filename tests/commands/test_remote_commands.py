"""The commands that ask a server, against one: what they print, change, and end with."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import load_file
from support.node import MODEL, serving_in_a_thread

import openrl
from openrl.commands import cli, remote

KEY = "tml-cli"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_in_a_thread(tmp_path_factory.mktemp("node")) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openrl.connect(url, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: Any) -> Any:
    return client.create_model(MODEL, rank=8, user_metadata={"of": "test"})


@pytest.fixture
def saved(model: Any, request: pytest.FixtureRequest) -> str:
    return str(model.save_state(request.node.name.replace("[", "-").strip("]")))


def run(url: str, *arguments: str, key: str | None = KEY, stdin: str = "") -> Result:
    env = {"OPENRL_URL": url, "OPENRL_API_KEY": key}
    env |= {"TINKER_BASE_URL": None, "TINKER_API_KEY": None, "COLUMNS": "250"}
    return CliRunner().invoke(cli, arguments, env=env, input=stdin)


def says(url: str, *arguments: str) -> Any:
    done = run(url, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_runs(url: str, model: Any, saved: str) -> None:
    assert model.model_id in [each["training_run_id"] for each in says(url, "runs", "list")]
    shown = says(url, "runs", "show", model.model_id)
    assert (shown["base_model"], shown["lora_rank"]) == (MODEL, 8)
    assert saved in [each["tinker_path"] for each in shown["checkpoints"]]
    for_people = run(url, "runs", "show", model.model_id).stdout
    assert model.model_id in for_people
    assert saved in for_people
    assert "of: test" in for_people
    assert model.model_id in run(url, "runs", "list").stdout


def test_what_is_not_there_is_an_error_in_words(url: str) -> None:
    unknown = run(url, "runs", "show", "no-such:train:0")
    assert unknown.exit_code == 1
    assert "no-such:train:0" in unknown.stderr
    assert "Traceback" not in unknown.output
    assert run(url, "runs", "list", "--limit", "many").exit_code == 2
    bad = run(url, "checkpoints", "show", "nonsense")
    assert (bad.exit_code, "tinker://MODEL_ID/weights/NAME" in bad.stderr) == (1, True)


def test_models(url: str) -> None:
    (only,) = says(url, "models")
    assert (only["name"], only["state"]) == (MODEL, "ready")
    assert MODEL in run(url, "models").stdout


def test_a_checkpoint_is_shared_kept_and_deleted(url: str, model: Any, saved: str) -> None:
    def now() -> Any:
        return says(url, "checkpoints", "show", saved)

    assert now()["lora_rank"] == 8
    assert saved in run(url, "checkpoints", "list").stdout
    assert saved in run(url, "checkpoints", "list", "--run", model.model_id).stdout
    assert says(url, "checkpoints", "publish", saved)["public"] is True
    assert now()["public"] is True
    assert run(url, "checkpoints", "unpublish", saved).exit_code == 0
    assert now()["public"] is False
    assert run(url, "checkpoints", "ttl", saved, "7200").exit_code == 0
    assert now()["expires_at"] is not None
    assert says(url, "checkpoints", "ttl", saved, "never")["ttl_seconds"] is None
    assert now()["expires_at"] is None
    assert run(url, "checkpoints", "ttl", saved, "soon").exit_code == 2

    assert run(url, "checkpoints", "delete", saved, stdin="n\n").exit_code == 1
    assert now()["tinker_path"] == saved
    assert run(url, "checkpoints", "delete", saved, stdin="y\n").exit_code == 0
    gone = run(url, "checkpoints", "show", saved)
    assert (gone.exit_code, "checkpoints list" in gone.stderr) == (1, True)


def test_others_may_not_delete(url: str, saved: str) -> None:
    refused = run(url, "checkpoints", "delete", "--yes", saved, key="tml-somebody-else")
    assert refused.exit_code == 1
    assert saved in [each["tinker_path"] for each in says(url, "checkpoints", "list")]


def test_an_export_is_a_new_directory_as_peft_has_it(url: str, saved: str, tmp_path: Path) -> None:
    target = tmp_path / "new" / "adapter"
    answer = says(url, "checkpoints", "export", saved, str(target))
    assert answer["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(file.name for file in target.iterdir()) == answer["files"]
    assert json.loads((target / "adapter_config.json").read_text())["r"] == 8
    assert load_file(target / "adapter_model.safetensors")
    assert [each.name for each in target.parent.iterdir()] == ["adapter"], "nothing is left over"
    again = run(url, "checkpoints", "export", saved, str(target))
    assert (again.exit_code, "choose a new directory" in again.stderr) == (1, True)
    missing = run(url, "checkpoints", "export", f"{saved}-not", str(tmp_path / "other"))
    assert missing.exit_code == 1
    assert [each.name for each in tmp_path.iterdir()] == ["new"], "nor of what failed"


def test_top_shows_who_has_the_engine(url: str, client: Any, model: Any) -> None:
    datum = openrl.Datum([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
    model.forward_backward([datum]).result()
    picture = says(url, "top", "--once")
    (row,) = [row for row in picture["rows"] if row["job"] == client.session_id]
    assert row["models"] == [f"{MODEL} r8"]
    assert row["share"] > 0.9
    assert row["tokens"] >= 3
    assert picture["tokens_per_second"] > 0
    assert picture["models"] == [f"{MODEL} ready"]
    shown = run(url, "top", "--once").stdout
    assert client.session_id in shown
    assert "engine busy" in shown
    stranger = run(url, "top", "--once", key="tml-somebody-else").stdout
    assert client.session_id not in stranger
    assert "other-" in stranger


def test_top_goes_on_until_it_is_stopped(url: str, client: Any) -> None:
    """In a process of its own, with lines for a program."""
    environment = {**os.environ, "OPENRL_URL": url, "OPENRL_API_KEY": KEY}
    command = [sys.executable, "-c", "from openrl.cli import main; main()", "top", "--json"]
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        # A shell that runs the tests behind it ignores SIGINT, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as watching:
        assert watching.stdout is not None
        turns = [json.loads(watching.stdout.readline()) for _ in range(2)]
        watching.send_signal(signal.SIGINT)
        assert watching.wait(20) == 1
    assert all(turn["models"] for turn in turns)


# --- which server ---------------------------------------------------------------------------


def test_a_server_that_is_not_there_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as once:
        port = once.getsockname()[1]
    for command in (("runs", "list"), ("top", "--once"), ("models",)):
        failed = run(f"http://127.0.0.1:{port}", *command)
        assert failed.exit_code == 1
        assert f"no server at http://127.0.0.1:{port}" in failed.stderr
        assert "openrl serve" in failed.stderr
        assert "--url" in failed.stderr


def test_what_is_no_server_of_ours_is_said(tmp_path: Path) -> None:
    files = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        failed = run(f"http://127.0.0.1:{server.server_port}", "runs", "list")
        server.shutdown()
    assert failed.exit_code == 1
    assert "with nothing after the port" in failed.stderr


def test_the_address_and_the_key_come_from_the_nearest_word() -> None:
    ours = {"OPENRL_URL": "http://127.0.0.1:1", "OPENRL_API_KEY": "tml-ours"}
    theirs = {"TINKER_BASE_URL": "http://127.0.0.1:2", "TINKER_API_KEY": "tml-theirs"}
    typed = remote.find("http://127.0.0.1:3", "tml-typed", ours | theirs)
    assert (typed.url, typed.key) == ("http://127.0.0.1:3", "tml-typed")
    mine = remote.find(None, None, ours | theirs)
    assert (mine.url, mine.key) == ("http://127.0.0.1:1", "tml-ours")
    sdks = remote.find(None, None, theirs)
    assert (sdks.url, sdks.key) == ("http://127.0.0.1:2", "tml-theirs")
    bare = remote.find(None, None, {})
    assert (bare.url, bare.key) == ("http://127.0.0.1:8000", "tml-local")


@pytest.mark.parametrize(
    ("url", "said"), [("https://far.example", "--api-key"), ("localhost:8000", "write it like")]
)
def test_what_cannot_be_asked_is_said(url: str, said: str) -> None:
    failed = run(url, "runs", "list", key=None)
    assert (failed.exit_code, said in failed.stderr) == (1, True)
