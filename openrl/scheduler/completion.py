"""The end of a request: its outcome into the journal, flushed, then into its future."""

from __future__ import annotations

import asyncio

from openrl.actors import Tasks
from openrl.futures import Futures
from openrl.journal import Journal
from openrl.scheduler.metering import Meter
from openrl.types import ModelId, OptimStepDone, Outcome, RequestId, Work


class Completion:
    def __init__(self, futures: Futures, journal: Journal, tasks: Tasks, meter: Meter) -> None:
        self._futures = futures
        self._journal = journal
        self._tasks = tasks
        self._meter = meter
        self._settling: set[asyncio.Task[None]] = set()

    def settle(self, work: Work, outcome: Outcome) -> None:
        """Once for each accepted request. The future resolves when the outcome is durable."""
        if isinstance(outcome, OptimStepDone):
            self._journal.version(ModelId(work.lane), outcome.version)
        self._journal.committed(work.request_id, outcome)
        self._meter.count(work, outcome)
        task = self._tasks.spawn(self._resolve(work.request_id, outcome), "settle")
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)

    async def idle(self) -> None:
        """Returns when everything settled so far has been resolved."""
        if self._settling:
            await asyncio.wait(self._settling)

    async def _resolve(self, request_id: RequestId, outcome: Outcome) -> None:
        await self._journal.flushed()
        self._futures.resolve(request_id, outcome)
