"""The programs of the README and the quickstart run as they are printed, but for the address
and the number of steps."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.node import CONFIG, serving

from openrl.config import ModelSource
from openrl.engines.fake import FakeEngine

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "openrl" / "demo" / "model"
VOCABULARY = 704
MODEL = "Qwen/Qwen3-0.6B"


def programs(page: str) -> list[str]:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [block for block in blocks if "import openrl" in block or "import tinker" in block]


PROGRAMS = [
    pytest.param(program, id=f"{page}-{number}")
    for page in ("README.md", "docs/quickstart.md")
    for number, program in enumerate(programs(page))
]


@pytest.fixture
async def url(tmp_path: Path) -> AsyncIterator[str]:
    config = replace(CONFIG, models=(ModelSource(MODEL),))
    engine = FakeEngine([MODEL], vocab_size=VOCABULARY)
    async with serving(tmp_path / "data", config, engine) as node:
        yield node.address


def test_both_clients_are_shown_on_both_pages() -> None:
    assert len(PROGRAMS) == 4


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
async def test_the_program_runs(program: str, url: str, tmp_path: Path) -> None:
    # A directory of the model's name, from which the tokenizer loads without a hub.
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).symlink_to(TOKENIZER)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-W",
        "error::FutureWarning",
        "-c",
        re.sub(r"range\(\d+\)", "range(2)", program.replace("http://127.0.0.1:8000", url)),
        cwd=tmp_path,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TINKER_TELEMETRY": "0",
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": "tml-local",
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    assert output
