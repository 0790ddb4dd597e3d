"""What a journal that is opened has to tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from openrl.errors import ServerError
from openrl.types import ModelId, Outcome, OwnerId, RequestId, Work


@dataclass(frozen=True, slots=True)
class Executed:
    """An operation with an outcome. `operation` is the name of its class; `failed` says that
    `Recovered.outcome` gives a `Failed`."""

    request_id: RequestId
    operation: str
    failed: bool


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`position`: the last executed operation that snapshot `name` includes."""

    position: RequestId
    name: str


@dataclass(frozen=True, slots=True)
class RecoveredModel:
    """A model that had not ended. `executed`: what came after the snapshot (without one: after
    the creation), in the order of execution. `pending`: accepted, without an outcome, in the
    order of acceptance; the creation is among them while it has none. `last_seq`: the highest
    seq_id with an outcome. `damage` says what of it was lost, and where; `creation` is None only
    then."""

    model_id: ModelId
    owner: OwnerId
    creation: Work | None
    atom_tokens: int | None
    created: Outcome | None
    snapshot: Snapshot | None
    executed: tuple[Executed, ...]
    pending: tuple[RequestId, ...]
    last_seq: int
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An outcome that can still be read with `Recovered.outcome`, which takes about `size` bytes.
    `operation` is the name of the operation's class."""

    request_id: RequestId
    owner: OwnerId
    operation: str
    lane: str
    size: int


class Payloads(Protocol):
    def work(self, request_id: RequestId) -> Work: ...

    def outcome(self, request_id: RequestId) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Recovered:
    """`answers` in the order of commit. `attempts`: how often a pending request was `started`;
    `deaths`: how often a start ended when it was doing again what has an outcome.
    `damage`: what was lost that may have been of no model that is still here."""

    models: tuple[RecoveredModel, ...]
    answers: tuple[Answer, ...]
    attempts: Mapping[RequestId, int]
    damage: str | None
    payloads: Payloads
    deaths: Mapping[RequestId, int] = field(default_factory=dict)

    def work(self, request_id: RequestId) -> Work:
        """Read from disk at each call. Raises `ServerError` when it cannot be read."""
        return self.payloads.work(request_id)

    def outcome(self, request_id: RequestId) -> Outcome:
        """Read from disk at each call. Raises `ServerError` when it cannot be read."""
        return self.payloads.outcome(request_id)


class _Empty:
    def work(self, request_id: RequestId) -> Work:
        raise ServerError(f"{request_id} is not in the journal")

    def outcome(self, request_id: RequestId) -> Outcome:
        raise ServerError(f"{request_id} is not in the journal")


NOTHING = Recovered((), (), {}, None, _Empty())
