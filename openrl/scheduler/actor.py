"""The actor: events come in, the pure core decides, one `match` obeys.

All engine work happens on the engine's own thread, so the event loop never blocks. The actor
keeps the payloads (`backlog`) which the core does not see. When the engine dies or cannot load,
or the core itself breaks, nothing runs any more and new requests are refused. What is journalled
waits for the next process then; everything else fails with the cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import NoReturn

from openrl.actors import first_of
from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.config import JournalConfig, SchedulerConfig
from openrl.engines.base import Engine, LoadProgress
from openrl.errors import Cancelled as CancelledError
from openrl.errors import EngineDied, OpenRLError, ServerError, Unavailable, in_words
from openrl.futures import Futures
from openrl.journal import NOTHING, Journal, Recovered
from openrl.scheduler.closing import ended_by
from openrl.scheduler.core.events import (
    Cancelled,
    Decision,
    EngineReady,
    Event,
    LaneClosed,
    Refuse,
    Resolve,
    SeqConsumed,
    Start,
    StartControl,
    StartDecode,
    StartOptim,
    StartTrain,
    Submitted,
    Tick,
    WakeAt,
)
from openrl.scheduler.inbox import Inbox
from openrl.scheduler.outcomes import outcome_of
from openrl.scheduler.parts import Parts
from openrl.scheduler.pending import Pending, unused_tokens
from openrl.scheduler.recovery.replay import Replay
from openrl.scheduler.recovery.revival import revive
from openrl.types import Failed, ModelId, Outcome, RequestId, Sample, SessionId, Work

EVENTS_AT_ONCE = 32
_LAST_SECONDS = 3.0
"""For a pass that runs, and for a disk that takes nothing, while the server ends."""

AS_USUAL = JournalConfig()

log = logging.getLogger("openrl")


class EngineActor:
    def __init__(
        self,
        engine: Engine,
        config: SchedulerConfig,
        catalogue: Catalogue,
        store: CheckpointStore,
        futures: Futures,
        journal: Journal,
        clock: Callable[[], float],
        now: Callable[[], float],
        on_progress: Callable[[LoadProgress], None] = lambda _: None,
        snapshots: Path | None = None,
        securing: JournalConfig = AS_USUAL,
    ) -> None:
        """`clock` is monotonic, `now` gives Unix seconds; `on_progress` is called on the engine's
        thread while weights load. `snapshots` are written below that directory, as often as
        `securing` says; None writes none."""
        given = (engine, config, catalogue, store, futures, journal, clock, now, on_progress)
        parts = self._parts = Parts(*given, snapshots, securing, self._task_died)
        self.models, self.backlog = parts.models, parts.backlog
        self.entitlements = parts.entitlements
        self.meter, self.enquiries, self.leases = parts.meter, parts.enquiries, parts.leases
        self._engine, self._thread, self._tasks = engine, parts.thread, parts.tasks
        self._state, self._allowances = parts.state, parts.allowances
        self._loading, self._runner = parts.loading, parts.runner
        self._clock, self._inbox = clock, Inbox(clock)
        self._pass: asyncio.Task[None] | None = None
        self._ending = False

    # --- life ---

    async def start(self, recovered: Recovered = NOTHING) -> None:
        """Returns when the base models are known, and what an earlier process has left is queued
        again. Weights load behind the open door, and then models become what they were. Raises
        what the engine's `describe` raises: a `UserError` for files that are not there."""
        self.models.serve(await self._thread.run(self._engine.describe))
        replay = revive(self._parts, recovered, self.post, self.submit)
        self._tasks.spawn(self._loop(), "scheduler")
        self._tasks.spawn(self._load(replay), "load")
        self._tasks.spawn(self._parts.journal.lost(), "journal")

    async def loaded(self) -> None:
        """Returns when the base models are there. Raises what kept them from being."""
        await self._loading.over.wait()
        if self.failure is not None:
            raise self.failure

    async def lost(self) -> NoReturn:
        """Raises why nothing runs here any more, when it comes to that."""
        await self._loading.broken.wait()
        assert self.failure is not None
        raise self.failure

    async def drain(self, seconds: float) -> int:
        """Waits for what is accepted, then for the pass that runs, and writes snapshots. Returns
        how much is left."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await first_of(self.backlog.empty(), self._loading.broken.wait())
        self._ending = True
        if self._parts.keeps:
            with suppress(TimeoutError, EngineDied):
                async with asyncio.timeout(_LAST_SECONDS):
                    await self._stand_still()
                await self._take_snapshots()
        left = len(self.backlog)
        self._stop(Unavailable("the server has shut down", retry_after=5.0))
        with suppress(TimeoutError):  # of a disk that takes nothing
            async with asyncio.timeout(_LAST_SECONDS):
                await self._parts.completion.idle()
        return left

    async def _stand_still(self) -> None:
        """What the engine is at counts still."""
        if self._pass is not None:
            await asyncio.wait([self._pass])
        await first_of(self._inbox.empty(), self._loading.broken.wait())

    async def _take_snapshots(self) -> None:
        if self.ready:
            await self._runner.securing.all_in_debt()
            self._parts.snapshots.record(self.backlog)

    async def close(self) -> None:
        """Ends the tasks and, after the pass that is running, the engine."""
        await self._tasks.close()
        await self._thread.run(self._engine.close)
        self._thread.close()

    # --- for admission ---

    def post(self, event: Event) -> None:
        self._inbox.post(event)

    def submit(self, pending: Pending) -> None:
        self.backlog.add(pending)
        item = pending.item(self._clock())
        if self._allowances.admit(item, self._clock()):
            self.post(Submitted(item))
        else:
            self.post(Tick())  # so that the loop learns when it will be due

    def cancel(self, request_id: RequestId) -> None:
        """Does nothing to what has been answered."""
        pending = self.backlog.find(request_id)
        if pending is None:
            return
        item = self._allowances.withdraw(pending.work.owner, request_id)
        if item is None:
            self.post(Cancelled(request_id))
            return
        self._answer(pending, Failed(CancelledError("cancelled by its caller")))
        if item.sample is None:
            self.post(SeqConsumed(item.lane, item.seq_id))

    def when_done(self, session_id: SessionId, then: Callable[[], None]) -> None:
        """Calls `then` as soon as nothing of the session waits or runs."""
        self._tasks.spawn(self._when_done(session_id, then), "end of a session")

    async def _when_done(self, session_id: SessionId, then: Callable[[], None]) -> None:
        while self.backlog.busy(session_id):
            await self.backlog.stirred()
        then()

    def unpin_all(self, model_id: ModelId) -> None:
        """Drops the weights that the model's ephemeral samplers read."""
        self._runner.unpin_all(model_id)

    def settle(self, work: Work, outcome: Outcome) -> None:
        """Answers a request that never got into the backlog."""
        self._parts.completion.settle(work, outcome)

    # --- what people ask ---

    @property
    def failure(self) -> OpenRLError | None:
        """Why nothing runs here any more."""
        return self._loading.failure

    @property
    def ready(self) -> bool:
        return self._loading.ready and self.failure is None

    # --- the loop ---

    async def _loop(self) -> None:
        """What waits in the inbox is taken without a pause: hence one after some events, so that
        thousands of submits keep no heartbeat waiting."""
        for number in count(1):
            event = await self._inbox.next(self._allowances.wake_at())
            self._handle(event or Tick())
            if event is not None:
                self._inbox.handled()
            if number % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _handle(self, event: Event) -> None:
        """Nothing happens any more once the engine is lost."""
        if self.failure is None:
            now = self._clock()
            for each in (event, *map(Submitted, self._allowances.due(now))):
                for decision in self._state.handle(each, now):
                    self._obey(decision)

    def _obey(self, decision: Decision) -> None:
        match decision:
            case StartTrain() | StartOptim() | StartControl() | StartDecode():
                if not self._ending:
                    self._pass = self._tasks.spawn(self._run(decision), "pass")
            case Resolve(request_id):
                if pending := self.backlog.find(request_id):
                    self._answer(pending, outcome_of(pending))
            case Refuse(request_id, error):
                if pending := self.backlog.find(request_id):
                    self._answer(pending, Failed(error))
            case WakeAt(when):
                self._inbox.wake_at = when

    async def _run(self, start: Start) -> None:
        if self.failure is not None:
            return  # since it was decided everything has been answered
        try:
            finished = await self._runner.run(start)
        except EngineDied as error:
            log.error("the engine is gone, and nothing runs until a restart: %s", error.message)
            self._stop(error)
            return
        if isinstance(start, StartControl) and (pending := self.backlog.find(start.request)):
            # Before `Finished`, lest the next operation of a model that failed begins.
            self._close_model_after(pending.work, outcome_of(pending))
        self.post(finished)

    def _answer(self, pending: Pending, outcome: Outcome) -> None:
        self.backlog.remove(pending.work.request_id)
        self._allowances.refund(pending.work.owner, unused_tokens(pending, outcome))
        self._close_model_after(pending.work, outcome)
        self._parts.completion.settle(pending.work, outcome)

    def _close_model_after(self, work: Work, outcome: Outcome) -> None:
        if isinstance(work.operation, Sample) or self.models.closed(work.lane):
            return
        if (cause := ended_by(work, outcome)) is not None:
            self.models.close(work.lane, cause)
            self.post(LaneClosed(work.lane, cause))

    # --- the engine ---

    async def _load(self, replay: Replay) -> None:
        failed = "the base models could not be loaded"
        try:
            capacity = await self._thread.run(partial(self._engine.load, self._loading.progressed))
            failed = "the models of an earlier process could not be made again"
            await replay.run()
        except Exception as error:  # whatever it is, everyone who waits is told
            known = isinstance(error, OpenRLError)
            log.error("%s: %s", failed, in_words(error), exc_info=None if known else error)
            self._stop(ServerError(f"{failed}: {in_words(error)}"))
            return
        self._loading.succeed()
        self.post(EngineReady(capacity))

    def _task_died(self, name: str, error: BaseException) -> None:
        """A defect of ours, or the journal is lost. The core may be broken, so nobody asks it."""
        self._stop(ServerError(f"{name} stopped: {in_words(error)}"))

    def _stop(self, error: OpenRLError) -> None:
        """Nothing runs any more. What is journalled goes on with the next process, and so do
        samples, which their clients send again when they are told to."""
        self._loading.fail(error)
        for pending in self.backlog:
            if not self._parts.keeps:
                self._answer(pending, Failed(error))
            elif isinstance(pending.work.operation, Sample):
                self._answer(pending, Failed(Unavailable(error.message, retry_after=5.0)))
        self._tasks.spawn(self._parts.completion.release(), "release")
