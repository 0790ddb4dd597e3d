"""Names: owners' sessions, runs, checkpoints and samplers, in SQLite. Never tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from openrl.types import (
    CheckpointKind,
    LoraConfig,
    ModelId,
    OwnerId,
    SamplerTarget,
    SamplingSessionId,
    SessionId,
    TinkerPath,
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


@dataclass(frozen=True, slots=True)
class Sampler:
    sampling_session_id: SamplingSessionId
    session_id: SessionId
    owner: OwnerId
    target: SamplerTarget
    created_at: float
