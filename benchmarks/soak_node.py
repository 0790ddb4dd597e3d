"""The server of `benchmarks/soak.py`: a real one, which also writes down what it holds.

    python benchmarks/soak_node.py DATA PORT fake|torch GAUGES

GAUGES is a file with the newest counts, replaced each second.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from pathlib import Path

import uvloop

from openrl import demo
from openrl.catalogue import catalogue
from openrl.config import Config, EngineConfig, JournalConfig, ModelSource, SchedulerConfig
from openrl.scheduler import backlog, curves, models, pins
from openrl.scheduler.core import residency, story
from openrl.server import serve

MODELS = {"fake": "fake/tiny", "torch": "openrl/sql-demo"}


def config(data: Path, port: int, engine: str) -> Config:
    """What is kept for an hour is kept for seconds here: a leak shows in minutes then."""
    if engine == "fake":
        source, engine_config = ModelSource(MODELS[engine]), EngineConfig(kind="fake")
    else:
        source = ModelSource(MODELS[engine], demo.model_directory())
        engine_config = EngineConfig(threads=1)
    return Config(
        models=(source,),
        port=port,
        data=data,
        engine=engine_config,
        scheduler=SchedulerConfig(gap_seconds=0.5),
        journal=JournalConfig(replay_seconds=2.0, segment_bytes=1 << 20, max_bytes=64 << 20),
        retention_seconds=30.0,
        silence_seconds=20.0,
        log_format="json",
    )


def forget_soon() -> None:
    """What is remembered of the last thousands is of the last dozens here, for the same reason:
    all of it is full within a minute of a start."""
    catalogue.REMEMBERED = 256
    backlog.OWNERS = residency.OWNERS = 64
    curves.MODELS = 16
    models.CLOSED_KEPT = story.ACCOUNTS = 64
    pins.REMOVED = story.TIMELINE = 256
    story.STORY = 1024


async def main(settings: Config, gauges: Path) -> None:
    watching = asyncio.create_task(_watch(gauges))
    try:
        await serve(settings)
    finally:
        watching.cancel()


async def _watch(gauges: Path) -> None:
    while True:
        await asyncio.sleep(1.0)
        told = {
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "blocks": sys.getallocatedblocks(),
        }
        fresh = gauges.with_suffix(".new")
        fresh.write_text(json.dumps(told))
        fresh.replace(gauges)


if __name__ == "__main__":
    _, where, port, engine, gauges = sys.argv
    forget_soon()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(config(Path(where), int(port), engine), Path(gauges)))
