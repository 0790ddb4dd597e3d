"""Checkpoints that are kept elsewhere are brought to this disk before the work that reads them is
accepted: the engine reads files, and waits for a network only when a copy has gone since."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from openrl.catalogue import Catalogue, Checkpoint
from openrl.checkpoints import CheckpointStore
from openrl.errors import Gone, NotFound, Unavailable
from openrl.types import (
    CreateModelFromCheckpoint,
    LoadWeights,
    Sample,
    TinkerPath,
    VersionId,
    Work,
)

_RETRY_SECONDS = 5.0


class Fetching:
    def __init__(self, catalogue: Catalogue, store: CheckpointStore) -> None:
        self._catalogue = catalogue
        self._store = store

    async def for_work(self, work: Work) -> None:
        """What is nowhere is left for the work itself to say. Raises `Unavailable`."""
        with suppress(NotFound):
            checkpoint = self._read_by(work)
            if checkpoint is not None:
                await self.bring(checkpoint)

    def check(self, path: TinkerPath, version: VersionId) -> None:
        """What a sampler reads is here. Raises `Gone` that says what has become of it."""
        checkpoint = self._catalogue.find_checkpoint(path)
        if checkpoint is None or checkpoint.version != version:
            raise Gone(f"checkpoint {path!r} was deleted or written anew: make a new sampler")
        if not self._store.exists(path, checkpoint.created_at):
            raise Gone(f"the files of checkpoint {path!r} are missing: save the weights again")

    async def bring(self, checkpoint: Checkpoint) -> Path:
        """Its directory. Raises `NotFound`, and `Unavailable` when where it is kept cannot be
        reached now."""
        path, created_at = checkpoint.path, checkpoint.created_at
        try:
            if self._store.exists(path, created_at):
                return self._store.fetch(path, created_at)
            return await asyncio.to_thread(self._store.fetch, path, created_at)
        except OSError as error:
            raise Unavailable(
                f"checkpoint {path!r} cannot be brought from where it is kept: {error}",
                _RETRY_SECONDS,
            ) from error

    def _read_by(self, work: Work) -> Checkpoint | None:
        """Raises `NotFound` for what the work may not read: nothing is brought for that."""
        match work.operation:
            case (LoadWeights() | CreateModelFromCheckpoint()) as load:
                return self._catalogue.readable_checkpoint(load.path, load.reader or work.owner)
            case Sample() if work.target is not None and work.target.path is not None:
                return self._catalogue.find_checkpoint(work.target.path)  # its sampler was let in
            case _:
                return None
