"""The asyncio shell's few tools: supervised tasks, and the one thread that owns an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

log = logging.getLogger("openrl")


class Tasks:
    """Keeps a reference to every background task and reports the ones that die.

    `on_death` is called with the exception of a task that ended by one.
    """

    def __init__(self, on_death: Callable[[str, BaseException], None]) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_death = on_death

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("task %s died", task.get_name(), exc_info=error)
            self._on_death(task.get_name(), error)

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Returns when one of them has; the others are cancelled. Raises what that one raised."""
    tasks = [asyncio.get_running_loop().create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def every(seconds: float, round_: Callable[[], Coroutine[Any, Any, object]]) -> None:
    """Runs until cancelled. A round that fails is logged, and the next one comes all the same."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await round_()
        except Exception:
            # What is tidied up now and then must not end with the first surprise.
            log.exception("a round of %s failed", getattr(round_, "__name__", "housekeeping"))


class EngineThread:
    """Runs blocking calls one at a time on a thread of its own."""

    def __init__(self, name: str = "engine") -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        self._pool.shutdown(wait=True)
