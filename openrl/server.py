"""The composition root: one node, from its configuration to its last answer.

The door opens as soon as the models' configuration files are read; weights load behind it.
On SIGTERM or SIGINT new work is refused, accepted work is finished within `drain_seconds`, and
polls are answered until the end. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sqlite3
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module

from aiohttp import web

from openrl.actors import Tasks, first_of
from openrl.api.app import Services, build_app, build_runner
from openrl.api.auth import authenticator_of
from openrl.api.feeds import Feeds
from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.config import Config
from openrl.data_directory import claim
from openrl.engines.base import BaseModelInfo, Engine, LoadProgress
from openrl.engines.fake import FakeEngine
from openrl.engines.process import ProcessEngine
from openrl.engines.pytorch.deferred import DeferredTorchEngine
from openrl.futures import KEPT_BYTES, Futures
from openrl.housekeeping import clean, collect, housekeeping, sweep_strays, watch_over
from openrl.journal import NOTHING, DiskJournal, Journal, NullJournal, Recovered
from openrl.scheduler.actor import EngineActor
from openrl.scheduler.admission import Admission
from openrl.scheduler.fetching import Fetching
from openrl.signing import signer_of
from openrl.startup import StartupView, warn_of_keyless
from openrl.storage import FsspecStorage
from openrl.tls import server_context
from openrl.tracing import traced

log = logging.getLogger("openrl")


@dataclass(frozen=True, slots=True)
class Node:
    """A node that is answering at `address`."""

    address: str
    services: Services
    actor: EngineActor

    @property
    def bases(self) -> tuple[BaseModelInfo, ...]:
        return tuple(self.actor.models.bases.values())


@asynccontextmanager
async def node(
    config: Config,
    on_progress: Callable[[LoadProgress], None] = lambda _: None,
    engine: Engine | None = None,
) -> AsyncIterator[Node]:
    """Opens the door and, on the way out, drains. Without an `engine` the configuration says
    which one. Raises `UserError` for a model that is not there or a data directory that another
    node holds, `OSError` for a port that is taken."""
    if config.cluster.node:
        config = replace(config, home=config.cluster.node)
    with claim(config.data):
        catalogue = Catalogue(config.data / "catalogue.sqlite")
        try:
            async with (
                _journal(config) as (journal, recovered),
                _running(
                    config,
                    catalogue,
                    journal,
                    recovered,
                    engine or _engine(config),
                    on_progress,
                ) as running,
            ):
                yield running
        finally:
            with suppress(sqlite3.Error):  # a full disk: the usage of the last seconds is lost
                catalogue.close()


@asynccontextmanager
async def _journal(config: Config) -> AsyncIterator[tuple[Journal, Recovered]]:
    if not config.journal.enabled:
        yield NullJournal(), NOTHING
        return
    journal, recovered = await DiskJournal.open(
        config.data / "journal",
        segment_bytes=config.journal.segment_bytes,
        max_bytes=config.journal.max_bytes,
    )
    if recovered.damage is not None:
        log.error("the journal has lost something: %s", recovered.damage)
    try:
        yield journal, recovered
    finally:
        await journal.aclose()


@asynccontextmanager
async def _running(
    config: Config,
    catalogue: Catalogue,
    journal: Journal,
    recovered: Recovered,
    engine: Engine,
    on_progress: Callable[[LoadProgress], None],
) -> AsyncIterator[Node]:
    kept = FsspecStorage(config.checkpoints.url) if config.checkpoints.url else None
    store = CheckpointStore(config.data / "checkpoints", kept, config.checkpoints)
    fetching = Fetching(catalogue, store)
    await sweep_strays(catalogue, store)
    # Answers are in the journal as well: they must not fill it, since no snapshot makes that room.
    kept_bytes = min(KEPT_BYTES, config.journal.max_bytes // 8)
    futures = Futures(time.monotonic, config.retention_seconds, kept_bytes, journal.forgotten)
    actor = EngineActor(
        engine,
        config.scheduler,
        catalogue,
        store,
        futures,
        journal,
        clock=time.monotonic,
        now=time.time,
        on_progress=on_progress,
        snapshots=config.data.absolute() if config.journal.enabled else None,
        securing=config.journal,
    )
    admission = Admission(
        actor, catalogue, fetching, futures, journal, config.scheduler, config.limits, now=time.time
    )
    signer = signer_of(config)
    services = Services(
        config=config,
        catalogue=catalogue,
        checkpoints=store,
        fetching=fetching,
        futures=futures,
        admission=admission,
        models=actor.models,
        status=actor.enquiries.status,
        engine_seconds=actor.enquiries.engine_seconds,
        clock=time.time,
        monotonic=time.monotonic,
        authenticator=authenticator_of(config, signer, time.time, time.monotonic),
        signer=signer,
        enquiries=actor.enquiries,
        entitlements=actor.entitlements,
        feeds=Feeds(futures, catalogue, time.time),
        meter=actor.meter,
        journal=journal,
        post=actor.post,
    )
    warn_of_keyless(config, catalogue.owners())
    tasks = Tasks(lambda name, error: None)
    try:
        await actor.start(recovered)
        admission.end_finished_sessions()
        tasks.spawn(housekeeping(catalogue, store, futures, time.time), "housekeeping")
        tasks.spawn(clean(journal), "clean the journal")
        tasks.spawn(collect(), "collect")
        tasks.spawn(
            watch_over(actor.backlog, admission, actor.leases, services, config.silence_seconds),
            "clients",
        )
        async with (
            traced(config.traces.endpoint, actor.meter, actor.enquiries, time.time),
            _door(services) as address,
        ):
            try:
                yield Node(address, services, actor)
            finally:
                if left := await admission.drain(config.drain_seconds):
                    log.warning("%d requests %s", left, _what_becomes_of_them(config))
    finally:
        await tasks.close()
        await actor.close()


def _what_becomes_of_them(config: Config) -> str:
    if config.journal.enabled:
        return "were not finished in time, and go on with the next start"
    return "were not finished in time and have failed"


def _engine(config: Config) -> Engine:
    if config.engine.kind == "fake":
        return FakeEngine([model.name for model in config.models])
    pages = config.data.absolute() / "idle"
    if config.engine.process == "child":
        implementation = f"{DeferredTorchEngine.__module__}:{DeferredTorchEngine.__name__}"
        return ProcessEngine(implementation, config.engine, config.models, pages)
    return DeferredTorchEngine(config.engine, config.models, pages)


@asynccontextmanager
async def _door(services: Services) -> AsyncIterator[str]:
    context = server_context(services.config)
    runner = build_runner(build_app(services))
    await runner.setup()
    try:
        site = web.TCPSite(
            runner,
            services.config.host,
            services.config.port,
            backlog=4096,
            ssl_context=context,
        )
        await site.start()
        host, port = runner.addresses[0][:2]
        scheme = "http" if context is None else "https"
        yield f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        await runner.cleanup()


async def serve(config: Config) -> None:
    """Serves until a signal comes. Raises what kept it from serving, then or later: a node whose
    engine is gone ends, so that whoever watches it starts another."""
    view = StartupView(config)
    stop = asyncio.Event()
    _listen_for_signals(stop)
    async with node(config, view.progress) as running:
        view.serving(running.bases, running.address)
        keep_collections_short()
        hand_over_soon()
        try:
            await first_of(running.actor.loaded(), stop.wait())
            if not stop.is_set():
                view.ready(running.address)
                await first_of(running.actor.lost(), stop.wait())
        finally:
            view.close()
        log.info("draining: new work is refused, accepted work is finished")


def keep_collections_short() -> None:
    """A full collection stops the event loop for as long as it looks: 50 to 100 ms with 2,000
    requests in flight. What is there for good, modules mostly, leaves the collector's sight, and
    the old is looked at seldom: cycles die young here, and all else goes by reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 500)


SWITCH_SECONDS = 1e-4
"""After how long a thread that computes lets another have the interpreter; Python's own is 5 ms."""


def hand_over_soon() -> None:
    """The engine's thread packs each pass and unpacks its report while the event loop answers what
    the last one brought, and the engine waits for that: a quarter to a third less with short turns,
    by marks in the actor while `benchmarks/utilization.py` ran."""
    sys.setswitchinterval(SWITCH_SECONDS)


def _listen_for_signals(stop: asyncio.Event) -> None:
    def on_signal() -> None:
        if stop.is_set():
            os._exit(130)  # A second signal: no more waiting, not even for the engine's thread.
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def run(config: Config) -> None:
    """Blocks until the server has stopped."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serve(config))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = import_module("uvloop").new_event_loop
    return factory
