"""Checkpoints that are kept elsewhere are brought to this disk before the work that reads them is
accepted: the engine reads files, and never waits for a network."""

from __future__ import annotations

import asyncio
from pathlib import Path

from openrl.catalogue import Catalogue, Checkpoint
from openrl.checkpoints import CheckpointStore
from openrl.errors import NotFound, Unavailable
from openrl.types import CreateModelFromCheckpoint, LoadWeights, Sample, TinkerPath, Work

_RETRY_SECONDS = 5.0


class Fetching:
    def __init__(self, catalogue: Catalogue, store: CheckpointStore) -> None:
        self._catalogue = catalogue
        self._store = store

    async def for_work(self, work: Work) -> None:
        """What is nowhere is left for the work itself to say. Raises `Unavailable`."""
        path = _read_by(work)
        checkpoint = None if path is None else self._catalogue.find_checkpoint(path)
        if checkpoint is not None:
            try:
                await self.bring(checkpoint)
            except NotFound:
                return

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


def _read_by(work: Work) -> TinkerPath | None:
    match work.operation:
        case LoadWeights(path=path) | CreateModelFromCheckpoint(path=path):
            return path
        case Sample():
            return None if work.target is None else work.target.path
        case _:
            return None
