"""A node whose engine is gone fails what it had accepted, says why, and ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TextIO

import pytest

import openrl
from openrl.errors import OpenRLError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SERVE = (sys.executable, "-c", "from openrl.cli import main; main()", "serve")


def address_in(log: TextIO) -> str:
    said = ""
    for line in log:
        said += line
        if found := re.search(r"TINKER_BASE_URL=(\S+)", line):
            return found[1]
    raise AssertionError(f"it never became ready:\n{said}")


def children(pid: int) -> list[int]:
    lists = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for child in " ".join(lists).split()]


async def train_until_the_engine_dies(address: str, server: int) -> None:
    async with openrl.connect(address, "tml-key", patience=1) as client:
        model = await client.create_model("openrl/sql-demo", rank=2)
        (engine,) = children(server)
        os.kill(engine, signal.SIGKILL)
        await model.save_state("lost")


@pytest.mark.slow
def test_a_node_that_loses_its_engine_ends(tmp_path: Path) -> None:
    arguments = ("--port", "0", "--data", str(tmp_path), "--threads", "1")
    process = subprocess.Popen([*SERVE, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = address_in(process.stderr)
        with pytest.raises((OpenRLError, OSError)):
            asyncio.run(train_until_the_engine_dies(address, process.pid))
        _, rest = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1
    assert "the engine's process was ended by SIGKILL" in rest
    assert "Traceback" not in rest
