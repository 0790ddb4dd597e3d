"""A whole server with the fake engine, on a real socket."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

from openrl.api.app import Services, build_app, build_runner
from openrl.api.auth import AnyKey
from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.config import Config, ModelSource
from openrl.engines.base import Engine
from openrl.engines.fake import FakeEngine
from openrl.futures import Futures
from openrl.journal import NullJournal
from openrl.scheduler.actor import EngineActor
from openrl.scheduler.admission import Admission

MODEL = "fake/tiny"
CONFIG = Config(models=(ModelSource(MODEL),), poll_seconds=2.0)


@dataclass(frozen=True)
class Node:
    url: str
    services: Services
    engine: Engine


@asynccontextmanager
async def serving(
    data: Path, config: Config = CONFIG, engine: Engine | None = None
) -> AsyncIterator[Node]:
    config = replace(config, data=data)
    engine = engine or FakeEngine([source.name for source in config.models])
    catalogue, store = Catalogue(None), CheckpointStore(data / "checkpoints")
    futures, journal = Futures(time.monotonic, config.retention_seconds), NullJournal()
    actor = EngineActor(
        engine, config.scheduler, catalogue, store, futures, journal, time.monotonic, time.time
    )
    admission = Admission(
        actor, catalogue, futures, journal, config.scheduler, config.limits, time.time
    )
    await actor.start()
    services = Services(
        config=config,
        catalogue=catalogue,
        checkpoints=store,
        futures=futures,
        admission=admission,
        models=actor.models,
        status=actor.status,
        engine_seconds=lambda: actor.engine_seconds,
        clock=time.time,
        authenticator=AnyKey(),
    )
    runner = build_runner(build_app(services))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield Node(f"http://{host}:{port}", services, engine)
    finally:
        await runner.cleanup()
        await actor.close()
        catalogue.close()


@contextmanager
def serving_in_a_thread(data: Path, config: Config = CONFIG) -> Iterator[str]:
    """For clients that block."""
    started: list[str] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(data, config) as node:
            started.append(node.url)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert up.wait(30), "the server did not start"
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()
