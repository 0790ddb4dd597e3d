"""What a node tidies up now and then."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable

from openrl.api.services import Services
from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.futures import Futures
from openrl.journal import Journal
from openrl.scheduler.admission import Admission
from openrl.scheduler.backlog import Backlog

log = logging.getLogger("openrl")

_EVERY_SECONDS = 10.0
_CLEAN_EVERY_SECONDS = 60.0


async def housekeeping(
    catalogue: Catalogue, checkpoints: CheckpointStore, futures: Futures, now: Callable[[], float]
) -> None:
    """Runs until cancelled; `now` gives Unix seconds."""
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        await tidy(catalogue, checkpoints, futures, now())


async def clean(journal: Journal) -> None:
    """Runs until cancelled. By itself, since a disk that fails lets it wait."""
    while True:
        await asyncio.sleep(_CLEAN_EVERY_SECONDS)
        await journal.clean()


async def tidy(
    catalogue: Catalogue, checkpoints: CheckpointStore, futures: Futures, now: float
) -> None:
    """One round. What a full disk does not let it write waits for the next."""
    futures.sweep()
    try:
        await delete_expired(catalogue, checkpoints, now)
        await asyncio.to_thread(checkpoints.trim, now)
        catalogue.write_touched()
        catalogue.usage.write()
        catalogue.audit.forget(now)
    except (OSError, sqlite3.Error) as error:
        log.error("the catalogue cannot be tidied up: %s", error)


async def delete_expired(catalogue: Catalogue, checkpoints: CheckpointStore, now: float) -> int:
    """Deletes the checkpoints whose time to live has passed; returns how many those were. Files
    go first: they make the room that a full disk needs to forget their row."""
    expired = catalogue.expired(now)
    for checkpoint in expired:
        await asyncio.to_thread(checkpoints.delete, checkpoint.path, checkpoint.created_at)
        if not catalogue.delete_checkpoint(checkpoint):
            continue
        catalogue.audit.add(checkpoint.owner, now, "checkpoint_expire", tinker_path=checkpoint.path)
        log.info("checkpoint %s has expired and is deleted", checkpoint.path)
    return len(expired)


async def watch_over(
    backlog: Backlog, admission: Admission, services: Services, silence_seconds: float
) -> None:
    """Runs until cancelled."""
    while True:
        await asyncio.sleep(_EVERY_SECONDS)
        services.feeds.sweep()
        take_back_unheard(backlog, admission, services, silence_seconds)


def take_back_unheard(
    backlog: Backlog, admission: Admission, services: Services, silence_seconds: float
) -> int:
    """Samples of clients whose heart has stopped beating; returns how many. A client that never
    sent a heartbeat is not judged by it."""
    taken, horizon = 0, services.clock() - silence_seconds
    for session_id in backlog.sessions():
        beat = services.heartbeats.get(session_id)
        if beat is not None and max(beat, services.heard.get(session_id, beat)) < horizon:
            count = admission.take_back_samples(session_id)
            taken += count
            if count:
                log.info(
                    "%d samples of %s, whose client is gone, are taken back", count, session_id
                )
    return taken
