"""Where configuration comes from: each source becomes `Setting`s that remember their place.

Pure: the file's text and the environment are handed in. What a key means is `config.py`'s.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrl.errors import UserError

MODELS = "models"
_PREFIX = "OPENRL_"
_OPENMP = {"OMP_NUM_THREADS": "engine.threads", "OMP_WAIT_POLICY": "engine.wait_policy"}


@dataclass(frozen=True, slots=True)
class Setting:
    """`key` is `section.name` or `models`; `place` says where it was set, for error messages.

    A relative path is taken from `base`. `text` marks a value that was typed as text, so that
    "8" may stand for a number.
    """

    key: str
    value: object
    place: str
    base: Path = Path()
    text: bool = False

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]


def from_file(path: Path, sections: Iterable[str]) -> Iterator[Setting]:
    """Raises `UserError` for a file that is not there, is not TOML, or has another section."""
    known = (*sections, MODELS)
    for section, table in _read(path).items():
        if section not in known:
            raise UserError(f"{path}: no section [{section}]; known: {_bracketed(known)}")
        if not isinstance(table, dict):
            raise UserError(f"{path}: {section} must be a table: [{section}]")
        yield from _from_table(path, section, table)


def _from_table(path: Path, section: str, table: dict[str, Any]) -> Iterator[Setting]:
    place = f"{path} [{section}]"
    if section == MODELS:
        yield Setting(MODELS, table, place, path.parent)
    else:
        for name, value in table.items():
            yield Setting(f"{section}.{name}", value, place, path.parent)


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"configuration file {path} is not valid TOML: {error}") from error


def from_openmp(env: Mapping[str, str]) -> Iterator[Setting]:
    """What OpenMP itself would read: the weakest source."""
    for name, key in _OPENMP.items():
        if name in env:  # OMP_NUM_THREADS may hold one count per nesting level
            yield Setting(key, env[name].split(",")[0].lower(), name, text=True)


def from_environment(env: Mapping[str, str], keys: Iterable[str]) -> Iterator[Setting]:
    """`OPENRL_SECTION__NAME` and `OPENRL_MODELS`.

    Raises `UserError` for `OPENRL_PORT` and the like, which would otherwise be ignored.
    """
    single = {_single(key): _variable(key) for key in keys}
    for name, value in env.items():
        if name == f"{_PREFIX}MODELS":
            yield Setting(MODELS, value, name, text=True)
        elif name.startswith(_PREFIX) and "__" in name:
            key = name.removeprefix(_PREFIX).lower().replace("__", ".", 1)
            yield Setting(key, value, name, text=True)
        elif name in single and not value.startswith("tcp://"):  # Kubernetes' service links
            raise UserError(f"the environment's {name} is not read: say {single[name]}")


def file_named_in(env: Mapping[str, str]) -> Path | None:
    name = env.get(f"{_PREFIX}CONFIG")
    return Path(name) if name else None


def pairs(text: str | Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """`NAME=VALUE` or a bare `NAME`, several separated by commas when they are one text."""
    for part in text.split(",") if isinstance(text, str) else text:
        name, separator, value = part.strip().partition("=")
        yield name.strip(), value.strip() if separator else None


def _variable(key: str) -> str:
    return _PREFIX + key.replace(".", "__").upper()


def _single(key: str) -> str:
    """What somebody would guess: `OPENRL_PORT`, `OPENRL_ENGINE_THREADS`."""
    return _PREFIX + key.removeprefix("server.").replace(".", "_").upper()


def _bracketed(names: Iterable[str]) -> str:
    return ", ".join(f"[{name}]" for name in names)
