"""Configuration, parsed once into frozen values.

Order of precedence: command line, then environment (`OPENRL_*`, read here and nowhere else),
then the TOML file, then the defaults below. An unknown key is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A public name and where its files are; `path` None lets transformers resolve the name
    from its cache or the hub. Several names may share a path."""

    name: str
    path: Path | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`threads` None picks a count for the machine. Sizes are in tokens and bytes."""

    kind: Literal["torch", "fake"] = "torch"
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    max_lora_rank: int = 256
    kv_cache_bytes: int = 1 << 30
    max_rows: int = 256
    sampled_logprobs: Literal["tempered", "raw"] = "tempered"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`quantum_seconds`: the longest that one pass should hold the engine. `gap_seconds`: how
    long a lane waits for a missing seq_id. `atom_tokens`: the size at which a request is cut."""

    quantum_seconds: float = 0.25
    gap_seconds: float = 2.0
    pass_tokens: int = 4096
    atom_tokens: int = 1024
    decode_steps: int = 16
    max_queued_samples: int = 4096
    max_queued_bytes: int = 1 << 30
    owner_weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the door lets in."""

    body_bytes: int = 256 << 20
    datums: int = 4096
    num_samples: int = 1024
    id_chars: int = 255
    metadata_bytes: int = 64 << 10
    topk_prompt_logprobs: int = 128
    tensor_elements: int = 64 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """`poll_seconds`: how long a poll is held before the answer is "still pending"; the SDK
    reads for 45 s. `retention_seconds`: how long a result can be fetched again."""

    models: tuple[ModelSource, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    data: Path = Path("openrl-data")
    home: str = "local"
    poll_seconds: float = 30.0
    retention_seconds: float = 3600.0
    drain_seconds: float = 30.0
    log_level: str = "info"
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    limits: Limits = field(default_factory=Limits)
