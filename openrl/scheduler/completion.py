"""The end of a request: its outcome into the journal, flushed, then into its future."""

from __future__ import annotations

import asyncio
from collections import deque

from openrl.actors import Tasks
from openrl.futures import Futures
from openrl.journal import Journal
from openrl.scheduler.metering import Meter
from openrl.types import Outcome, RequestId, Work

AT_ONCE = 8
"""A decode slice may end hundreds of requests, and each wakes a poll that encodes and writes:
after this many the event loop looks at everything else, so that a heartbeat never waits for all."""


class Completion:
    def __init__(self, futures: Futures, journal: Journal, tasks: Tasks, meter: Meter) -> None:
        self._futures = futures
        self._journal = journal
        self._tasks = tasks
        self._meter = meter
        self._settled: deque[tuple[RequestId, Outcome]] = deque()
        self._resolving: asyncio.Task[None] | None = None

    def settle(self, work: Work, outcome: Outcome) -> None:
        """Once for each accepted request. The future resolves when the outcome is durable."""
        self._journal.committed(work, outcome)
        self._meter.count(work, outcome)
        self._settled.append((work.request_id, outcome))
        if self._resolving is None:
            self._resolving = self._tasks.spawn(self._resolve(), "settle")

    async def idle(self) -> None:
        """Returns when everything settled so far has been resolved."""
        while self._resolving is not None:
            await asyncio.wait([self._resolving])

    async def _resolve(self) -> None:
        """Ends when nothing is left; what is settled meanwhile has a flush of its own."""
        try:
            while self._settled:
                durable = len(self._settled)
                await self._journal.flushed()
                await self._hand_out(durable)
        finally:
            self._resolving = None

    async def _hand_out(self, count: int) -> None:
        for number in range(1, count + 1):
            self._futures.resolve(*self._settled.popleft())
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
