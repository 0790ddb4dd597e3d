"""The recipes as a user runs them, on the demo model and a real server, cut to a few steps."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from recipes import rl_openrl_client
from recipes.kit.server import local_server

pytestmark = pytest.mark.slow


def recipe(name, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", f"recipes.{name}", *map(str, arguments)],
        env={**os.environ, "TINKER_TELEMETRY": "0", "TINKER_API_KEY": "tml-test", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_demo_starts_a_server_trains_and_leaves_its_files(tmp_path):
    ran = recipe("demo", "--steps", 2, "--jobs", 2, "--output", tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert sorted((each["learning_rate"], each["step"]) for each in steps) == [
        (0.002, 0), (0.002, 1), (0.004, 0), (0.004, 1),
    ]  # fmt: skip
    # The same weights, questions and seeds before the first update.
    assert len({each["reward"] for each in steps if each["step"] == 0}) == 1
    assert 10_000 < (tmp_path / "reward.png").stat().st_size < 100_000
    assert (tmp_path / "samples.md").read_text().count("-- after") == 24


def test_the_demo_ends_on_sigterm_with_its_server(tmp_path):
    """Behind a shell that ignores SIGINT for it, as `make demo &` in a script does."""
    command = [sys.executable, "-m", "recipes.demo", "--steps", "99999", "--output", tmp_path]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as demo:
        said = []
        for line in demo.stdout:
            said.append(line)
            if "step 1/" in line:
                demo.terminate()
        assert demo.wait() == 130, said
    assert said[0].startswith("importing")
    assert "stopped\n" in said
    url = re.search(r"http://127\S+\d", "".join(said))[0]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/healthz", timeout=5)
    assert (tmp_path / "reward.png").exists()


def test_the_demo_says_when_there_is_no_server(tmp_path):
    ran = recipe("demo", "--base-url", "http://127.0.0.1:9", "--output", tmp_path)
    assert ran.returncode == 1
    assert "no server answers at http://127.0.0.1:9" in ran.stdout


async def test_the_small_loops_run(tmp_path, capsys):
    async with local_server(tmp_path) as server:
        await rl_openrl_client.main(server.url, steps=2)
        assert "step 2: reward 0." in capsys.readouterr().out
        ran = await asyncio.to_thread(recipe, "sft_tinker", TINKER_BASE_URL=server.url)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\S+) a token", ran.stdout)]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert re.search(r"saved tinker://\S+/weights/sft", ran.stdout)
