"""What a recipe's `research.toml` says, read once."""

from __future__ import annotations

import hashlib
import importlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recipes.kit.chat import Message

ROOT = Path(__file__).parents[1]
Settings = Mapping[str, float | int | str]


class Question(Protocol):
    @property
    def messages(self) -> list[Message]: ...


@dataclass(frozen=True)
class Dimension:
    """What may be tried of one setting: `choices`, or numbers from `low` to `high`."""

    name: str
    choices: tuple[float | int | str, ...] = ()
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Study:
    """A recipe under research. `file` is the one file that an experiment may differ in."""

    recipe: str
    file: Path
    questions: Callable[[str], Iterator[Question]]
    reward: Callable[[Any, str], float]
    max_tokens: int
    rungs: int
    defaults: Settings
    space: tuple[Dimension, ...]

    @classmethod
    def read(cls, recipe: str) -> Study:
        """Raises `ValueError` when there is no such recipe, or it says nothing of research."""
        folder = ROOT / recipe
        if not (folder / "research.toml").is_file():
            known = sorted(each.parent.name for each in ROOT.glob("*/research.toml"))
            raise ValueError(f"no recipe {recipe!r} to research: there are {', '.join(known)}")
        said = tomllib.loads((folder / "research.toml").read_text())
        task = importlib.import_module(said["task"])
        space = said.get("space", {})
        if unknown := space.keys() - said["defaults"].keys():
            raise ValueError(f"research.toml: no default for {', '.join(sorted(unknown))}")
        return cls(
            recipe=recipe,
            file=folder / said["file"],
            questions=task.questions,
            reward=task.reward,
            max_tokens=said["max_tokens"],
            rungs=said["rungs"],
            defaults=said["defaults"],
            space=tuple(_dimension(name, of) for name, of in space.items()),
        )


def _dimension(name: str, said: Mapping[str, Any]) -> Dimension:
    if "choices" in said:
        return Dimension(name, choices=tuple(said["choices"]))
    whole = isinstance(said["low"], int) and isinstance(said["high"], int)
    return Dimension(
        name, low=said["low"], high=said["high"], log=said.get("log", False), whole=whole
    )


@dataclass(frozen=True)
class Sources:
    """The recipes as they were when research began, byte for byte."""

    files: Mapping[Path, bytes]

    @classmethod
    def read(cls) -> Sources:
        wanted = (each for each in sorted(ROOT.rglob("*")) if each.suffix in (".py", ".toml"))
        return cls({each.relative_to(ROOT.parent): each.read_bytes() for each in wanted})

    def write(self, directory: Path) -> None:
        for name, content in self.files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)

    def changed(self, directory: Path, besides: Path | None = None) -> list[Path]:
        """What is not in `directory` as it was, or is new there as code; `besides` may differ."""
        found = {
            each.relative_to(directory)
            for each in (directory / "recipes").rglob("*")
            if each.suffix in (".py", ".toml")
        }
        return sorted(
            name
            for name in found | self.files.keys()
            if name != besides
            and (name not in found or (directory / name).read_bytes() != self.files.get(name))
        )

    def digest(self) -> str:
        whole = hashlib.sha256()
        for name, content in self.files.items():
            whole.update(f"{name}\0{len(content)}\0".encode() + content)
        return whole.hexdigest()[:16]
