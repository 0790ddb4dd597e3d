"""The commands as a newcomer meets them: what they say when something is missing or taken."""

from __future__ import annotations

import io
import json
import logging
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from support.node import MODEL, serving

from openrl import demo, preflight, telemetry
from openrl.commands import cli
from openrl.config import Config, EngineConfig, ModelSource
from openrl.engines.base import BaseModelInfo, Capacity, LoadProgress, WeightsKey
from openrl.engines.fake import FakeEngine
from openrl.errors import ServerError, UserError
from openrl.startup import StartupView

REPOSITORY = Path(__file__).parent.parent


def openrl(*arguments: str, env: dict[str, str | None] | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, env={"OMP_NUM_THREADS": None, **(env or {})})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").touch()
    return directory


def test_the_module_runs_as_the_command_does() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "openrl.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "serve" in ran.stdout


def test_show_says_where_each_setting_comes_from(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("[limits]\ndatums = 7\n")
    env = {"OPENRL_ENGINE__DTYPE": "float32"}
    shown = openrl("config", "show", "--config", str(file), "--port", "9", "--model", "a", env=env)
    assert shown.exit_code == 0
    assert '[models]  # --model\n"a" = {}\n' in shown.output
    assert "port = 9  # --port\n" in shown.output
    assert 'dtype = "float32"  # OPENRL_ENGINE__DTYPE\n' in shown.output
    assert f"datums = 7  # {file} [limits]\n" in shown.output
    assert "max_rows = 256  # default\n" in shown.output


def test_without_a_model_the_demo_is_served() -> None:
    shown = openrl("config", "show", env={"OPENRL_CONFIG": None, "OPENRL_MODELS": None})
    assert f'"{demo.NAME}" = "{demo.model_directory()}"' in shown.output
    assert "demo model" in shown.output


def test_check_accepts_what_can_be_served(model: Path, tmp_path: Path) -> None:
    data = tmp_path / "not" / "yet" / "there"
    checked = openrl("config", "check", "--model", f"a={model}", "--data", str(data))
    assert (checked.exit_code, checked.output) == (0, "the configuration is good\n")
    assert not data.parent.exists()  # a check touches nothing


@pytest.mark.parametrize("command", [("config", "check"), ("serve",)])
def test_every_problem_is_said_at_once(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "config.json").write_text("{}")
    refused = openrl(
        *command,
        *("--model", f"a={tmp_path / 'nowhere'}"),
        *("--model", f"b={tmp_path / 'empty'}"),
        *("--model", f"c={tmp_path / 'hollow'}"),
        *("--data", str(tmp_path / "file" / "data")),
    )
    assert refused.exit_code == 1
    assert f"model a: no directory {tmp_path / 'nowhere'}" in refused.output
    assert f"model b: {tmp_path / 'empty'} holds no config.json" in refused.output
    assert f"model c: {tmp_path / 'hollow'} holds no weights (*.safetensors)" in refused.output
    assert "choose another with --data" in refused.output
    assert "Traceback" not in refused.output


def test_an_engine_that_is_not_installed_is_said(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "site-packages" not in path])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    refused = openrl("config", "check", "--model", f"a={model}")
    assert refused.exit_code == 1
    assert 'the torch engine needs torch: pip install -e ".[server]"' in refused.output


def test_a_bad_flag_is_named() -> None:
    refused = openrl("config", "check", "--port", "http")
    assert refused.exit_code == 1
    assert "--port: server.port = 'http': expected a port" in refused.output


def test_a_taken_port_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match="in use") as taken:
            socket.create_server(("127.0.0.1", port))
    advice = preflight.explain(taken.value, Config(models=(), port=port))
    assert advice is not None
    assert f"127.0.0.1:{port} is taken" in advice
    assert "--port" in advice


def test_a_host_that_is_not_ours_says_what_to_do() -> None:
    with pytest.raises(OSError, match="assign") as away:
        socket.create_server(("192.0.2.1", 0))  # a documentation address
    assert "--host" in (preflight.explain(away.value, Config(models=(), host="192.0.2.1")) or "")


def test_a_disk_without_room_says_what_to_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nearly = shutil.disk_usage(model)._replace(free=5 << 20)
    monkeypatch.setattr("openrl.preflight.shutil.disk_usage", lambda _: nearly)
    refused = openrl("config", "check", "--model", f"a={model}")
    assert refused.exit_code == 1
    assert "5 MiB free; make room or choose another (--data)" in refused.output


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_disk_that_fills_up_says_what_to_do() -> None:
    with pytest.raises(OSError, match="space") as full, Path("/dev/full").open("wb", 0) as file:
        file.write(b"x")
    advice = preflight.explain(full.value, Config(models=(), data=Path("/data")))
    assert advice == "no space left for /data; choose another with --data"


@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
@pytest.mark.parametrize("python", ["", "false"])
@pytest.mark.parametrize("target", ["test", "docs"])
def test_a_python_that_will_not_do_is_said(python: str, target: str, tmp_path: Path) -> None:
    command = ["make", target, f"PYTHON={python}", f"VENV={tmp_path / 'new'}"]
    made = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert made.returncode != 0
    assert "OpenRL needs Python 3.11 or later" in made.stdout
    assert "make PYTHON=/path/to/python3" in made.stdout


def test_an_unknown_error_is_not_explained_away() -> None:
    assert preflight.explain(OSError(5, "Input/output error"), Config(models=())) is None


def test_without_the_server_extra_it_says_what_to_install() -> None:
    """`-S` hides site-packages, as in an environment where only the client was installed."""
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from openrl.cli import main; main()"
    )
    done = subprocess.run([sys.executable, "-S", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install -e ".[server]"' in done.stderr
    assert "pip install openrl" not in done.stderr
    assert "Traceback" not in done.stderr


# --- a server of its own --------------------------------------------------------------------

FAKE = ("serve", "--engine", "fake", "--model", "fake/tiny")


def serve(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from openrl.cli import main; main()", *FAKE, *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def lines_until(stream: TextIO, word: str) -> str:
    said = ""
    for line in stream:
        said += line
        if word in line:
            return said
    raise AssertionError(f"ended without {word!r}:\n{said}")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server with the fake engine, and what it said up to being ready."""
    process = serve("--port", "0", "--data", str(tmp_path / "data"), "--threads", "1")
    try:
        assert process.stderr is not None
        yield process, lines_until(process.stderr, "TINKER_BASE_URL")
    finally:
        process.kill()
        process.communicate()


def test_serve_says_what_it_serves_answers_and_drains(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    process, said = server
    assert f"data in {tmp_path / 'data'}" in said
    assert "fake engine: device auto, dtype auto, 1 threads, waiting passive" in said
    assert "serves fake/tiny" in said
    address = said.split("TINKER_BASE_URL=")[1].split()[0]
    with urllib.request.urlopen(f"{address}/readyz", timeout=10) as answer:
        assert answer.status == 200
    process.terminate()
    _, rest = process.communicate(timeout=20)
    assert process.returncode == 0, rest
    assert "Traceback" not in rest


def test_what_is_in_use_already_is_said(
    server: tuple[subprocess.Popen[str], str], tmp_path: Path
) -> None:
    _, said = server
    port = said.split("TINKER_BASE_URL=")[1].split()[0].rpartition(":")[2]
    taken = serve("--port", port, "--data", str(tmp_path / "other"))
    _, words = taken.communicate(timeout=20)
    assert taken.returncode == 1
    assert f"127.0.0.1:{port} is taken" in words
    assert "Traceback" not in words
    held = serve("--port", "0", "--data", str(tmp_path / "data"))
    _, words = held.communicate(timeout=20)
    assert held.returncode == 1
    assert "in use by another server" in words
    assert "Traceback" not in words


class Broken(FakeEngine):
    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        raise UserError("/models/x cannot be loaded: cut short")


async def test_a_model_that_cannot_be_loaded_is_said_without_a_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, engine=Broken([MODEL])) as running:
        with pytest.raises(ServerError, match="/models/x cannot be loaded: cut short"):
            await running.actor.loaded()
    (said,) = [each for each in caplog.records if "could not be loaded" in each.message]
    assert said.message.endswith("/models/x cannot be loaded: cut short")
    assert said.exc_info is None


# --- start-up -------------------------------------------------------------------------------

INFO = BaseModelInfo("a/b", WeightsKey("w"), 2048, 1000, (0,), "a/b", 64, "LlamaForCausalLM")


def start(config: Config, terminal: bool) -> str:
    stream = io.StringIO()
    ticks = iter([10.0, 12.5])
    view = StartupView(
        config, Console(file=stream, force_terminal=terminal, width=120), lambda: next(ticks)
    )
    view.progress(LoadProgress(WeightsKey("w"), "too early", 0.0))
    view.serving([INFO], "http://127.0.0.1:8000")
    for percent in range(101):
        view.progress(LoadProgress(WeightsKey("w"), "reading weights", percent / 100))
    view.ready("http://127.0.0.1:8000")
    view.close()
    return stream.getvalue()


CONFIG = Config(models=(ModelSource("a/b"),), data=Path("/data"), engine=EngineConfig(threads=2))


def test_plain_lines_where_there_is_no_terminal() -> None:
    assert start(CONFIG, terminal=False).splitlines() == [
        "OpenRL listens at http://127.0.0.1:8000, data in /data",
        "keys: any is let in, since only this machine can connect; see openrl keys",
        "torch engine: device auto, dtype auto, 2 threads, waiting passive",
        "serves a/b: LlamaForCausalLM, context 2048, vocabulary 1000, LoRA rank up to 64",
        "reading weights: 0%",
        "reading weights: 25%",
        "reading weights: 50%",
        "reading weights: 75%",
        "reading weights: 100%",
        "ready after 2.5 s; Ctrl-C drains and stops",
        "for the tinker SDK: TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-local",
    ]


def test_a_terminal_sees_a_table_and_a_bar() -> None:
    drawn = start(CONFIG, terminal=True)
    assert "LoRA rank up to" in drawn
    assert "LlamaForCausalLM" in drawn
    assert "100%" in drawn
    assert "ready after" in drawn


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("openrl")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])


@pytest.mark.usefixtures("restored_logging")
def test_json_logs_are_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.set_up_logging("info", "json")
    try:
        raise ValueError("no\ngood")
    except ValueError:
        logging.getLogger("openrl.part").exception("it %s", "broke")
    logging.getLogger("openrl.part").debug("not said")
    logging.getLogger("elsewhere").info("not said")
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"]) == (
        "error",
        "openrl.part",
        "it broke",
    )
    assert "ValueError: no\ngood" in record["exception"]


@pytest.mark.usefixtures("restored_logging")
def test_start_up_keeps_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.set_up_logging("info", "json")
    config = Config(models=CONFIG.models, log_format="json")
    assert start(config, terminal=True) == ""
    said = [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()]
    assert "reading weights: 50%" in said
