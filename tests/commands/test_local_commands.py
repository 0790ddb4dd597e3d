"""The commands that need no server: plan, doctor, and the shell's completion."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from openrl import demo, planning
from openrl.commands import cli

QUIET = {"OPENRL_CONFIG": None, "OPENRL_MODELS": None, "OMP_NUM_THREADS": None, "COLUMNS": "200"}
QWEN3_8B = {
    "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, env=QUIET)


@pytest.fixture
def qwen(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    return str(tmp_path)


# --- plan -----------------------------------------------------------------------------------


def test_a_plan_is_that_of_the_planner(qwen: str) -> None:
    done = run(
        "plan", qwen, "--gpu", "h100", "--jobs", "8", "--rank", "16", "--json", "--rows", "8"
    )
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    wish = planning.Wish(jobs=8, rank=16, context=8192, rows=8)
    expected = planning.plan(planning.Shape.of(QWEN3_8B), planning.ACCELERATORS["H100"], wish)
    assert said["total"] == expected.total
    assert said["jobs_at_once"] == expected.jobs_at_once
    assert [part["name"] for part in said["parts"]] == [part.name for part in expected.parts]
    assert 15.0 < said["parts"][0]["size"] / 1e9 < 17.0, "8.2 B parameters in bf16"


def test_a_plan_is_read_by_people(qwen: str) -> None:
    shown = run("plan", qwen, "--rows", "8").stdout
    for words in ("base weights", "keys and values", "together", "decode", "jobs that fit"):
        assert words in shown


def test_what_does_not_fit_ends_with_1_and_advice(qwen: str) -> None:
    small = run("plan", qwen, "--gpu", "L4", "--jobs", "8")
    assert (small.exit_code, "lower --rows" in small.stderr) == (1, True)
    unknown = run("plan", qwen, "--gpu", "abacus")
    assert (unknown.exit_code, "H100" in unknown.stderr) == (1, True)
    nowhere = run("plan", str(Path(qwen) / "no-model"))
    assert nowhere.exit_code == 1
    assert "Traceback" not in nowhere.output
    assert run("plan", qwen, "--jobs", "0").exit_code == 2


# --- doctor ---------------------------------------------------------------------------------


def checked(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = run("doctor", "--json", *arguments)
    return done.exit_code, {check["name"]: check for check in json.loads(done.stdout)}


def test_a_healthy_machine(tmp_path: Path) -> None:
    status, checks = checked("--port", "0", "--data", str(tmp_path / "data"), "--device", "cpu")
    bad = [check for check in checks.values() if not check["good"]]
    assert (status, bad) == (0, [])
    expected = {"python", "torch", "device", "memory", "data directory", "disk", "journal", "port"}
    expected |= {"keys and TLS", "open files", f"model {demo.NAME}"}
    assert expected <= checks.keys()
    assert checks["device"]["found"] == "cpu"
    assert checks["numbers"]["found"].startswith("base model in float32 (bfloat16 products")
    assert not (tmp_path / "data").exists(), "it changes nothing"
    assert "✓ device: cpu" in run("doctor", "--port", "0", "--device", "cpu").stdout


def test_each_thing_that_is_missing_is_said_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "config.json").write_text("{}")
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = (
            *("--model", f"a={tmp_path / 'hollow'}", "--model", f"b={tmp_path / 'nowhere'}"),
            *("--data", str(tmp_path / "file"), "--port", str(taken.getsockname()[1])),
            *("--device", "cuda:77"),
        )
        status, checks = checked(*arguments)
        shown = run("doctor", *arguments)
    assert (status, shown.exit_code) == (1, 1)
    bad = {name for name, check in checks.items() if not check["good"]}
    assert {"model a", "model b", "data directory", "port", "device"} <= bad
    assert "holds no weights" in checks["model a"]["found"]
    assert "no directory" in checks["model b"]["found"]
    assert all(checks[name]["todo"] for name in bad)
    assert "✗ device: device 'cuda:77' cannot be used here" in shown.stdout
    assert "Choose another with --device" in shown.stdout


def test_without_torch_it_works_and_says_so(tmp_path: Path) -> None:
    """In a process whose torch cannot be found."""
    script = (
        "import importlib.metadata as m, importlib.util as u, sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torch': raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, No())\n"
        "real_spec, real_version = u.find_spec, m.version\n"
        "u.find_spec = lambda n, *a: None if n == 'torch' else real_spec(n, *a)\n"
        "def version(name):\n"
        "    if name == 'torch': raise m.PackageNotFoundError(name)\n"
        "    return real_version(name)\n"
        "m.version = version\n"
        "from openrl.cli import main; main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "doctor", "--port", "0", "--data", str(tmp_path / "d")],
        capture_output=True, text=True, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert '✗ torch: not installed. Pip install -e ".[server]"' in done.stdout
    assert "✗ device: unknown without torch. Install torch first" in done.stdout
    assert "✓ disk" in done.stdout


def test_the_shell_completes_commands() -> None:
    environment = {"PATH": os.environ["PATH"], "_OPENRL_COMPLETE": "bash_complete"}
    environment |= {"COMP_WORDS": "openrl checkpoints ex", "COMP_CWORD": "2"}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("openrl"))],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == "plain,export"


# --- demo -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "flag"), [("demo", "--jobs"), ("research", "--parallel")])
def test_scripts_of_the_checkout_are_run_with_their_own_flags(command: str, flag: str) -> None:
    """In a process: the command becomes the script. From elsewhere: it finds the checkout."""
    done = subprocess.run(
        [sys.executable, "-m", "openrl.cli", command, "--help"],
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert done.returncode == 0, done.stderr
    assert flag in done.stdout
