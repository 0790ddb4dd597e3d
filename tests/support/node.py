"""A whole server with the fake engine, on a real socket."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path

from openrl.config import Config, EngineConfig, ModelSource, SchedulerConfig
from openrl.engines.base import Engine
from openrl.server import Node, node

MODEL = "fake/tiny"
CONFIG = Config(
    models=(ModelSource(MODEL),),
    port=0,
    poll_seconds=2.0,
    drain_seconds=5.0,
    engine=EngineConfig(kind="fake"),
    scheduler=SchedulerConfig(gap_seconds=0.2),
)


@asynccontextmanager
async def serving(
    data: Path, config: Config = CONFIG, engine: Engine | None = None
) -> AsyncIterator[Node]:
    async with node(replace(config, data=data), engine=engine) as running:
        yield running


@contextmanager
def serving_in_a_thread(
    data: Path, config: Config = CONFIG, engine: Engine | None = None
) -> Iterator[str]:
    """Gives the address, for clients that block."""
    started: list[str] = []
    up = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serving(data, config, engine) as running:
            started.append(running.address)
            up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert up.wait(30), "the server did not start"
    try:
        yield started[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()
