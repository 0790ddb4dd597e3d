"""The end of a request: its outcome into the journal, flushed, then into its future.

Samples are not journalled, and their answers wait for no disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from openrl.actors import Tasks
from openrl.catalogue import Flushing
from openrl.errors import Unavailable
from openrl.futures import Futures
from openrl.journal import Journal
from openrl.scheduler.closing import ended_by
from openrl.scheduler.metering import Meter
from openrl.scheduler.snapshots import Snapshots
from openrl.types import ModelId, Outcome, RequestId, Sample, Work

log = logging.getLogger("openrl")

AT_ONCE = 8
"""A decode slice may end hundreds of requests, and each wakes a poll that encodes and writes:
after this many the event loop looks at everything else, so that a heartbeat never waits for all."""


class Completion:
    def __init__(
        self,
        futures: Futures,
        journal: Journal,
        rows: Flushing,
        tasks: Tasks,
        meter: Meter,
        snapshots: Snapshots,
    ) -> None:
        """`rows` are the catalogue's, which an answer may speak of."""
        self._futures = futures
        self._journal = journal
        self._rows = rows
        self._tasks = tasks
        self._meter = meter
        self._snapshots = snapshots
        self._written: deque[tuple[RequestId, Outcome]] = deque()  # not durable yet
        self._durable: deque[tuple[RequestId, Outcome]] = deque()  # not handed out yet
        self._running: dict[str, asyncio.Task[None]] = {}

    def settle(self, work: Work, outcome: Outcome) -> None:
        """Once for each accepted request. The future resolves when the outcome is durable."""
        self._meter.count(work, outcome)
        if isinstance(work.operation, Sample):
            self._durable.append((work.request_id, outcome))
            self._see_to("hand out", self._hand_out)
        else:
            self._record(work, outcome)
            self._written.append((work.request_id, outcome))
            self._see_to("settle", self._flush)

    def _record(self, work: Work, outcome: Outcome) -> None:
        self._journal.committed(work, outcome)
        if ended_by(work, outcome) is not None:
            model_id = ModelId(work.lane)
            self._journal.ended(model_id)
            self._snapshots.forget(model_id)

    async def idle(self) -> None:
        """Returns when everything settled so far has been resolved."""
        while self._running:
            await asyncio.wait(self._running.values())

    async def release(self) -> None:
        """What has been settled is handed out; then nobody waits for the rest any more."""
        await self.idle()
        self._futures.release()

    def _see_to(self, name: str, job: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._running:
            self._running[name] = self._tasks.spawn(job(), name)

    async def _flush(self) -> None:
        """Ends when nothing is left; what is settled meanwhile has a flush of its own. What a
        journal that has failed does not take is for the next process."""
        try:
            while self._written:
                count = len(self._written)
                if self._rows.behind:
                    await self._rows.flushed()
                await self._journal.flushed()
                for _ in range(count):
                    self._durable.append(self._written.popleft())
                self._see_to("hand out", self._hand_out)
        except Unavailable as error:
            log.error("%d answers are not given: %s", len(self._written), error.message)
        finally:
            del self._running["settle"]

    async def _hand_out(self) -> None:
        handed_out = 0
        try:
            while self._durable:
                self._futures.resolve(*self._durable.popleft())
                handed_out += 1
                if handed_out % AT_ONCE == 0:
                    await asyncio.sleep(0)
        finally:
            del self._running["hand out"]
