"""An `openrl serve` of our own, for as long as a recipe runs."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

T = TypeVar("T")

READY_SECONDS = 120.0
STOP_SECONDS = 15.0
LOG_LINES = 20

# The module of the command, in this very interpreter: no guess about PATH.
OPENRL = (sys.executable, "-c", "from openrl.cli import main; main()")


class ServerDied(Exception):
    """The server ended by itself. The message has its exit status and the end of its log."""


@dataclass(frozen=True)
class LocalServer:
    url: str
    process: asyncio.subprocess.Process
    log: Path

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, and raises `ServerDied` at once when the server ends before it."""
        async with together() as group:
            watcher = group.create_task(self._watch())
            result = await work
            watcher.cancel()
        return result

    async def _watch(self) -> None:
        status = await self.process.wait()
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:]
        raise ServerDied(
            "\n".join((f"the server ended with status {status}; the end of {self.log}:", *lines))
        )

    async def ready(self) -> None:
        """Until the door is open. Requests wait for the weights, so nobody else has to."""
        async with aiohttp.ClientSession() as http:
            while True:
                with contextlib.suppress(aiohttp.ClientConnectionError, TimeoutError):
                    timeout = aiohttp.ClientTimeout(total=2)
                    async with http.get(f"{self.url}/healthz", timeout=timeout) as answer:
                        if answer.ok:
                            return
                await asyncio.sleep(0.1)

    async def stop(self) -> None:
        if self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


@asynccontextmanager
async def local_server(directory: Path, *arguments: str) -> AsyncIterator[LocalServer]:
    """Serves on a free port of this machine, with its data and `server.log` in `directory`, which
    exists. Raises `ServerDied`, or `TimeoutError` when the door does not open."""
    port = _free_port()
    log = directory / "server.log"
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *OPENRL, "serve", "--port", str(port), "--data", str(directory / "data"), *arguments,
            stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we stop it in good order
        )  # fmt: skip
    server = LocalServer(f"http://127.0.0.1:{port}", process, log)
    try:
        async with asyncio.timeout(READY_SECONDS):
            await server.during(server.ready())
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def together() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group that raises the first thing that went wrong, and not a group of things."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


def stop_at_sigterm() -> None:
    """As Ctrl-C does. Not by way of SIGINT: that is ignored where a shell runs us behind it."""
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if not task.cancelling():  # a second signal is not to cut the server's end short
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
