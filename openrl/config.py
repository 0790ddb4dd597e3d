"""Configuration, parsed once into frozen values.

Order of precedence: command line, then environment (read here and nowhere else), then the TOML
file, then the defaults below. An unknown key is an error that names it.

A key is `section.name`. The file has `[server]`, `[models]`, `[engine]`, `[scheduler]` and
`[limits]`; the environment says `OPENRL_ENGINE__THREADS` for `engine.threads`,
`OPENRL_MODELS="NAME=PATH,NAME"`, and `OPENRL_CONFIG` for the file. The double underscore keeps
clear of what Kubernetes injects for a service named openrl (`OPENRL_PORT=tcp://...`).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec import Meta

from openrl.errors import UserError
from openrl.settings import (
    MODELS,
    Setting,
    file_named_in,
    from_environment,
    from_file,
    from_openmp,
    pairs,
)

Count: TypeAlias = Annotated[int, Meta(ge=1, description="a whole number, at least 1")]
Whole: TypeAlias = Annotated[int, Meta(ge=0, description="a whole number, at least 0")]
Port: TypeAlias = Annotated[int, Meta(ge=0, le=65535, description="a port: 0 (any) to 65535")]
Seconds: TypeAlias = Annotated[
    float, Meta(ge=0, le=1e9, description="seconds, at least 0 and finite")
]
Weight: TypeAlias = Annotated[float, Meta(gt=0, le=1e6, description="a number above 0")]
Home: TypeAlias = Annotated[
    str,
    Meta(
        pattern="^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="lowercase letters, digits, -"
    ),
]
Key: TypeAlias = Annotated[
    str,
    Meta(
        pattern=r"^(tml-[!-~]{16,256})?$",
        description="a secret of at least 16 characters behind tml-",
    ),
]
Device: TypeAlias = Annotated[
    str,
    Meta(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$", description="auto, cpu, mps, cuda or cuda:N"),
]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A public name and where its files are; `path` None lets transformers resolve the name
    from its cache or the hub. Several names may share a path."""

    name: str
    path: Path | None = None


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
    """`quantum_seconds`: the longest that one pass should hold the engine. `gap_seconds`: how
    long a lane waits for a missing seq_id. `atom_tokens`: the size at which a request is cut.
    `pinned_versions`, `pinned_bytes`: how much is kept for each owner's unnamed samplers. What
    an owner may have at once is bounded by the `max_` ones; 0 is no bound. `sharing` other than
    `fused` is for comparisons: see `scheduler/core/sharing.py`."""

    quantum_seconds: Seconds = 0.25
    gap_seconds: Seconds = 2.0
    pass_tokens: Count = 4096
    atom_tokens: Count = 1024
    decode_steps: Count = 16
    max_queued_samples: Count = 4096
    max_queued_bytes: Count = 1 << 30
    max_queued_requests: Count = 16384
    max_models: Whole = 0
    tokens_per_minute: Whole = 0
    pinned_versions: Count = 4096
    pinned_bytes: Count = 64 << 30
    owner_weights: Mapping[str, Weight] = field(default_factory=dict)
    sharing: Literal["fused", "separate", "in_turn"] = "fused"


@dataclass(frozen=True, slots=True)
class Limits:
    """What the door lets in. `topk_prompt_logprobs` bounds what is asked for at one position of a
    prompt: the best tokens, alternatives drawn, and tokens to be scored."""

    body_bytes: Count = 256 << 20
    datums: Count = 4096
    num_samples: Count = 1024
    id_chars: Count = 255
    metadata_bytes: Count = 64 << 10
    topk_prompt_logprobs: Whole = 128
    topk_sample_logprobs: Whole = 128
    tensor_elements: Count = 64 << 20


@dataclass(frozen=True, slots=True)
class Config:
    """`poll_seconds`: how long a poll is held before the answer is "still pending"; the SDK
    reads for 45 s. `retention_seconds`: how long a result can be fetched again.
    `silence_seconds`: after how long without a word a client's samples are taken back.
    `admin_key`: what `X-API-Key` an administrator has; none when empty."""

    models: tuple[ModelSource, ...]
    host: str = "127.0.0.1"
    port: Port = 8000
    data: Path = Path("openrl-data")
    home: Home = "local"
    public_url: str | None = None
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
    limits: Limits = field(default_factory=Limits)


# --- loading --------------------------------------------------------------------------------

environ: MutableMapping[str, str] = os.environ
"""The process's environment, named once so that nobody else reads it."""

_SECTIONS: Mapping[str, type] = {
    "server": Config,
    "engine": EngineConfig,
    "scheduler": SchedulerConfig,
    "limits": Limits,
}

SECRETS = frozenset({"server.admin_key"})
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
    models = _models(settings[MODELS]) if MODELS in settings else ()
    return Config(
        models=models,
        engine=EngineConfig(**values["engine"]),
        scheduler=SchedulerConfig(**values["scheduler"]),
        limits=Limits(**values["limits"]),
        **values["server"],
    )


def known_keys() -> dict[str, Any]:
    """Every key but `models`, with its annotated type."""
    nested = {MODELS, *_SECTIONS}
    return {
        f"{section}.{name}": hint
        for section, owner in _SECTIONS.items()
        for name, hint in get_type_hints(owner, include_extras=True).items()
        if name not in nested
    }


def expected(hint: Any) -> str:
    """What a key takes, in words."""
    if hint in (str, Path, bool):
        return {str: "text", Path: "a path", bool: "true or false"}[hint]
    if words := [m.description for m in getattr(hint, "__metadata__", ()) if m.description]:
        return str(words[0])
    arguments = get_args(hint)
    if arguments and type(None) in arguments:
        return expected(next(a for a in arguments if a is not type(None)))
    if len(arguments) == 2 and arguments[0] is str:
        return f"names, each with {expected(arguments[1])}"
    return "one of " + ", ".join(str(a) for a in arguments)


def _convert(setting: Setting, hint: Any) -> Any:
    value = setting.value
    if setting.text and expected(hint).startswith("names"):
        value = dict(pairs(str(value)))
    try:
        if hint is Path:
            return setting.base / Path(msgspec.convert(value, str)).expanduser()
        return msgspec.convert(value, hint, strict=not setting.text)
    except msgspec.ValidationError as error:
        raise UserError(
            f"{setting.place}: {setting.key} = {setting.value!r}: expected {expected(hint)}"
        ) from error


def _models(setting: Setting) -> tuple[ModelSource, ...]:
    if isinstance(setting.value, Mapping):
        entries = [(name, _path_of(setting, name, at)) for name, at in setting.value.items()]
    else:
        entries = list(pairs(setting.value))  # type: ignore[arg-type]  # a text or a list of them
    names = [name for name, _ in entries]
    for name, path in entries:
        if not name or path == "":
            raise UserError(f"{setting.place}: a model is NAME or NAME=PATH")
        if names.count(name) > 1:
            raise UserError(f"{setting.place}: {name!r} is named twice")
    return tuple(
        ModelSource(name, None if path is None else setting.base / Path(path).expanduser())
        for name, path in entries
    )


def _path_of(setting: Setting, name: str, entry: object) -> str | None:
    """`"NAME" = "PATH"`, `"NAME" = {path = "PATH"}`, or `"NAME" = {}` for the hub's."""
    if isinstance(entry, str):
        return entry
    if isinstance(entry, dict) and set(entry) <= {"path"}:
        path = entry.get("path")
        if path is None or isinstance(path, str):
            return path
    raise UserError(
        f'{setting.place}: {name!r}: expected a path or {{path = "..."}}; quote the name'
    )


def _unknown(setting: Setting, keys: Iterable[str]) -> str:
    near = difflib.get_close_matches(setting.key, list(keys), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    siblings = [key for key in keys if key.startswith(f"{setting.section}.")]
    known = ", ".join(siblings) if siblings else "sections " + ", ".join([*_SECTIONS, MODELS])
    return f"{setting.place}: unknown key {setting.key}{hint} (known: {known})"
