"""Which base models are served: public names and where their files are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from openrl import demo
from openrl.errors import UserError
from openrl.settings import Setting, pairs


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A public name and where its files are; `path` None lets transformers resolve the name
    from its cache or the hub. Several names may share a path."""

    name: str
    path: Path | None = None


def sources_in(setting: Setting) -> tuple[ModelSource, ...]:
    """Raises `UserError` for an entry that is neither a name nor a name with a path."""
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
        named(name) if path is None else ModelSource(name, setting.base / Path(path).expanduser())
        for name, path in entries
    )


def named(name: str) -> ModelSource:
    """A model of which no path is said: the hub's, or the demo's, which is on no hub."""
    return ModelSource(name, demo.model_directory() if name == demo.NAME else None)


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
