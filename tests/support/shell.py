"""The whole of the server below HTTP, with the fake engine: admit work, await outcomes."""

import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from openrl.catalogue import Catalogue, Session
from openrl.checkpoints import CheckpointStore
from openrl.config import JournalConfig, Limits, SchedulerConfig
from openrl.engines.base import Engine
from openrl.engines.fake import FakeEngine
from openrl.futures import Futures
from openrl.journal import NOTHING, DiskJournal, NullJournal, Recovered
from openrl.journal.files import FileOperations
from openrl.scheduler.actor import EngineActor
from openrl.scheduler.admission import Admission
from openrl.scheduler.fetching import Fetching
from openrl.types import (
    AdamParams,
    CreateModel,
    Datum,
    Failed,
    ForwardBackward,
    LoraConfig,
    Operation,
    OptimStep,
    Outcome,
    OwnerId,
    RequestId,
    Sample,
    SamplerTarget,
    SamplingParams,
    SessionId,
    Work,
)

BASE = "tiny"
ALICE, BOB = OwnerId("alice"), OwnerId("bob")
SECONDS = 20.0  # far more than anything here takes


@dataclass
class Shell:
    actor: EngineActor
    admission: Admission
    catalogue: Catalogue
    store: CheckpointStore
    futures: Futures
    seqs: dict[str, int] = field(default_factory=dict)

    # --- saying things ---

    def work(
        self,
        lane: str,
        operation: Operation,
        seq: int | None = None,
        owner: OwnerId = ALICE,
        target: SamplerTarget | None = None,
    ) -> Work:
        if seq is None:
            seq = self.seqs.get(lane, -1) + 1
            self.seqs[lane] = seq
        session = SessionId(lane.split(":")[0])
        request = RequestId(f"{lane}:{seq}")
        return Work(request, owner, session, lane, seq, operation, target)

    async def send(self, lane: str, operation: Operation, **rest: Any) -> RequestId:
        return await self.admission.admit(self.work(lane, operation, **rest))

    async def outcome(self, request_id: RequestId, owner: OwnerId = ALICE) -> Outcome:
        outcome = await self.futures.wait(self.futures.find(request_id, owner), SECONDS)
        assert outcome is not None, f"{request_id}: {self.admission.why_waiting(request_id)}"
        return outcome

    async def fails(self, lane: str, operation: Operation, **rest: Any) -> Failed:
        owner = rest.get("owner", ALICE)
        outcome = await self.outcome(await self.send(lane, operation, **rest), owner)
        assert isinstance(outcome, Failed), outcome
        return outcome

    async def does(self, lane: str, operation: Operation, **rest: Any) -> Any:
        owner = rest.get("owner", ALICE)
        outcome = await self.outcome(await self.send(lane, operation, **rest), owner)
        assert not isinstance(outcome, Failed), outcome.error
        return outcome

    # --- the usual ---

    async def model(self, name: str = "s:train:0", rank: int = 8, owner: OwnerId = ALICE) -> str:
        session = SessionId(name.split(":")[0])
        self.catalogue.add_session(Session(session, owner, 0.0))
        await self.does(name, CreateModel(BASE, LoraConfig(rank=rank)), owner=owner)
        return name

    async def step(self, lane: str) -> None:
        await self.does(lane, training([datum([1, 2, 3], [2, 3, 4])]))
        await self.does(lane, OptimStep(AdamParams(learning_rate=0.1)))

    async def logprobs(self, lane: str) -> np.ndarray:
        """What the model gives to one fixed datum."""
        work = training([datum([1, 2, 3], [2, 3, 4])], forward_only=True)
        return np.asarray((await self.does(lane, work)).outputs[0]["logprobs"])


def datum(tokens: list[int], targets: list[int], weights: list[float] | None = None) -> Datum:
    inputs = {
        "target_tokens": np.array(targets, np.int64),
        "weights": np.array(weights or [1.0] * len(tokens), np.float32),
    }
    return Datum(np.array(tokens, np.int32), inputs)


def training(
    data: list[Datum],
    loss: str = "cross_entropy",
    config: Mapping[str, float | str] | None = None,
    forward_only: bool = False,
) -> ForwardBackward:
    return ForwardBackward(tuple(data), loss, config or {}, forward_only)


def sample(prompt: list[int], max_tokens: int = 8, n: int = 1, **params: Any) -> Sample:
    return Sample(np.array(prompt, np.int32), SamplingParams(max_tokens, **params), n)


@asynccontextmanager
async def shell(
    data: Path,
    engine: Engine | None = None,
    config: SchedulerConfig | None = None,
    journal: Any = None,
    hold_seconds: float = 0.05,
    recovered: Recovered = NOTHING,
    securing: JournalConfig | None = None,
) -> AsyncIterator[Shell]:
    """With `securing` snapshots are written."""
    config = config or SchedulerConfig(gap_seconds=0.05, atom_tokens=8)
    catalogue = Catalogue(data / "catalogue.sqlite")
    store = CheckpointStore(data / "checkpoints")
    futures = Futures(time.monotonic, 3600.0)
    journal = journal or NullJournal()
    engine = engine or FakeEngine([BASE], vocab_size=64, context_length=64)
    actor = EngineActor(
        engine,
        config,
        catalogue,
        store,
        futures,
        journal,
        time.monotonic,
        time.time,
        snapshots=data if securing else None,
        securing=securing or JournalConfig(),
    )
    admission = Admission(
        actor,
        catalogue,
        Fetching(catalogue, store),
        futures,
        journal,
        config,
        Limits(),
        time.time,
        hold_seconds=hold_seconds,
    )
    await actor.start(recovered)
    try:
        yield Shell(actor, admission, catalogue, store, futures)
    finally:
        await actor.close()
        catalogue.close()


@asynccontextmanager
async def lasting(
    data: Path,
    securing: JournalConfig | None = None,
    files: FileOperations | None = None,
    **rest: Any,
) -> AsyncIterator[Shell]:
    """One that goes on where the last one on the same data has ended. It ends as if killed: what
    is queued stays queued, and no snapshot is written at the end."""
    data.mkdir(exist_ok=True)  # noqa: ASYNC240 - nobody else waits
    journal, recovered = await DiskJournal.open(data / "journal", files=files)
    try:
        async with shell(
            data,
            journal=journal,
            recovered=recovered,
            securing=securing or JournalConfig(),
            **rest,
        ) as whole:
            yield whole
    finally:
        await journal.aclose()


def image(data: Path, copy: Path) -> Path:
    """What a disk holds at this moment, for another to go on with, as after `kill -9`. What is
    deleted meanwhile is not there."""
    try:
        shutil.copytree(data, copy)
    except shutil.Error as error:
        if not all("No such file" in why for _, _, why in error.args[0]):
            raise
    return copy
