"""What the catalogue remembers: frozen rows, their ids and their JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from openrl.types import (
    CheckpointKind,
    LoraConfig,
    ModelId,
    OwnerId,
    RequestId,
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
    detail: str | None = None  # what the client said with it


@dataclass(frozen=True, slots=True)
class Run:
    """One training run; `lora` with its seed as drawn. A run that is a copy of a checkpoint
    holds that checkpoint alone, and nothing was ever trained under its name. `inflight` is what
    the samplers that follow it read."""

    model_id: ModelId
    session_id: SessionId
    owner: OwnerId
    base_model: str
    lora: LoraConfig
    created_at: float
    last_request_at: float
    user_metadata: Mapping[str, str] | None = None
    copied_from: TinkerPath | None = None
    inflight: SamplerTarget | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A `public` one may be read, not changed, by every owner. `request_id` is of the save that
    made it, so that its repeat after a crash finds it; None for a copy."""

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
    public: bool = False
    request_id: RequestId | None = None

    @property
    def version(self) -> VersionId:
        """An overwritten or re-created name is another version."""
        return VersionId(f"{self.path}@{self.created_at:.6f}")

    @property
    def target(self) -> SamplerTarget:
        """What a sampling session on this checkpoint pins."""
        return SamplerTarget(self.base_model, self.version, self.path)


@dataclass(frozen=True, slots=True)
class Mark:
    """Between which numbers, `first` up to and without `beyond`, a client's samples may be in
    flight; written by that `life` of the server."""

    clone: int
    first: int
    beyond: int
    life: int


@dataclass(frozen=True, slots=True)
class Sampler:
    """`clients` counts the clones that have joined it. One that `follows` a run reads what the
    run's newest inflight save pinned; `target` is what it began with."""

    sampling_session_id: SamplingSessionId
    session_id: SessionId
    owner: OwnerId
    target: SamplerTarget
    created_at: float
    clients: int = 0
    follows: ModelId | None = None
    marks: tuple[Mark, ...] = ()


Noun: TypeAlias = Session | Run | Checkpoint | Sampler
T = TypeVar("T", Session, Run, Checkpoint, Sampler)


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Newest first; `total` counts what there is without limit and offset."""

    items: tuple[T, ...]
    total: int


_INNER: Mapping[str, Callable[[Any], Any]] = {
    "lora": lambda value: LoraConfig(**value),
    "target": lambda value: SamplerTarget(**value),
    "inflight": lambda value: value and SamplerTarget(**value),
    "tags": tuple,
    "marks": lambda marks: tuple(Mark(**mark) for mark in marks),
}


def identity(noun: Noun) -> tuple[str, str, str]:
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


def encode(noun: Noun) -> str:
    return json.dumps(asdict(noun))


def decode(kind: type[T], body: str) -> T:
    fields = json.loads(body)
    return kind(**{name: _INNER.get(name, _same)(value) for name, value in fields.items()})


def _same(value: Any) -> Any:
    return value
