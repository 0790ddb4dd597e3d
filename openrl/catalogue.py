"""Names: owners' sessions, runs, checkpoints and samplers, in SQLite. Never tensors.

One `Catalogue` belongs to one thread, the event loop's: a call takes well under a millisecond
(write-ahead log without a flush per commit: the crash of the process loses nothing, the crash
of the machine at most the last moments). What a request looks up is answered from memory.

Every lookup takes the owner, and another owner's name is `NotFound` just as one that never was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar, cast

from openrl.errors import NotFound, UserError
from openrl.nouns import Column, NounTable
from openrl.types import (
    CheckpointKind,
    LoraConfig,
    ModelId,
    OwnerId,
    SamplerTarget,
    SamplingSessionId,
    SessionId,
    TinkerPath,
    VersionId,
)


@dataclass(frozen=True, slots=True)
class Session:
    """Times are Unix seconds."""

    session_id: SessionId
    owner: OwnerId
    created_at: float
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, str] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None
    finished: str | None = None  # the first reason given, and no more work after it


@dataclass(frozen=True, slots=True)
class Run:
    """One training run; `lora` with its seed as drawn."""

    model_id: ModelId
    session_id: SessionId
    owner: OwnerId
    base_model: str
    lora: LoraConfig
    created_at: float
    last_request_at: float
    user_metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: TinkerPath
    model_id: ModelId
    owner: OwnerId
    kind: CheckpointKind
    name: str
    base_model: str
    lora: LoraConfig
    created_at: float
    size_bytes: int
    with_optimizer: bool
    expires_at: float | None = None
    user_metadata: Mapping[str, str] | None = None

    @property
    def version(self) -> VersionId:
        """An overwritten or re-created name is another version."""
        return VersionId(f"{self.path}@{self.created_at:.6f}")

    @property
    def target(self) -> SamplerTarget:
        """What a sampling session on this checkpoint pins."""
        return SamplerTarget(self.base_model, self.version, self.path)


@dataclass(frozen=True, slots=True)
class Sampler:
    sampling_session_id: SamplingSessionId
    session_id: SessionId
    owner: OwnerId
    target: SamplerTarget
    created_at: float


Noun: TypeAlias = Session | Run | Checkpoint | Sampler
T = TypeVar("T", Session, Run, Checkpoint, Sampler)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Newest first; `total` counts what there is without limit and offset."""

    items: tuple[T, ...]
    total: int


class Catalogue:
    def __init__(self, file: Path | None) -> None:
        """Opens or makes the database; None keeps it in memory. Raises `ServerError` when the
        file was written by a newer version."""
        self._table = NounTable(file)
        self._known: dict[tuple[str, str], Noun] = {}
        self._touched: dict[ModelId, float] = {}

    def close(self) -> None:
        self.write_touched()
        self._table.close()

    # --- sessions ---

    def add_session(self, session: Session) -> None:
        self._put(session)

    def session(self, session_id: str, owner: OwnerId) -> Session:
        return self._owned(Session, session_id, owner)

    def sessions(self, owner: OwnerId, limit: int = 100, offset: int = 0) -> Page[Session]:
        return self._page(Session, "owner", owner, limit, offset)

    def finish_session(self, session_id: str, owner: OwnerId, reason: str) -> None:
        """The first reason wins."""
        session = self.session(session_id, owner)
        if session.finished is None:
            self._put(replace(session, finished=reason))

    # --- runs ---

    def add_run(self, run: Run) -> None:
        self._put(run)

    def run(self, model_id: str, owner: OwnerId) -> Run:
        """`last_request_at` may be newer in memory than in the file."""
        run = self._owned(Run, model_id, owner)
        return replace(run, last_request_at=self._touched.get(run.model_id, run.last_request_at))

    def find_run(self, model_id: str) -> Run | None:
        """For ourselves: whoever its owner is."""
        return self._find(Run, model_id)

    def runs(self, owner: OwnerId, limit: int = 100, offset: int = 0) -> Page[Run]:
        self.write_touched()
        return self._page(Run, "owner", owner, limit, offset)

    def runs_of(self, session_id: str, owner: OwnerId) -> tuple[Run, ...]:
        self.session(session_id, owner)
        return self._page(Run, "parent", session_id).items

    def touch_run(self, model_id: ModelId, now: float) -> None:
        """Remembers the time of a run's newest request; written with the next list or close."""
        self._touched[model_id] = now

    def write_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for model_id, now in touched.items():
            run = self._find(Run, model_id)
            if run is not None:
                self._put(replace(run, last_request_at=now))

    # --- checkpoints ---

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Takes the place of one of the same path."""
        self._put(checkpoint)

    def checkpoint(self, path: str, owner: OwnerId) -> Checkpoint:
        return self._owned(Checkpoint, path, owner)

    def find_checkpoint(self, path: str) -> Checkpoint | None:
        """For ourselves: whoever its owner is."""
        return self._find(Checkpoint, path)

    def checkpoints(self, owner: OwnerId, limit: int = 100, offset: int = 0) -> Page[Checkpoint]:
        return self._page(Checkpoint, "owner", owner, limit, offset)

    def checkpoints_of(self, model_id: str, owner: OwnerId) -> tuple[Checkpoint, ...]:
        self.run(model_id, owner)
        return self._page(Checkpoint, "parent", model_id).items

    def set_expiry(self, path: str, owner: OwnerId, expires_at: float | None) -> None:
        self._put(replace(self.checkpoint(path, owner), expires_at=expires_at))

    def expired(self, now: float) -> tuple[Checkpoint, ...]:
        bodies = self._table.expired("Checkpoint", now)
        return tuple(_decode(Checkpoint, body) for body in bodies)

    def delete_checkpoint(self, path: str, owner: OwnerId) -> Checkpoint:
        """Returns what was deleted, so that its files can follow."""
        checkpoint = self.checkpoint(path, owner)
        self._table.delete("Checkpoint", path)
        self._known.pop(("Checkpoint", path), None)
        return checkpoint

    # --- samplers ---

    def add_sampler(self, sampler: Sampler) -> Sampler:
        """Idempotent by id: returns the one that stands. Raises `UserError` when the id stands
        for other weights."""
        standing = self._find(Sampler, sampler.sampling_session_id)
        if standing is None:
            self._put(sampler)
            return sampler
        if (standing.owner, standing.target) != (sampler.owner, sampler.target):
            raise UserError(f"sampling session {sampler.sampling_session_id!r} exists already")
        return standing

    def sampler(self, sampling_session_id: str, owner: OwnerId) -> Sampler:
        return self._owned(Sampler, sampling_session_id, owner)

    def find_sampler(self, sampling_session_id: str) -> Sampler | None:
        """For ourselves: whoever its owner is."""
        return self._find(Sampler, sampling_session_id)

    def samplers_of(self, session_id: str, owner: OwnerId) -> tuple[Sampler, ...]:
        self.session(session_id, owner)
        return self._page(Sampler, "parent", session_id).items

    # --- memory and table ---

    def _put(self, noun: Noun) -> None:
        kind, identity, parent = _identity(noun)
        body = json.dumps(asdict(noun))
        self._table.put(kind, identity, noun.owner, parent, noun.created_at, body)
        self._known[kind, identity] = noun

    def _find(self, kind: type[T], identity: str) -> T | None:
        known = self._known.get((kind.__name__, identity))
        if known is None:
            body = self._table.get(kind.__name__, identity)
            if body is None:
                return None
            known = self._known[kind.__name__, identity] = _decode(kind, body)
        return cast(T, known)

    def _owned(self, kind: type[T], identity: str, owner: OwnerId) -> T:
        noun = self._find(kind, identity)
        if noun is None or noun.owner != owner:
            raise NotFound(f"no {_CALLED[kind]} {identity!r}")
        return noun

    def _page(
        self, kind: type[T], by: Column, value: str, limit: int = -1, offset: int = 0
    ) -> Page[T]:
        bodies, total = self._table.page(kind.__name__, by, value, limit, offset)
        return Page(tuple(_decode(kind, body) for body in bodies), total)


_CALLED: Mapping[type[Any], str] = {
    Session: "session",
    Run: "model",
    Checkpoint: "checkpoint",
    Sampler: "sampling session",
}
_INNER: Mapping[str, Callable[[Any], Any]] = {
    "lora": lambda value: LoraConfig(**value),
    "target": lambda value: SamplerTarget(**value),
    "tags": tuple,
}


def _identity(noun: Noun) -> tuple[str, str, str]:
    """Kind, id, and the id of what it belongs to."""
    match noun:
        case Session():
            return "Session", noun.session_id, ""
        case Run():
            return "Run", noun.model_id, noun.session_id
        case Checkpoint():
            return "Checkpoint", noun.path, noun.model_id
        case Sampler():
            return "Sampler", noun.sampling_session_id, noun.session_id


def _decode(kind: type[T], body: str) -> T:
    fields = json.loads(body)
    return kind(**{name: _INNER.get(name, _same)(value) for name, value in fields.items()})


def _same(value: Any) -> Any:
    return value
