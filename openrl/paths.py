"""Tinker paths: `tinker://{model_id}/{kind}/{name}`, exactly three parts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import get_args

from openrl.errors import NotFound, UserError
from openrl.types import CheckpointKind, ModelId, TinkerPath

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_PREFIX = "tinker://"
_KINDS: tuple[CheckpointKind, ...] = get_args(CheckpointKind)


@dataclass(frozen=True, slots=True)
class ParsedPath:
    model_id: ModelId
    kind: CheckpointKind
    name: str

    @property
    def path(self) -> TinkerPath:
        return TinkerPath(f"{_PREFIX}{self.model_id}/{self.kind}/{self.name}")


def check_name(name: str) -> str:
    """A checkpoint name that can never leave its directory. Raises `UserError`."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"checkpoint name {name!r} is not allowed: use up to 255 letters, digits, '_', '-' "
            "and '.', not starting with '.'"
        )
    return name


def parse_tinker_path(path: str) -> ParsedPath:
    """Raises `UserError` when `path` is not a tinker path."""
    parts = path.removeprefix(_PREFIX).split("/")
    if not path.startswith(_PREFIX) or len(parts) != 3 or not parts[0]:
        raise UserError(f"{path!r} is not a tinker path: tinker://MODEL_ID/weights/NAME")
    model_id, kind, name = parts
    for known in _KINDS:
        if kind == known:
            return ParsedPath(ModelId(model_id), known, check_name(name))
    raise UserError(f"{path!r}: {kind!r} is no kind of checkpoint: {', '.join(_KINDS)}")


def own_checkpoint(path: str, model_id: str) -> TinkerPath:
    """Raises `NotFound` when no model of this id could ever load it from itself."""
    parsed = parse_tinker_path(path)
    if parsed.model_id != model_id or parsed.kind == "external_weights":
        raise NotFound(f"no checkpoint {path!r}")
    return parsed.path
