"""A checkpoint that the engine has written gets its name: durable files first, then the row.

The row says which request made it: when the process ends before that request is answered, its
repeat finds the row. Files without a row are nothing, and are swept away at the next start.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping
from typing import TypeAlias

from openrl.catalogue import Catalogue, Checkpoint
from openrl.checkpoints import CheckpointStore, Staged
from openrl.encryption import encrypt_files
from openrl.paths import ParsedPath, parse_tinker_path
from openrl.scheduler.models import Model
from openrl.types import (
    CheckpointKind,
    ExternalWeightsSaved,
    RequestId,
    Result,
    SamplerWeightsSaved,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    TinkerPath,
    WeightsSaved,
)

log = logging.getLogger("openrl")

Save: TypeAlias = SaveWeights | SaveWeightsForSampler | SaveWeightsExternal

_KINDS: Mapping[type, CheckpointKind] = {
    SaveWeights: "weights",
    SaveWeightsForSampler: "sampler_weights",
    SaveWeightsExternal: "external_weights",
}


class Publisher:
    def __init__(
        self, catalogue: Catalogue, store: CheckpointStore, now: Callable[[], float]
    ) -> None:
        """`now` is in Unix seconds."""
        self._catalogue = catalogue
        self._store = store
        self._now = now

    async def publish(
        self, request_id: RequestId, model: Model, save: Save, staged: Staged
    ) -> Checkpoint:
        """Raises `OSError` and `sqlite3.Error`; then nothing has the name."""
        if isinstance(save, SaveWeightsExternal) and save.recipients:
            await asyncio.to_thread(encrypt_files, staged.directory, save.recipients)
        path, now = path_of(model, save), self._now()
        size = await asyncio.to_thread(self._store.publish, staged, path, now)
        replaced = self._catalogue.find_checkpoint(path)
        row = _row(request_id, model, save, now, size)
        try:
            self._catalogue.add_checkpoint(row)
        except sqlite3.Error:
            await asyncio.to_thread(self._store.delete, path, now)
            raise
        self._catalogue.audit.add(model.owner, now, "checkpoint_create", tinker_path=path)
        if replaced is not None:
            await self._forget(replaced)
        return row

    async def _forget(self, replaced: Checkpoint) -> None:
        """Nobody can name it any more: files that stay are a matter of room alone."""
        try:
            await asyncio.to_thread(self._store.delete, replaced.path, replaced.created_at)
        except OSError as error:
            log.warning("the files of %s as it was stay: %s", replaced.path, error)


def path_of(model: Model, save: Save) -> TinkerPath:
    assert save.name is not None
    return ParsedPath(model.model_id, _KINDS[type(save)], save.name).path


def saved(save: Save, row: Checkpoint) -> Result:
    """The answer of a save that made this row."""
    match save:
        case SaveWeights():
            return WeightsSaved(row.path)
        case SaveWeightsForSampler():
            return SamplerWeightsSaved(path=row.path)
        case SaveWeightsExternal():
            return ExternalWeightsSaved(row.path, row.size_bytes)


def _row(
    request_id: RequestId, model: Model, save: Save, now: float, size_bytes: int
) -> Checkpoint:
    parsed = parse_tinker_path(path_of(model, save))
    return Checkpoint(
        path=parsed.path,
        model_id=model.model_id,
        owner=model.owner,
        kind=parsed.kind,
        name=parsed.name,
        base_model=model.base_model,
        lora=model.lora,
        created_at=now,
        size_bytes=size_bytes,
        with_optimizer=isinstance(save, SaveWeights),
        expires_at=None if save.ttl_seconds is None else now + save.ttl_seconds,
        user_metadata=save.user_metadata,
        request_id=request_id,
    )
