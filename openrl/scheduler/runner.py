"""Runs one pass on the engine's thread and says how it went.

When an engine raises, each model's part of the pass is run alone: since numbers don't depend on
company, nobody but the culprit notices. Of a decode slice every row fails, and nobody else's. Only
`EngineDied` gets through. Snapshots follow the pass after which they are due.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from openrl.actors import EngineThread
from openrl.engines.base import (
    Capacity,
    Control,
    ControlPass,
    ControlReport,
    CreateAdapter,
    DecodePass,
    DecodeReport,
    DropAdapter,
    DropVersion,
    Engine,
    OptimPass,
    OptimReport,
    Pass,
    PinVersion,
    RowId,
    RowStart,
    TrainPass,
    TrainReport,
    WeightsKey,
)
from openrl.errors import EngineDied, OpenRLError, blamed_on_engine
from openrl.journal import Journal
from openrl.scheduler import dispatch
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.controls import Controls, Found, Order
from openrl.scheduler.core.events import (
    Finished,
    PartEnded,
    Start,
    StartControl,
    StartDecode,
    StartOptim,
    StartTrain,
)
from openrl.scheduler.models import Models
from openrl.scheduler.pins import Pin
from openrl.scheduler.securing import Ran, Securing
from openrl.scheduler.snapshots import Snapshots
from openrl.types import Failed, ModelId, OwnerId, RequestId, Result, VersionId

log = logging.getLogger("openrl")


class Runner:
    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        models: Models,
        backlog: Backlog,
        controls: Controls,
        journal: Journal,
        snapshots: Snapshots,
        clock: Callable[[], float],
        failure_of: Callable[[WeightsKey], OpenRLError | None] = lambda _: None,
    ) -> None:
        """`failure_of` says why weights are not there: the engine gets no pass for them."""
        self._engine = engine
        self._thread = thread
        self._models = models
        self._backlog = backlog
        self._controls = controls
        self._journal = journal
        self._snapshots = snapshots
        self.securing = Securing(self.execute, snapshots, models)
        self._clock = clock
        self._failure_of = failure_of
        self._unpinned: list[tuple[WeightsKey, VersionId]] = []  # still in the engine
        # Rows in the engine's batches, and those that a failed pass may have left there.
        self._running: dict[WeightsKey, set[RowId]] = defaultdict(set)
        self._orphans: dict[WeightsKey, set[RowId]] = defaultdict(set)

    async def run(self, start: Start) -> Finished:
        self._snapshots.record(self._backlog)
        self._note_started(start)
        match start:
            case StartTrain():
                return await self._train(start)
            case StartOptim():
                return await self._optim(start)
            case StartControl():
                return await self._control(start)
            case StartDecode():
                return await self._decode(start)

    def _note_started(self, start: Start) -> None:
        for pending in map(self._backlog.find, requests_of(start)):
            if pending is not None and not pending.started:
                pending.started = True
                self._journal.started(pending.work)

    async def _train(self, start: StartTrain) -> Finished:
        work = dispatch.train_pass(start, self._backlog)
        ran = await self.execute(work)
        assert isinstance(ran.report, TrainReport)
        await self.securing.snapshot(self._snapshots.trained(work, ran.report, ran.seconds))
        parts = dispatch.train_parts(start, ran.report, self._backlog)
        return Finished(start.pass_id, ran.seconds, ran.capacity, parts=parts)

    async def _optim(self, start: StartOptim) -> Finished:
        work = dispatch.optim_pass(start, self._backlog)
        ran = await self.execute(work)
        assert isinstance(ran.report, OptimReport)
        await self.securing.snapshot(self._snapshots.stepped(work, ran.report, ran.seconds))
        parts = dispatch.optim_parts(start, ran.report, self._backlog)
        return Finished(start.pass_id, ran.seconds, ran.capacity, parts=parts)

    async def _decode(self, start: StartDecode) -> Finished:
        orphans = self._orphans.pop(start.weights, ())
        work = dispatch.decode_pass(start, self._backlog, self._controls.locate, orphans)
        running = self._running[start.weights]
        running |= {*start.resume, *(row for s in work.admit for row in _rows(s))}
        running -= {*start.preempt, *work.drop}
        ran = await self.execute(work)
        assert isinstance(ran.report, DecodeReport)
        rows = dispatch.decode_rows(ran.report, self._backlog)
        running -= {row.row for row in rows if row.ended}
        return Finished(start.pass_id, ran.seconds, ran.capacity, rows=rows)

    # --- one model's adapter ---

    async def _control(self, start: StartControl) -> Finished:
        pending = self._backlog.get(start.request)
        seconds, capacity = 0.0, None
        try:
            order = await self._controls.prepare(pending.work)
        except OpenRLError as error:
            pending.ended = Failed(error)
        else:
            if isinstance(order, Found):
                pending.ended = order.result
                return Finished(start.pass_id, 0.0, None, (PartEnded(start.request, True),))
            ran = await self.execute(ControlPass(start.weights, start.request, order.control))
            seconds, capacity = ran.seconds, ran.capacity
            pending.ended = await self._concluded(start, order, ran)
            if isinstance(order.control, PinVersion):
                self._weigh(order.control, ran)
                self._unpin_surplus(order.model.owner)
            await self._drop_unpinned(start)
        part = PartEnded(start.request, not isinstance(pending.ended, Failed))
        return Finished(start.pass_id, seconds, capacity, parts=(part,))

    async def _concluded(self, start: StartControl, order: Order, ran: Ran) -> Result | Failed:
        assert isinstance(ran.report, ControlReport)
        if ran.report.error is not None:
            self._controls.abandon(order)
            return Failed(ran.report.error)
        result = await self._controls.conclude(order)
        if isinstance(result, Failed) and (undo := _undo(order.control)):
            await self.execute(ControlPass(start.weights, start.request, undo))
        elif not isinstance(result, Failed):
            await self.securing.after(order.work, ran.seconds)
        return result

    # --- versions ---

    def unpin_all(self, model_id: ModelId) -> None:
        """Nobody will sample from the model's versions any more: they go with the next control
        pass."""
        pins = self._models.pins
        self._unpin((version, pins.forget(version)) for version in pins.of(model_id))

    def _weigh(self, control: PinVersion, ran: Ran) -> None:
        assert isinstance(ran.report, ControlReport)
        self._models.pins.weigh(control.version_id, ran.report.size_bytes)

    def _unpin_surplus(self, owner: OwnerId) -> None:
        pins = self._models.pins
        used = {p.work.target.version for p in self._backlog if p.work.target is not None}
        self._unpin((version, pins.remove(version)) for version in pins.surplus(owner, used))

    def _unpin(self, removed: Iterable[tuple[VersionId, Pin]]) -> None:
        for version, pin in removed:
            self._unpinned.append((self._models.weights_of(pin.model_id), version))
            self._snapshots.unpinned(pin)

    async def _drop_unpinned(self, start: StartControl) -> None:
        unpinned, self._unpinned = self._unpinned, []
        for weights, version in unpinned:
            await self.execute(ControlPass(weights, start.request, DropVersion(version)))

    # --- the engine ---

    async def execute(self, work: Pass) -> Ran:
        """Raises `EngineDied` only."""
        if (failure := self._failure_of(work.weights)) is not None:
            rows = self._running[work.weights]
            return Ran(dispatch.failed_report(work, failure, rows), 0.0, None)
        began = self._clock()
        try:
            executed = await self._thread.run(partial(self._engine.execute, work))
        except EngineDied:
            raise
        except Exception as error:
            # The engine's boundary: whatever it is, it costs one pass and not the server.
            log.exception("the engine failed in a %s", type(work).__name__)
            if isinstance(work, TrainPass | OptimPass):
                parts = dispatch.by_model(work.pieces)
                if len(parts) > 1:
                    return await self._each_alone(work, parts, self._clock() - began)
            report = dispatch.failed_report(
                work, blamed_on_engine(error), self._running[work.weights]
            )
            if isinstance(work, DecodePass):
                self._orphans[work.weights] |= self._running[work.weights]
            return Ran(report, self._clock() - began, None)
        self._snapshots.written(executed.written)
        return Ran(executed.report, executed.seconds, executed.capacity)

    async def _each_alone(
        self, work: TrainPass | OptimPass, parts: Sequence[Sequence[int]], seconds: float
    ) -> Ran:
        """`parts` are places of pieces; `seconds` went into the pass that failed."""
        outcomes: dict[int, Any] = {}
        capacity: Capacity | None = None
        for places in parts:
            ran = await self.execute(dispatch.part(work, places))
            assert isinstance(ran.report, TrainReport | OptimReport)
            outcomes |= zip(places, ran.report.outcomes, strict=True)
            seconds, capacity = seconds + ran.seconds, ran.capacity or capacity
        in_order = tuple(outcomes[place] for place in range(len(work.pieces)))
        train = isinstance(work, TrainPass)
        return Ran(TrainReport(in_order) if train else OptimReport(in_order), seconds, capacity)


def requests_of(start: Start) -> Iterable[RequestId]:
    """What a pass runs of training work."""
    match start:
        case StartTrain(atoms=atoms):
            return dict.fromkeys(request_id for request_id, _ in atoms)
        case StartOptim(requests=requests):
            return requests
        case StartControl(request=request):
            return (request,)
        case StartDecode():
            return ()


def _rows(start: RowStart) -> Iterable[RowId]:
    return (RowId(start.request_id, index) for index in start.indexes)


def _undo(control: Control) -> Control | None:
    """What takes back a control operation that nobody will know of."""
    match control:
        case CreateAdapter(model_id=model_id):
            return DropAdapter(model_id)
        case PinVersion(version_id=version):
            return DropVersion(version)
        case _:
            return None
