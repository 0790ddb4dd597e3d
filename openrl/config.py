"""Configuration, parsed once into frozen values.

Order of precedence: command line, then environment (read here and nowhere else), then the TOML
file, then the defaults below. An unknown key is an error that names it.

A key is `section.name`; the sections are those of `_SECTIONS` and `[models]`. The environment says
`OPENRL_ENGINE__THREADS` for `engine.threads`, `OPENRL_MODELS="NAME=PATH,NAME"`, and
`OPENRL_CONFIG` for the file. The double underscore keeps clear of what Kubernetes injects for a
service named openrl (`OPENRL_PORT=tcp://...`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec

from openrl.errors import UserError
from openrl.limits import Limits as Limits
from openrl.model_sources import ModelSource as ModelSource
from openrl.model_sources import sources_in
from openrl.settings import (
    MODELS,
    Setting,
    file_named_in,
    from_environment,
    from_file,
    from_openmp,
    pairs,
)
from openrl.values import (
    Count,
    Device,
    Home,
    Key,
    KeyOrHash,
    NodeName,
    Owners,
    Port,
    Seconds,
    Weight,
    Whole,
    expected,
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """`threads` None picks a count for the machine. Sizes are in tokens and bytes.

    `idle_versions`: how many sets of sampler weights stay in memory while nobody samples from
    them; further ones are on disk.

    `process`: a child has an interpreter of its own, so that the engine's Python never keeps the
    event loop waiting. `wait_policy` is OpenMP's: active threads spin while they wait, which on
    a machine that does anything else costs several times the speed.
    """

    kind: Literal["torch", "fake"] = "torch"
    process: Literal["thread", "child"] = "child"
    device: Device = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Count | None = None
    wait_policy: Literal["passive", "active"] = "passive"
    max_lora_rank: Count = 256
    kv_cache_bytes: Count = 1 << 30
    adapter_bytes: Count | None = None
    adapter_host_bytes: Count = 8 << 30
    idle_versions: Count = 16
    max_rows: Count = 256
    sampled_logprobs: Literal["tempered", "raw"] = "tempered"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """`quantum_seconds`: the longest that one pass should hold the engine. `hold_seconds`: the
    longest that an otherwise idle engine waits for models that are about to send; 0 never waits.
    `gap_seconds`: how long a lane waits for a missing seq_id. `atom_tokens`: the size at which a
    request is cut. `pinned_versions`, `pinned_bytes`: how much is kept for each owner's unnamed
    samplers. What an owner may have at once is bounded by the `max_` ones; 0 is no bound. `sharing`
    other than `fused` is for comparisons: see `scheduler/core/sharing.py`."""

    quantum_seconds: Seconds = 0.25
    hold_seconds: Seconds = 0.0
    gap_seconds: Seconds = 2.0
    pass_tokens: Count = 4096
    atom_tokens: Count = 1024
    decode_steps: Count = 16
    max_queued_samples: Count = 4096
    max_queued_bytes: Count = 1 << 30
    max_queued_requests: Count = 16384
    max_models: Whole = 0
    full_models: Whole = 0
    tokens_per_minute: Whole = 0
    pinned_versions: Count = 4096
    pinned_bytes: Count = 64 << 30
    owner_weights: Mapping[str, Weight] = field(default_factory=dict)
    owners: Owners = field(default_factory=dict)
    sharing: Literal["fused", "separate", "in_turn"] = "fused"


@dataclass(frozen=True, slots=True)
class AuthConfig:
    """Whose keys are let in. `mode` auto is "keys" when there are any, and "any-key" when there
    are none and nobody but this machine can connect. `keys_file` None is `keys` in the data
    directory. `keys`: for each owner one more key, or its hash."""

    mode: Literal["auto", "keys", "any-key"] = "auto"
    keys_file: Path | None = None
    keys: Mapping[str, KeyOrHash] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointsConfig:
    """`url`: where checkpoints are kept besides the data directory, which is a cache of
    `cache_bytes` then; anything that fsspec can write to. `owner_bytes` and `owner_count`: how
    much one owner may keep; 0 is no bound."""

    url: str = ""
    cache_bytes: Count = 64 << 30
    owner_bytes: Whole = 0
    owner_count: Whole = 0


@dataclass(frozen=True, slots=True)
class JournalConfig:
    """`segment_bytes`: the size of one file. `max_bytes`: how much there may be; training work
    waits for snapshots above it. `replay_seconds`: the engine time that a restart may need to do
    again what snapshots don't have."""

    enabled: bool = True
    segment_bytes: Count = 64 << 20
    max_bytes: Count = 8 << 30
    replay_seconds: Seconds = 60.0


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Who may read `/metrics` besides this machine: who has `key` or is an administrator, or
    everyone."""

    access: Literal["loopback", "everyone"] = "loopback"
    key: Key = ""


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """`endpoint`: where spans go over OTLP/HTTP; none are made when empty."""

    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """`node`: this one's name, and that of its home; empty is a node by itself. `address`: the URL
    by which the others reach it. `peers`: URLs with commas between; each host stands for all of its
    addresses. `secret`: what nodes sign with, the same on all. `away_seconds`: after how long
    without an answer a node is away."""

    node: NodeName = ""
    address: str = ""
    peers: str = ""
    secret: Key = ""
    refresh_seconds: Seconds = 2.0
    away_seconds: Seconds = 6.0


@dataclass(frozen=True, slots=True)
class Config:
    """`poll_seconds`: how long a poll is held before the answer is "still pending"; the SDK
    reads for 45 s. `retention_seconds`: how long a result can be fetched again.
    `silence_seconds`: after how long without a word a client's samples are taken back.
    `admin_key`: what `X-API-Key` an administrator has on this machine; none when empty.
    `tls_cert`: the chain in PEM; with its key unless `tls_key` has that. None is plain HTTP."""

    models: tuple[ModelSource, ...]
    host: str = "127.0.0.1"
    port: Port = 8000
    data: Path = Path("openrl-data")
    home: Home = "local"
    public_url: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    issue_jwts: bool = False
    poll_seconds: Seconds = 30.0
    retention_seconds: Seconds = 3600.0
    drain_seconds: Seconds = 30.0
    silence_seconds: Seconds = 300.0
    admin_key: Key = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["pretty", "json"] = "pretty"
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    limits: Limits = field(default_factory=Limits)
    journal: JournalConfig = field(default_factory=JournalConfig)
    checkpoints: CheckpointsConfig = field(default_factory=CheckpointsConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    traces: TracesConfig = field(default_factory=TracesConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


# --- loading --------------------------------------------------------------------------------

environ: MutableMapping[str, str] = os.environ
"""The process's environment, named once so that nobody else reads it."""

_SECTIONS: Mapping[str, type] = {
    "server": Config,
    "engine": EngineConfig,
    "scheduler": SchedulerConfig,
    "auth": AuthConfig,
    "limits": Limits,
    "journal": JournalConfig,
    "checkpoints": CheckpointsConfig,
    "metrics": MetricsConfig,
    "traces": TracesConfig,
    "cluster": ClusterConfig,
}

SECRETS = frozenset({"server.admin_key", "auth.keys", "metrics.key", "cluster.secret"})
"""Keys whose values are shown to nobody."""


def load(
    flags: Iterable[Setting] = (), env: Mapping[str, str] = environ, file: Path | None = None
) -> Config:
    """`file` None takes the one that `OPENRL_CONFIG` names, if any. Raises `UserError`."""
    return build(resolve(flags, env, file))


def resolve(
    flags: Iterable[Setting] = (), env: Mapping[str, str] = environ, file: Path | None = None
) -> dict[str, Setting]:
    """What was set and where, by key; the models of the strongest source replace the others'."""
    keys = known_keys()
    path = file or file_named_in(env)
    in_file = from_file(path, _SECTIONS) if path else ()
    settings = [*from_openmp(env), *in_file, *from_environment(env, keys), *flags]
    for setting in settings:
        if setting.key not in keys and setting.key != MODELS:
            raise UserError(_unknown(setting, keys))
    return {setting.key: setting for setting in settings}


def build(settings: Mapping[str, Setting]) -> Config:
    """Raises `UserError` for a value that its key does not take."""
    keys = known_keys()
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    for key, setting in settings.items():
        if key != MODELS:
            section, name = key.split(".", 1)
            values[section][name] = _convert(setting, keys[key])
    models = sources_in(settings[MODELS]) if MODELS in settings else ()
    inner = {name: kind(**values[name]) for name, kind in _SECTIONS.items() if kind is not Config}
    return Config(models=models, **inner, **values["server"])


def known_keys() -> dict[str, Any]:
    """Every key but `models`, with its annotated type."""
    nested = {MODELS, *_SECTIONS}
    return {
        f"{section}.{name}": hint
        for section, owner in _SECTIONS.items()
        for name, hint in get_type_hints(owner, include_extras=True).items()
        if name not in nested
    }


def _convert(setting: Setting, hint: Any) -> Any:
    value = setting.value
    if setting.text and expected(hint).startswith("names"):
        value = dict(pairs(str(value)))
    try:
        if Path in (hint, *get_args(hint)) and value is not None:
            return setting.base / Path(msgspec.convert(value, str)).expanduser()
        return msgspec.convert(value, hint, strict=not setting.text)
    except msgspec.ValidationError as error:
        shown = "(a secret)" if setting.key in SECRETS else repr(setting.value)
        raise UserError(
            f"{setting.place}: {setting.key} = {shown}: expected {expected(hint)}"
        ) from None if setting.key in SECRETS else error


def _unknown(setting: Setting, keys: Iterable[str]) -> str:
    near = difflib.get_close_matches(setting.key, list(keys), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    siblings = [key for key in keys if key.startswith(f"{setting.section}.")]
    known = ", ".join(siblings) if siblings else "sections " + ", ".join([*_SECTIONS, MODELS])
    return f"{setting.place}: unknown key {setting.key}{hint} (known: {known})"
