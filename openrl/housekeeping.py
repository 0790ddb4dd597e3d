"""What a node tidies up now and then."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable

from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.futures import Futures

log = logging.getLogger("openrl")

_EVERY_SECONDS = 10.0


async def housekeeping(
    catalogue: Catalogue, checkpoints: CheckpointStore, futures: Futures, now: Callable[[], float]
) -> None:
    """Runs until cancelled; `now` gives Unix seconds."""
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        tidy(catalogue, checkpoints, futures, now())


def tidy(catalogue: Catalogue, checkpoints: CheckpointStore, futures: Futures, now: float) -> None:
    """One round. What a full disk does not let it write waits for the next."""
    futures.sweep()
    try:
        delete_expired(catalogue, checkpoints, now)
        catalogue.write_touched()
        catalogue.usage.write()
        catalogue.audit.forget(now)
    except (OSError, sqlite3.Error) as error:
        log.error("the catalogue cannot be tidied up: %s", error)


def delete_expired(catalogue: Catalogue, checkpoints: CheckpointStore, now: float) -> int:
    """Deletes the checkpoints whose time to live has passed; returns how many those were. Files
    go first: they make the room that a full disk needs to forget their row."""
    expired = catalogue.expired(now)
    for checkpoint in expired:
        checkpoints.delete(checkpoint.path, checkpoint.created_at)
        catalogue.delete_checkpoint(checkpoint.path, checkpoint.owner)
        catalogue.audit.add(checkpoint.owner, now, "checkpoint_expire", tinker_path=checkpoint.path)
        log.info("checkpoint %s has expired and is deleted", checkpoint.path)
    return len(expired)
