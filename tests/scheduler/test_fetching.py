"""Checkpoints that are kept elsewhere are on this disk when the engine reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.shell import ALICE, BASE, BOB

from openrl.catalogue import Catalogue, Checkpoint, Run
from openrl.checkpoints import CheckpointStore
from openrl.engines.base import BaseModelInfo, LoadAdapter, WeightsKey
from openrl.errors import ServerError
from openrl.scheduler.controls import Controls, Order
from openrl.scheduler.fetching import Fetching
from openrl.scheduler.models import Model, Models
from openrl.scheduler.pins import Pins
from openrl.storage import FsspecStorage
from openrl.types import (
    LoadWeights,
    LoraConfig,
    ModelId,
    OwnerId,
    RequestId,
    SessionId,
    TinkerPath,
    Work,
)

MODEL, SESSION = ModelId("s:train:0"), SessionId("s")
PATH = TinkerPath("tinker://s:train:0/weights/a")
MADE = 1.0


class Elsewhere:
    """One checkpoint of Alice's, which is in the bucket and not on this disk."""

    def __init__(self, data: Path) -> None:
        self.bucket = data / "bucket"
        self.catalogue = Catalogue(None)
        self.store = CheckpointStore(data / "here", FsspecStorage(f"file://{self.bucket}"))
        self.catalogue.add_run(Run(MODEL, SESSION, ALICE, BASE, LoraConfig(), MADE, MADE))
        staged = self.store.stage()
        (staged.directory / "adapter").write_bytes(b"1234")
        self.store.publish(staged, PATH, MADE)
        self.catalogue.add_checkpoint(
            Checkpoint(PATH, MODEL, ALICE, "weights", "a", BASE, LoraConfig(), MADE, 4, True)
        )
        shutil.rmtree(self.store.directory(PATH, MADE))

    def loading(self, owner: OwnerId) -> Work:
        return Work(RequestId(f"{MODEL}:5"), owner, SESSION, MODEL, 5, LoadWeights(PATH, True))

    def controls(self) -> Controls:
        models = Models(Pins(1, 1))
        models.serve([BaseModelInfo(BASE, WeightsKey(BASE), 64, 64, (0,), BASE, 32, "any")])
        models.add(Model(MODEL, SESSION, ALICE, BASE, LoraConfig(), 8))
        return Controls(models, self.catalogue, self.store, lambda: MADE)


async def test_what_another_owner_keeps_is_not_brought(tmp_path: Path) -> None:
    there = Elsewhere(tmp_path)
    fetching = Fetching(there.catalogue, there.store)
    await fetching.for_work(there.loading(BOB))
    assert not there.store.exists(PATH, MADE)
    await fetching.for_work(there.loading(ALICE))
    assert there.store.exists(PATH, MADE)


async def test_a_copy_that_went_while_the_work_waited_is_brought_again(tmp_path: Path) -> None:
    there = Elsewhere(tmp_path)
    order = await there.controls().prepare(there.loading(ALICE))
    assert isinstance(order, Order)
    assert isinstance(order.control, LoadAdapter)
    assert (order.control.source / "adapter").read_bytes() == b"1234"


async def test_what_cannot_be_brought_then_fails_its_work_and_says_why(tmp_path: Path) -> None:
    there = Elsewhere(tmp_path)
    shutil.rmtree(there.bucket)
    with pytest.raises(ServerError, match="missing from this server"):
        await there.controls().prepare(there.loading(ALICE))
