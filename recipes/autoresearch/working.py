"""Runs an experiment: a process in a fresh copy of the recipes, watched until it ends.

What holds it: it gets no path but that of its copy, and no environment; the node counts what it
uses, under a key of its own; its weights are judged by us. It runs as our user, though: code that
means harm belongs into a container.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiohttp

from recipes.autoresearch.experiment import Order
from recipes.autoresearch.study import ROOT, Sources
from recipes.kit.server import together

LOOK_SECONDS = 0.5
LOG_BYTES = 2_000


class Refused(Exception):
    """The experiment broke a rule. The message says which."""


class OverBudget(Exception):
    """It used more of the engine, or took longer, than it may."""


class Unmetered(Exception):
    """The node did not answer. Research without a count is no research: it ends, and can go on."""


class Failed(Exception):
    """It ended with an error. The message has the end of what it said."""


@dataclass(frozen=True)
class Limits:
    engine_seconds: float
    wall_seconds: float


@dataclass(frozen=True)
class Meter:
    """What the node has counted under one key."""

    url: str
    key: str

    async def engine_seconds(self) -> float:
        address = f"{self.url}/api/v1/openrl/statistics?limit=1"
        headers = {"X-API-Key": self.key}
        try:
            async with aiohttp.ClientSession(headers=headers) as http, http.get(address) as answer:
                answer.raise_for_status()
                said = await answer.json()
        except aiohttp.ClientError as error:
            raise Unmetered(f"the node does not say what was used: {error}") from error
        owners = said["accounts"].get("owner", {})
        return float(owners.get(said["owner"], {}).get("engine_seconds", 0.0))


@contextlib.asynccontextmanager
async def workspace(sources: Sources) -> AsyncIterator[Path]:
    """A copy of the recipes that is gone afterwards. Raises `Refused` when the recipes that it was
    copied from are not as they were; they are put back."""
    with tempfile.TemporaryDirectory(prefix="research-") as directory:
        sources.write(Path(directory))
        yield Path(directory)
    if changed := sources.changed(ROOT.parent):
        sources.write(ROOT.parent)
        raise Refused(f"changed {', '.join(map(str, changed))} outside its copy")


@dataclass
class Attempt:
    """An experiment that runs. `stopped` says why we ended it."""

    process: asyncio.subprocess.Process
    copy: Path
    file: Path
    sources: Sources
    rungs: int
    stopped: str = ""

    async def paths(self) -> AsyncIterator[str]:
        """Of each rung's weights, as they come. Raises `Refused`, `OverBudget` or `Failed`."""
        seen = 0
        async for path in _paths(self.process):
            seen += 1
            if seen > self.rungs:
                raise Refused(f"wants more than {self.rungs} judgements")
            yield path
        await self.process.wait()
        if self.stopped:
            raise OverBudget(self.stopped)
        if changed := self.sources.changed(self.copy, besides=self.file):
            raise Refused(f"changed {', '.join(map(str, changed))}")
        if self.process.returncode:
            raise Failed((self.copy / "log").read_text(errors="replace")[-LOG_BYTES:])

    async def watch(self, meter: Meter, limits: Limits) -> None:
        """Stops it when it has used too much."""
        began = time.monotonic()
        while self.process.returncode is None:
            await asyncio.sleep(LOOK_SECONDS)
            if await meter.engine_seconds() > limits.engine_seconds:
                self.stopped = f"used more than {limits.engine_seconds:g} engine-seconds"
            elif time.monotonic() - began > limits.wall_seconds:
                self.stopped = f"took longer than {limits.wall_seconds:g} s"
            if self.stopped:
                return _kill(self.process)
        return None


@contextlib.asynccontextmanager
async def attempt(
    order: Order, source: str, file: Path, sources: Sources, limits: Limits
) -> AsyncIterator[Attempt]:
    """The process is gone when this ends, however it does."""
    async with workspace(sources) as copy, together() as group:
        (copy / file).write_text(source)
        running = Attempt(await _start(copy, order), copy, file, sources, order.rungs)
        watcher = group.create_task(running.watch(Meter(order.url, order.key), limits))
        try:
            yield running
        finally:
            watcher.cancel()
            _kill(running.process)
            await running.process.wait()


async def _start(copy: Path, order: Order) -> asyncio.subprocess.Process:
    with (copy / "log").open("wb") as log:
        return await _spawn(copy, order, log)


async def _spawn(copy: Path, order: Order, log: IO[bytes]) -> asyncio.subprocess.Process:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "recipes.autoresearch.experiment",
        cwd=copy,
        env={**kept, "OMP_NUM_THREADS": "1", "TINKER_TELEMETRY": "0",
             "TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(copy)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        start_new_session=True,  # so that what it starts ends with it
    )  # fmt: skip
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):  # it may be dead by now, and says why by its end
        process.stdin.write(order.line())
        await process.stdin.drain()
    return process


async def _paths(process: asyncio.subprocess.Process) -> AsyncIterator[str]:
    """Raises `Refused` for a line that is too long to be one of ours."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:
            raise Refused("wrote a line of more than 64 KiB") from None
        if not line:
            return
        with contextlib.suppress(ValueError, TypeError, KeyError):
            path = json.loads(line)["path"]
            if isinstance(path, str):
                yield path


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
