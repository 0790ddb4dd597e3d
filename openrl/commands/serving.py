"""`serve` and `config`: flags become a frozen `Config`, which is handed on."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from openrl import demo, preflight, threads
from openrl.config import SECRETS, Config, build, environ, known_keys, resolve
from openrl.settings import MODELS, Setting
from openrl.telemetry import set_up_logging

_FLAGS = {
    "host": ("server.host", "ADDRESS", "Address to listen at."),
    "port": ("server.port", "PORT", "Port to listen at; 0 takes a free one."),
    "data": ("server.data", "DIR", "Where checkpoints and the catalogue are kept."),
    "engine": ("engine.kind", "torch|fake", "The engine; fake computes nothing real."),
    "device": ("engine.device", "DEVICE", "auto, cpu, mps, cuda or cuda:N."),
    "dtype": ("engine.dtype", "TYPE", "auto, float32, bfloat16 or float16."),
    "threads": ("engine.threads", "N", "CPU threads; when left out, this machine's cores."),
    "log_format": ("server.log_format", "pretty|json", "Log lines for people or for machines."),
    "log_level": ("server.log_level", "LEVEL", "debug, info, warning or error."),
}


@dataclass(frozen=True, slots=True)
class Source:
    """What was said on the command line."""

    file: Path | None
    flags: tuple[Setting, ...]

    def resolved(self) -> dict[str, Setting]:
        """With the demo model when no source names any."""
        demo_model = {demo.NAME: str(demo.model_directory())}
        default = Setting(MODELS, demo_model, "the demo model, since none is named")
        return {MODELS: default, **resolve(self.flags, environ, self.file)}


def configured(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the flags that make a configuration."""

    @functools.wraps(command)
    def with_flags(file: Path | None, models: tuple[str, ...], **typed: Any) -> None:
        flags = {name: typed.pop(name) for name in _FLAGS}
        command(Source(file, tuple(_settings(models, flags))), **typed)

    options = [
        click.option(f"--{name.replace('_', '-')}", metavar=metavar, help=text)
        for name, (_, metavar, text) in _FLAGS.items()
    ]
    options += [
        click.option("--model", "models", multiple=True, metavar="NAME[=PATH]", help=_MODEL_HELP),
        click.option("--config", "file", type=click.Path(path_type=Path), help="A TOML file."),
    ]
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_flags)


_MODEL_HELP = (
    "A model to serve, with its directory, or without to find it in the hub's cache or the hub. "
    "May be repeated; several names may share a directory."
)


def _settings(models: tuple[str, ...], typed: Mapping[str, str | None]) -> Iterator[Setting]:
    if models:
        yield Setting(MODELS, models, "--model", text=True)
    for name, value in typed.items():
        if value is not None:
            yield Setting(_FLAGS[name][0], value, f"--{name.replace('_', '-')}", text=True)


@click.command()
@configured
def serve(source: Source) -> None:
    """Serve models over the Tinker protocol; without --model, a small one for trying out."""
    config = build(source.resolved())
    preflight.check(config)
    config = threads.settle(config, environ)
    set_up_logging(config.log_level, config.log_format)
    from openrl import server  # settles first: torch reads the thread settings once

    try:
        server.run(config)
    except OSError as error:
        if (advice := preflight.explain(error, config)) is None:
            raise
        raise click.ClickException(advice) from error


@click.group("config")
def config_group() -> None:
    """Look at the configuration without serving it."""


@config_group.command()
@configured
def show(source: Source) -> None:
    """Print every setting as TOML, and where it was set."""
    settings = source.resolved()
    for line in toml_lines(build(settings), settings):
        click.echo(line)


@config_group.command()
@configured
def check(source: Source) -> None:
    """Say what is wrong with the configuration; silent success is exit status 0."""
    preflight.check(build(source.resolved()))
    click.echo("the configuration is good")


def toml_lines(config: Config, settings: Mapping[str, Setting]) -> Iterator[str]:
    yield f"[{MODELS}]  # {_place(settings, MODELS)}"
    for model in config.models:
        path = _toml(model.path.absolute()) if model.path else "{}"
        yield f"{_toml(model.name)} = {path}"
    section = MODELS
    for key in known_keys():
        if not key.startswith(f"{section}."):
            section = key.partition(".")[0]
            yield f"\n[{section}]"
        yield _toml_line(key, config, settings)


def _toml_line(key: str, config: Config, settings: Mapping[str, Setting]) -> str:
    section, name = key.split(".")
    value = getattr(config if section == "server" else getattr(config, section), name)
    if value is None:
        return f"# {name} is chosen at start"
    shown = "(a secret)" if key in SECRETS and value else value
    return f"{name} = {_toml(shown)}  # {_place(settings, key)}"


def _place(settings: Mapping[str, Setting], key: str) -> str:
    return settings[key].place if key in settings else "default"


def _toml(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        value = msgspec.to_builtins(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items())
        return f"{{{inner}}}"
    return json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
