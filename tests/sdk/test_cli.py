"""Every command of the SDK's command line, in a home of its own, against a server.

Left out is `checkpoint push-hf`: it wants the hub's login before it asks us for anything, and then
asks what `checkpoint download` asks.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tinker
from support.node import CONFIG, MODEL, serving_in_a_thread

KEY = "tml-cli"
PUSH_HF = ("checkpoint", "push-hf")

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Cli:
    home: Path
    url: str
    key: str | None = KEY

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "TINKER_BASE_URL": self.url,
            "TINKER_TELEMETRY": "0",
            "PYTHONWARNINGS": "ignore",
        }
        if self.key is not None:
            environment["TINKER_API_KEY"] = self.key
        return subprocess.run(
            [sys.executable, "-m", "tinker.cli", *arguments],
            cwd=self.home,
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def does(self, *arguments: str, stdin: str = "") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def says(self, *arguments: str) -> Any:
        return json.loads(self.does("--format", "json", *arguments))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = replace(CONFIG, issue_jwts=True)
    with serving_in_a_thread(tmp_path_factory.mktemp("node"), config) as address:
        yield address


@pytest.fixture(scope="module")
def training(url: str) -> tinker.TrainingClient:
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    return service.create_lora_training_client(MODEL, rank=8).result()


@pytest.fixture
def cli(tmp_path: Path, url: str) -> Cli:
    return Cli(tmp_path, url)


@pytest.fixture
def saved(training: tinker.TrainingClient, request: pytest.FixtureRequest) -> str:
    return training.save_state(request.node.name.replace("[", "-").strip("]")).result().path


def paths(cli: Cli, *arguments: str) -> list[str]:
    listed = cli.says("checkpoint", "list", *arguments)["checkpoints"]
    return [each["tinker_path"] for each in listed]


def test_every_command_has_a_test_here() -> None:
    import click
    from tinker.cli.__main__ import main_cli

    context = click.Context(main_cli)
    groups = {name: main_cli.get_command(context, name) for name in main_cli.list_commands(context)}
    commands = {
        (name, inner)
        for name, group in groups.items()
        for inner in (group.list_commands(context) if isinstance(group, click.Group) else [""])
    }
    text = Path(__file__).read_text()
    called = {c for c in commands if ", ".join(f'"{word}"' for word in c if word) in text}
    assert commands - called == set()


def test_models(cli: Cli) -> None:
    assert MODEL in json.dumps(cli.says("model", "list"))
    assert MODEL in cli.does("model", "list")


def test_version(cli: Cli) -> None:
    assert tinker.__version__ in cli.does("version")


def test_runs(cli: Cli, training: tinker.TrainingClient) -> None:
    assert training.model_id in json.dumps(cli.says("run", "list", "--limit", "0"))
    assert cli.says("run", "info", training.model_id)["base_model"] == MODEL
    unknown = cli.run("run", "info", "no-such:train:0")
    assert unknown.returncode != 0
    assert "not found" in unknown.stderr.lower()


def test_checkpoints(cli: Cli, training: tinker.TrainingClient, saved: str) -> None:
    assert saved in paths(cli, "--limit", "0")
    assert saved in paths(cli, "--run-id", training.model_id)
    assert cli.says("checkpoint", "info", saved)["lora_rank"] == 8

    cli.does("checkpoint", "publish", saved)
    assert cli.says("checkpoint", "info", saved)["public"] is True
    cli.does("checkpoint", "unpublish", saved)
    assert cli.says("checkpoint", "info", saved)["public"] is False

    cli.does("checkpoint", "set-ttl", saved, "--ttl", "7200")
    assert cli.says("checkpoint", "info", saved)["expires_at"] is not None
    cli.does("checkpoint", "set-ttl", saved, "--remove")
    assert cli.says("checkpoint", "info", saved)["expires_at"] is None

    cli.does("checkpoint", "delete", "--yes", saved)
    assert saved not in paths(cli, "--limit", "0")


def test_a_published_checkpoint_is_seen_by_others(cli: Cli, saved: str) -> None:
    other = replace(cli, key="tml-somebody-else")
    assert other.run("checkpoint", "info", saved).returncode != 0
    cli.does("checkpoint", "publish", saved)
    refused = other.run("checkpoint", "delete", "--yes", saved)
    assert "Failed to delete 1" in refused.stdout
    assert saved in paths(cli, "--limit", "0")


def test_downloads(cli: Cli, saved: str, training: tinker.TrainingClient) -> None:
    before = len(paths(cli, "--limit", "0"))
    answer = cli.says("checkpoint", "download", saved, "--output", "here")
    directory = cli.home / answer["destination"]
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["r"] == 8
    assert (directory / "adapter_model.safetensors").stat().st_size > 0
    assert not (directory / "optimizer.safetensors").exists()
    assert len(paths(cli, "--limit", "0")) == before  # the temporary export is gone

    external = training.save_weights_external("to-download").result().path
    cli.does("checkpoint", "download", external, "--output", "there")
    assert list((cli.home / "there").rglob("adapter_model.safetensors"))


def test_billing(cli: Cli, saved: str) -> None:
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = [(hour + timedelta(hours=shift)).isoformat() for shift in (-1, 1)]
    events = cli.says("billing", "usage", *window)["data"]
    assert "checkpoint" in [each["event_info"]["type"] for each in events]
    stored = cli.says("billing", "checkpoint-storage")["data"]
    assert stored[0]["checkpoint_count"] >= 1


def test_a_trace(cli: Cli, training: tinker.TrainingClient) -> None:
    session = training.model_id.split(":train:")[0]
    cli.does("session", "export-trace", session)
    text = (cli.home / f"{session}.pftrace").read_text()
    assert text.startswith('{"'), "how Perfetto knows JSON"
    events = json.loads(text)["traceEvents"]
    tracks = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert training.model_id in tracks
    open_spans: dict[str, float] = {}
    for each in events:
        if each["ph"] == "b":
            open_spans[each["id"]] = each["ts"]
        elif each["ph"] == "e":
            assert each["ts"] >= open_spans.pop(each["id"])
    assert not open_spans
    assert any(each["name"].startswith("pass ") for each in events)
    now = datetime.now(UTC).timestamp() * 1e6
    assert all(0 <= now - each["ts"] < 600e6 for each in events if "ts" in each)


def test_a_trace_of_a_session_that_did_nothing(cli: Cli) -> None:
    service = tinker.ServiceClient(base_url=cli.url, api_key=KEY)
    session = service.create_sampling_client(base_model=MODEL).result().holder._session_id
    done = cli.run("session", "export-trace", session)
    assert done.returncode != 0
    assert "nothing of this session is remembered" in done.stderr


def test_logging_in_and_out(cli: Cli) -> None:
    fresh = replace(cli, key=None)
    assert fresh.run("auth", "status").returncode != 0
    assert "Logged in" in fresh.does("auth", "login", stdin=f"{KEY}\n")
    assert "accessible: yes" in fresh.does("auth", "status")
    assert fresh.says("auth", "whoami")["user_urn"].startswith("tml:organization_user:")
    fresh.does("auth", "logout")
    assert fresh.run("auth", "status").returncode != 0
    assert "X-API-Key" in fresh.run("auth", "login", stdin="tml-bad key\n").stderr
