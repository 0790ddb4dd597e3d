"""Nothing stays on disk of a model that has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

from openrl.actors import Tasks
from openrl.engines.base import SnapshotAdapter, Written
from openrl.journal import NullJournal
from openrl.scheduler.pins import Pins
from openrl.scheduler.rhythm import Rhythm
from openrl.scheduler.snapshots import Snapshots
from openrl.types import ModelId, RequestId

MODEL = ModelId("s:train:0")


async def gone(path: Path) -> None:
    async with asyncio.timeout(5.0):
        while path.exists():  # noqa: ASYNC110, ASYNC240 - a thread deletes it
            await asyncio.sleep(0.001)


async def test_a_snapshot_that_was_being_written_when_its_model_ended_goes(tmp_path: Path) -> None:
    tasks = Tasks(lambda name, error: None)
    snapshots = Snapshots(tmp_path, NullJournal(), Rhythm(60.0, 1 << 20), Pins(1, 1), tasks)
    snapshots.reached(MODEL, RequestId(f"{MODEL}:1"), 1.0)
    (order,) = snapshots.orders(MODEL)
    assert isinstance(order, SnapshotAdapter)
    snapshots.taken(order, 0.1, None)
    of_model = order.directory.parent
    of_model.mkdir(parents=True)
    snapshots.forget(MODEL)
    await gone(of_model)
    order.directory.mkdir(parents=True)  # the writer gets to it only now
    snapshots.written([Written(order.directory, 4)])
    await gone(order.directory)
    await tasks.close()
