"""Works and outcomes for the journal's tests, and files that fail."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path

import numpy as np

from openrl.errors import OpenRLError
from openrl.journal import Journal, Recovered
from openrl.journal.files import LocalFiles
from openrl.journal.reading import read_directory
from openrl.journal.recovery import recover
from openrl.types import (
    AdamParams,
    CreateModel,
    Datum,
    Failed,
    ForwardBackward,
    ForwardBackwardOutput,
    LoraConfig,
    ModelCreated,
    ModelId,
    Operation,
    OptimStep,
    OptimStepDone,
    Outcome,
    OwnerId,
    RequestId,
    SessionId,
    Work,
)


def work(model: str, seq: int, operation: Operation | None = None) -> Work:
    return Work(
        RequestId(f"{model}:{seq}"),
        OwnerId("alice"),
        SessionId("s"),
        model,
        seq,
        operation or OptimStep(AdamParams(learning_rate=seq / 8)),
    )


def creation(model: str) -> Work:
    return work(model, 0, CreateModel("base", LoraConfig(rank=4, seed=7)))


def created(model: str) -> ModelCreated:
    return ModelCreated(ModelId(model), "base", LoraConfig(rank=4, seed=7))


def training(model: str, seq: int, tokens: int = 16) -> Work:
    ids = np.arange(tokens, dtype=np.int32)
    inputs = {"target_tokens": ids.astype(np.int64), "weights": np.ones(tokens, np.float32)}
    return work(model, seq, ForwardBackward((Datum(ids, inputs),), "cross_entropy", {}))


def trained(seq: int, tokens: int = 16) -> ForwardBackwardOutput:
    logprobs = np.linspace(-seq - 1, 0, tokens, dtype=np.float32)
    return ForwardBackwardOutput(({"logprobs": logprobs},), {"loss:sum": float(seq)})


def stepped(version: int) -> OptimStepDone:
    return OptimStepDone({"grad_norm:last": 0.5}, version)


@dataclass(frozen=True)
class Seen:
    """What a journal tells of one model, to be compared."""

    snapshot: tuple[str, str] | None
    executed: tuple[tuple[str, str, bool], ...]
    pending: tuple[str, ...]
    last_seq: int
    created: bool
    damaged: bool = False


def seen(recovered: Recovered) -> dict[str, Seen]:
    return {
        model.model_id: Seen(
            (model.snapshot.position, model.snapshot.name) if model.snapshot else None,
            tuple((each.request_id, each.operation, each.failed) for each in model.executed),
            tuple(model.pending),
            model.last_seq,
            model.created is not None,
            model.damage is not None,
        )
        for model in recovered.models
    }


def same(one: object, other: object) -> bool:
    """Equal to the bit and of equal types, arrays and errors included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    if is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, OpenRLError) and isinstance(other, OpenRLError):
        return same(vars(one), vars(other)) and same(one.args, other.args)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    return one == other


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))


@dataclass
class FaultyFiles(LocalFiles):
    """`before` is called with the name of each operation and may raise; a write takes at most
    `most` bytes, and `room` bytes fit on the disk."""

    before: Callable[[str], None] = lambda name: None
    most: int | None = None
    room: int | None = None
    calls: list[str] = field(default_factory=list)

    def _meet(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)

    def create(self, path: Path) -> int:
        self._meet("create")
        return super().create(path)

    def write(self, file: int, data: bytes | memoryview) -> int:
        self._meet("write")
        data = data[: self.most] if self.most is not None else data
        if self.room is not None:
            if self.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            data = data[: self.room]
        count = super().write(file, data)
        if self.room is not None:
            self.room -= count
        return count

    def sync(self, file: int) -> None:
        self._meet("sync")
        super().sync(file)

    def truncate(self, file: int, size: int) -> None:
        self._meet("truncate")
        super().truncate(file, size)

    def unlink(self, path: Path) -> None:
        self._meet("unlink")
        super().unlink(path)


def failing(name: str, number: int, times: int) -> Callable[[str], None]:
    """Every operation `name` fails with `number` the first `times` times."""
    left = times

    def before(called: str) -> None:
        nonlocal left
        if called == name and left > 0:
            left -= 1
            raise OSError(number, os.strerror(number))

    return before


class QuickFiles(LocalFiles):
    """For opening a thousand journals: what is on disk is left to the system."""

    def create(self, path: Path) -> int:
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)

    def sync(self, file: int) -> None:
        pass

    def cut(self, path: Path, size: int) -> None:
        os.truncate(path, size)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def opened(directory: Path) -> Recovered:
    """What is told at start, without a journal that goes on."""
    files = QuickFiles()
    return recover(directory, files, read_directory(directory, files))[1]


class Story:
    """Tells a journal what happens to some models, and keeps its own account of it.

    `states`: what must be seen after each record, the first before any. `answers`: the outcomes.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.states: list[dict[str, Seen]] = [{}]
        self.answers: dict[str, Outcome] = {}
        self._snapshot: dict[str, tuple[str, str] | None] = {}
        self._done: dict[str, list[tuple[str, str, bool]]] = {}
        self._waiting: dict[str, list[Work]] = {}
        self._last: dict[str, int] = {}
        self._created: set[str] = set()

    @property
    def now(self) -> dict[str, Seen]:
        return self.states[-1]

    def create(self, model: str) -> None:
        self._done[model], self._waiting[model], self._last[model] = [], [], 0
        self._snapshot[model] = None
        self.accept(creation(model))
        self._waiting[model].clear()
        self.journal.committed(creation(model), created(model))
        self.answers[f"{model}:0"] = created(model)
        self._created.add(model)
        self._note()

    def accept(self, work: Work) -> None:
        self.journal.accepted(work)
        self._waiting[work.lane].append(work)
        self._note()

    def commit(self, work: Work, outcome: Outcome) -> None:
        self.journal.committed(work, outcome)
        self._waiting[work.lane].remove(work)
        failed = isinstance(outcome, Failed)
        self._done[work.lane].append((work.request_id, type(work.operation).__name__, failed))
        self._last[work.lane] = max(self._last[work.lane], work.seq_id)
        self.answers[work.request_id] = outcome
        self._note()

    def do(self, model: str, seq: int, tokens: int = 4) -> None:
        """A forward_backward at an odd number, and an optimizer's step at an even one."""
        odd = seq % 2 == 1
        job = training(model, seq, tokens) if odd else work(model, seq)
        self.accept(job)
        self.commit(job, trained(seq, tokens) if odd else stepped(seq // 2))

    def snapshot(self, model: str, seq: int, name: str) -> None:
        position = f"{model}:{seq}"
        self.journal.snapshot(ModelId(model), RequestId(position), name)
        done = self._done[model]
        at = [each[0] for each in done].index(position)
        self._done[model] = done[at + 1 :]
        self._snapshot[model] = (position, name)
        self._note()

    def end(self, model: str) -> None:
        self.journal.ended(ModelId(model))
        del self._done[model]
        self._note()

    def _note(self) -> None:
        self.states.append({model: self._seen(model) for model in self._done})

    def _seen(self, model: str) -> Seen:
        waiting = tuple(each.request_id for each in self._waiting[model])
        return Seen(
            self._snapshot[model],
            tuple(self._done[model]),
            waiting,
            self._last[model],
            model in self._created,
        )
