"""The actor: events come in, the pure core decides, one `match` obeys.

All engine work happens on the engine's own thread, so the event loop never blocks. The actor
keeps the payloads (`backlog`) which the core does not see. When the engine dies or cannot load,
or the core itself breaks, every request fails with the cause and new ones are refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import NoReturn

from openrl.actors import EngineThread, Tasks
from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.config import SchedulerConfig
from openrl.engines.base import Engine, LoadProgress
from openrl.errors import Cancelled as CancelledError
from openrl.errors import EngineDied, OpenRLError, ServerError, Unavailable
from openrl.futures import Futures
from openrl.journal import Journal
from openrl.scheduler.allowance import Allowances
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.closing import ended_by
from openrl.scheduler.completion import Completion
from openrl.scheduler.controls import Controls
from openrl.scheduler.core.events import (
    Cancelled,
    Decision,
    EngineLost,
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
from openrl.scheduler.core.state import State
from openrl.scheduler.enquiries import Enquiries
from openrl.scheduler.loading import Loading
from openrl.scheduler.metering import Meter
from openrl.scheduler.models import Models
from openrl.scheduler.outcomes import outcome_of
from openrl.scheduler.pending import Pending, unused_tokens
from openrl.scheduler.pins import Pins
from openrl.scheduler.runner import Runner
from openrl.types import (
    Failed,
    ModelId,
    Outcome,
    RequestId,
    Sample,
    SessionId,
    Work,
)

EVENTS_AT_ONCE = 32

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
    ) -> None:
        """`clock` is monotonic, `now` gives Unix seconds; `on_progress` is called on the engine's
        thread while weights load."""
        self.models = Models(Pins(config.pinned_versions, config.pinned_bytes))
        self.backlog = Backlog(clock)
        self._engine = engine
        self._thread = EngineThread()
        self._tasks = Tasks(self._task_died)
        self.meter = Meter(catalogue.usage, self.models, now)
        self._completion = Completion(futures, journal, self._tasks, self.meter)
        self._state = State(config)
        self._loading = Loading(on_progress)
        self._allowances = Allowances(config.tokens_per_minute)
        self.enquiries = Enquiries(
            self._state, self._allowances, self._loading, self.models, self.backlog, clock
        )
        self._clock = clock
        self._inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._wake_at: float | None = None
        controls = Controls(self.models, catalogue, store, now)
        self._runner = Runner(engine, self._thread, self.models, self.backlog, controls, clock)

    # --- life ---

    async def start(self) -> None:
        """Returns when the base models are known; their weights load behind the open door.
        Raises what the engine's `describe` raises: a `UserError` for files that are not there."""
        self.models.serve(await self._thread.run(self._engine.describe))
        self._tasks.spawn(self._loop(), "scheduler")
        self._tasks.spawn(self._load(), "load")

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
        """Waits for what is accepted; then refuses what is left, and returns how much it was."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.backlog.empty()
        left = len(self.backlog)
        if left:
            self._lose(Unavailable("the server has shut down", retry_after=5.0))
        await self._completion.idle()
        return left

    async def close(self) -> None:
        """Ends the tasks and, after the pass that is running, the engine."""
        await self._tasks.close()
        await self._thread.run(self._engine.close)
        self._thread.close()

    # --- for admission ---

    def post(self, event: Event) -> None:
        self._inbox.put_nowait(event)

    def submit(self, pending: Pending) -> None:
        self.backlog.add(pending)
        item = pending.item()
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
        self._completion.settle(work, outcome)

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
            self._handle(await self._next_event())
            if number % EVENTS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _handle(self, event: Event) -> None:
        """Nothing happens any more once the engine is lost."""
        if self.failure is None:
            now = self._clock()
            for each in (event, *map(Submitted, self._allowances.due(now))):
                for decision in self._state.handle(each, now):
                    self._obey(decision)

    async def _next_event(self) -> Event:
        if not self._inbox.empty():
            return self._inbox.get_nowait()
        try:
            async with asyncio.timeout(self._seconds_to_wake()):
                return await self._inbox.get()
        except TimeoutError:
            self._wake_at = None
            return Tick()

    def _seconds_to_wake(self) -> float | None:
        times = [t for t in (self._wake_at, self._allowances.wake_at()) if t is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def _obey(self, decision: Decision) -> None:
        match decision:
            case StartTrain() | StartOptim() | StartControl() | StartDecode():
                self._tasks.spawn(self._run(decision), "pass")
            case Resolve(request_id):
                if pending := self.backlog.find(request_id):
                    self._answer(pending, outcome_of(pending))
            case Refuse(request_id, error):
                if pending := self.backlog.find(request_id):
                    self._answer(pending, Failed(error))
            case WakeAt(when):
                self._wake_at = when

    async def _run(self, start: Start) -> None:
        if self.failure is not None:
            return  # since it was decided everything has been answered
        try:
            finished = await self._runner.run(start)
        except EngineDied as error:
            log.error("the engine is gone, and nothing runs until a restart: %s", error.message)
            self._lose(error)
            return
        if isinstance(start, StartControl) and (pending := self.backlog.find(start.request)):
            # Before `Finished`, lest the next operation of a model that failed begins.
            self._close_model_after(pending.work, outcome_of(pending))
        self.post(finished)

    def _answer(self, pending: Pending, outcome: Outcome) -> None:
        self.backlog.remove(pending.work.request_id)
        self._allowances.refund(pending.work.owner, unused_tokens(pending, outcome))
        self._close_model_after(pending.work, outcome)
        self._completion.settle(pending.work, outcome)

    def _close_model_after(self, work: Work, outcome: Outcome) -> None:
        if isinstance(work.operation, Sample) or self.models.closed(work.lane):
            return
        if (cause := ended_by(work, outcome)) is not None:
            self.models.close(work.lane, cause)
            self.post(LaneClosed(work.lane, cause))

    # --- the engine ---

    async def _load(self) -> None:
        try:
            load = partial(self._engine.load, self._loading.progressed)
            capacity = await self._thread.run(load)
        except Exception as error:  # whatever it is, everyone who waits is told
            ours = isinstance(error, OpenRLError)
            cause = str(error) if ours else f"{type(error).__name__}: {error}"
            log.error("the engine could not load: %s", cause, exc_info=None if ours else error)
            self._lose(ServerError(f"the base models could not be loaded: {cause}"))
            return
        self._loading.succeed()
        self.post(EngineReady(capacity))

    def _lose(self, error: OpenRLError) -> None:
        """The core refuses what has started; what waits would wait for ever."""
        self._handle(EngineLost(error))
        self._stop(error)

    def _task_died(self, name: str, error: BaseException) -> None:
        """A defect of ours. The core may be broken too, so nobody asks it."""
        self._stop(ServerError(f"{name} stopped: {type(error).__name__}: {error}"))

    def _stop(self, error: OpenRLError) -> None:
        self._loading.fail(error)
        for pending in self.backlog:
            self._answer(pending, Failed(error))
