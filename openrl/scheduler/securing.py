"""Passes that make snapshots, and the operations after which one cannot wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from openrl.engines.base import (
    Capacity,
    Control,
    ControlPass,
    ControlReport,
    FinishSnapshots,
    Pass,
    Report,
    WeightsKey,
)
from openrl.scheduler.models import Models
from openrl.scheduler.snapshots import Snapshots
from openrl.types import (
    CreateModel,
    CreateModelFromCheckpoint,
    LoadWeights,
    ModelId,
    RequestId,
    UnloadModel,
    Work,
)


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """What came of a pass; `capacity` is None when the engine raised."""

    report: Report
    seconds: float
    capacity: Capacity | None


Execute: TypeAlias = Callable[[Pass], Awaitable[Ran]]

_NOBODYS = RequestId("snapshots")


class Securing:
    def __init__(self, execute: Execute, snapshots: Snapshots, models: Models) -> None:
        self._execute = execute
        self._snapshots = snapshots
        self._models = models

    async def snapshot(self, models: Iterable[ModelId]) -> None:
        """Copies them; they are written while other passes run."""
        for model_id in models if self._snapshots.enabled else ():
            await self._order(model_id, self._snapshots.orders(model_id))

    async def snapshot_now(self, models: Sequence[ModelId]) -> None:
        """Returns when they are written, or could not be."""
        await self.snapshot(models)
        if models and self._snapshots.enabled:
            await self._order(models[0], [FinishSnapshots()])

    async def all_in_debt(self) -> None:
        """Returns when every model is on disk as it is now, or could not be written."""
        await self.snapshot_now(self._snapshots.in_debt())

    async def after(self, work: Work, seconds: float) -> None:
        """A control operation has been done. A checkpoint that was read may be deleted, and what
        is unloaded is not replayed: those wait until what they leave is on disk."""
        model_id = ModelId(work.lane)
        match work.operation:
            case CreateModel():
                self._snapshots.reached(model_id, work.request_id)
            case CreateModelFromCheckpoint() | LoadWeights():
                self._snapshots.reached(model_id, work.request_id, seconds)
                await self.snapshot_now([model_id])
            case UnloadModel():
                if orders := self._snapshots.version_orders(model_id):
                    await self._order(model_id, [*orders, FinishSnapshots()])
            case _:
                pass

    async def _order(self, model_id: ModelId, orders: Sequence[Control]) -> None:
        weights: WeightsKey = self._models.weights_of(model_id)
        for control in orders:
            ran = await self._execute(ControlPass(weights, _NOBODYS, control))
            assert isinstance(ran.report, ControlReport)
            self._snapshots.taken(control, ran.seconds, ran.report.error)
