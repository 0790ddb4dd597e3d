"""Runs one pass on the engine's thread and says how it went.

An engine that raises is taken to have failed every request of that pass, and nobody else's.
Only `EngineDied` gets through.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

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
    OptimReport,
    Pass,
    PinVersion,
    Report,
    RowId,
    RowStart,
    TrainReport,
    WeightsKey,
)
from openrl.errors import EngineDied, OpenRLError, blamed_on_engine
from openrl.scheduler import dispatch
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.controls import Controls, Order
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
from openrl.types import Failed, ModelId, OwnerId, Result, VersionId

log = logging.getLogger("openrl")


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """What came of a pass; `capacity` is None when the engine raised."""

    report: Report
    seconds: float
    capacity: Capacity | None


class Runner:
    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        models: Models,
        backlog: Backlog,
        controls: Controls,
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._thread = thread
        self._models = models
        self._backlog = backlog
        self._controls = controls
        self._clock = clock
        self._unpinned: list[tuple[WeightsKey, VersionId]] = []  # still in the engine
        # Rows in the engine's batches, and those that a failed pass may have left there.
        self._running: dict[WeightsKey, set[RowId]] = defaultdict(set)
        self._orphans: dict[WeightsKey, set[RowId]] = defaultdict(set)

    async def run(self, start: Start) -> Finished:
        match start:
            case StartTrain():
                return await self._train(start)
            case StartOptim():
                return await self._optim(start)
            case StartControl():
                return await self._control(start)
            case StartDecode():
                return await self._decode(start)

    async def _train(self, start: StartTrain) -> Finished:
        ran = await self._execute(dispatch.train_pass(start, self._backlog))
        assert isinstance(ran.report, TrainReport)
        parts = dispatch.train_parts(start, ran.report, self._backlog)
        return Finished(start.pass_id, ran.seconds, ran.capacity, parts=parts)

    async def _optim(self, start: StartOptim) -> Finished:
        ran = await self._execute(dispatch.optim_pass(start, self._backlog))
        assert isinstance(ran.report, OptimReport)
        parts = dispatch.optim_parts(start, ran.report, self._backlog)
        return Finished(start.pass_id, ran.seconds, ran.capacity, parts=parts)

    async def _decode(self, start: StartDecode) -> Finished:
        orphans = self._orphans.pop(start.weights, ())
        work = dispatch.decode_pass(start, self._backlog, self._controls.locate, orphans)
        running = self._running[start.weights]
        running |= {*start.resume, *(row for s in work.admit for row in _rows(s))}
        running -= {*start.preempt, *work.drop}
        ran = await self._execute(work)
        assert isinstance(ran.report, DecodeReport)
        rows = dispatch.decode_rows(ran.report, self._backlog)
        running -= {row.row for row in rows if row.ended}
        return Finished(start.pass_id, ran.seconds, ran.capacity, rows=rows)

    # --- one model's adapter ---

    async def _control(self, start: StartControl) -> Finished:
        pending = self._backlog.get(start.request)
        seconds, capacity = 0.0, None
        try:
            order = self._controls.prepare(pending.work)
        except OpenRLError as error:
            pending.ended = Failed(error)
        else:
            ran = await self._execute(ControlPass(start.weights, start.request, order.control))
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
            await self._execute(ControlPass(start.weights, start.request, undo))
        return result

    # --- versions ---

    def unpin_all(self, model_id: ModelId) -> None:
        """Nobody will sample from the model's versions any more: they go with the next control
        pass."""
        pins = self._models.pins
        self._unpinned += [(self._weights(pins.forget(v)), v) for v in pins.of(model_id)]

    def _weigh(self, control: PinVersion, ran: Ran) -> None:
        assert isinstance(ran.report, ControlReport)
        self._models.pins.weigh(control.version_id, ran.report.size_bytes)

    def _unpin_surplus(self, owner: OwnerId) -> None:
        pins = self._models.pins
        used = {p.work.target.version for p in self._backlog if p.work.target is not None}
        surplus = pins.surplus(owner, used)
        self._unpinned += [(self._weights(pins.remove(v)), v) for v in surplus]

    def _weights(self, pin: Pin) -> WeightsKey:
        model = self._models.find(pin.model_id)
        assert model is not None, "a version belongs to a model"
        return self._models.base(model.base_model).weights

    async def _drop_unpinned(self, start: StartControl) -> None:
        unpinned, self._unpinned = self._unpinned, []
        for weights, version in unpinned:
            await self._execute(ControlPass(weights, start.request, DropVersion(version)))

    # --- the engine ---

    async def _execute(self, work: Pass) -> Ran:
        began = self._clock()
        try:
            executed = await self._thread.run(partial(self._engine.execute, work))
        except EngineDied:
            raise
        except Exception as error:
            # The engine's boundary: whatever it is, it costs one pass and not the server.
            # Out of memory: running the pass again with fewer atoms belongs here.
            log.exception("the engine failed in a %s", type(work).__name__)
            report = dispatch.failed_report(
                work, blamed_on_engine(error), self._running[work.weights]
            )
            if isinstance(work, DecodePass):
                self._orphans[work.weights] |= self._running[work.weights]
            return Ran(report, self._clock() - began, None)
        return Ran(executed.report, executed.seconds, executed.capacity)


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
