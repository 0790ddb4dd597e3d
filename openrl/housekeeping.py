"""What a node tidies up now and then."""

from __future__ import annotations

import asyncio
import gc
import logging
import sqlite3
from collections.abc import Callable

from openrl.actors import every
from openrl.api.services import Services
from openrl.catalogue import Catalogue, Checkpoint
from openrl.checkpoints import CheckpointStore
from openrl.futures import Futures
from openrl.journal import Journal
from openrl.scheduler.admission import Admission
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.leases import Leases
from openrl.types import SessionId

log = logging.getLogger("openrl")

_EVERY_SECONDS = 10.0
_CLEAN_EVERY_SECONDS = 60.0
_COLLECT_EVERY_SECONDS = 600.0


async def housekeeping(
    catalogue: Catalogue, checkpoints: CheckpointStore, futures: Futures, now: Callable[[], float]
) -> None:
    """Runs until cancelled; `now` gives Unix seconds."""
    await every(_EVERY_SECONDS, lambda: tidy(catalogue, checkpoints, futures, now()))


async def clean(journal: Journal) -> None:
    """Runs until cancelled. By itself, since a disk that fails lets it wait."""
    await every(_CLEAN_EVERY_SECONDS, journal.clean)


async def collect() -> None:
    """Runs until cancelled. By its thresholds (see `server.keep_collections_short`) the collector
    looks at the old after a hundred million objects: what cycles others leave would fill memory. It
    costs a tenth of a second, now and then."""

    async def collected() -> None:
        gc.collect()

    await every(_COLLECT_EVERY_SECONDS, collected)


async def tidy(
    catalogue: Catalogue, checkpoints: CheckpointStore, futures: Futures, now: float
) -> None:
    """One round. What a full disk, or a storage that is away, does not let it do waits for the
    next; neither keeps the rest from being done."""
    futures.sweep()
    try:
        await delete_expired(catalogue, checkpoints, now)
        await asyncio.to_thread(checkpoints.trim, now)
    except (OSError, sqlite3.Error) as error:
        log.error("checkpoints cannot be tidied up: %s", error)
    try:
        catalogue.write_touched()
        catalogue.usage.write()
        catalogue.audit.forget(now)
    except sqlite3.Error as error:
        log.error("the catalogue cannot be tidied up: %s", error)


async def delete_expired(catalogue: Catalogue, checkpoints: CheckpointStore, now: float) -> int:
    """Deletes the checkpoints whose time to live has passed; returns how many those were. One that
    cannot be deleted now keeps no other from it."""
    gone = 0
    for checkpoint in catalogue.expired(now):
        try:
            gone += await _delete(catalogue, checkpoints, checkpoint, now)
        except OSError as error:
            log.error("checkpoint %s has expired and stays: %s", checkpoint.path, error)
    return gone


async def _delete(
    catalogue: Catalogue, checkpoints: CheckpointStore, checkpoint: Checkpoint, now: float
) -> bool:
    """Files go first: they make the room that a full disk needs to forget their row."""
    await asyncio.to_thread(checkpoints.delete, checkpoint.path, checkpoint.created_at)
    if not catalogue.delete_checkpoint(checkpoint):
        return False
    catalogue.audit.add(checkpoint.owner, now, "checkpoint_expire", tinker_path=checkpoint.path)
    log.info("checkpoint %s has expired and is deleted", checkpoint.path)
    return True


async def watch_over(
    backlog: Backlog,
    admission: Admission,
    leases: Leases,
    services: Services,
    silence_seconds: float,
) -> None:
    """Runs until cancelled."""

    async def watch() -> None:
        services.feeds.sweep()
        take_back_unheard(backlog, admission, services, silence_seconds)
        end_leases(backlog, leases, services, silence_seconds)

    await every(_EVERY_SECONDS, watch)


def end_leases(backlog: Backlog, leases: Leases, services: Services, silence_seconds: float) -> int:
    """Of sessions that have not been heard for that long, heart or not: theirs is only the memory
    of the device. Returns how many models leave it. One that an earlier process left is as good as
    heard when this one first sees it. Sessions that have nothing here any more are forgotten."""
    now = services.monotonic()
    present = {model.session_id for model in services.models.all_alive()}
    for session_id in present:
        services.heard.setdefault(session_id, now)
    last = {s: max(when, services.heartbeats.get(s, when)) for s, when in services.heard.items()}
    for gone in last.keys() - present:
        if last[gone] < now - silence_seconds and not backlog.busy(SessionId(gone)):
            services.heartbeats.pop(gone, None)
            del services.heard[gone]
    return leases.heard(
        {SessionId(s): when for s, when in last.items() if s in present}, now - silence_seconds
    )


def take_back_unheard(
    backlog: Backlog, admission: Admission, services: Services, silence_seconds: float
) -> int:
    """Samples of clients whose heart has stopped beating; returns how many. A client that never
    sent a heartbeat is not judged by it."""
    taken, horizon = 0, services.monotonic() - silence_seconds
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


async def sweep_strays(catalogue: Catalogue, store: CheckpointStore) -> None:
    """At start: deletes checkpoints without a row, which a process that died left when it had
    published them or forgotten them. Those of a run that is unknown as well stay: of them the
    catalogue has been lost, or was taken from a backup, and may come back."""
    rows = catalogue.all_checkpoints(limit=-1).items
    known = {store.directory(row.path, row.created_at) for row in rows}
    strays = await asyncio.to_thread(store.strays, known)
    ours = [stray for stray in strays if catalogue.find_run(store.run_of(stray)) is not None]
    await asyncio.to_thread(store.sweep, ours)
    if others := set(strays) - set(ours):
        log.error(
            "%d checkpoints are of runs that catalogue.sqlite doesn't know: they stay on the disk, "
            "the first is %s. Was the catalogue lost, or taken from a backup?",
            len(others),
            min(others),
        )
