"""A server that ends itself by SIGKILL at a chosen point.

    python crash_server.py DATA PORT ENGINE POINT COUNT

ENGINE is fake, or torch with the demo model. At the COUNT-th time that POINT is reached the
process is gone, with everything that it had not written. POINT "never" is for servers that are
killed from outside.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from openrl import demo
from openrl.catalogue import Catalogue
from openrl.checkpoints import CheckpointStore
from openrl.config import Config, EngineConfig, JournalConfig, ModelSource, SchedulerConfig
from openrl.engines import snapshots
from openrl.engines.base import ControlPass, DecodePass, OptimPass, TrainPass
from openrl.engines.fake import FakeEngine
from openrl.futures import Futures
from openrl.journal import DiskJournal
from openrl.journal.files import LocalFiles
from openrl.scheduler.recovery.plans import Recovery
from openrl.scheduler.recovery.replay import Replay
from openrl.scheduler.snapshots import Snapshots
from openrl.server import run

FAKE, DEMO = "fake/tiny", "openrl/sql-demo"
PASSES: dict[str, type] = {
    "train": TrainPass,
    "optim": OptimPass,
    "control": ControlPass,
    "decode": DecodePass,
}

POINTS: dict[str, tuple[type | Any, str]] = {
    "fsync": (LocalFiles, "sync"),
    "append": (DiskJournal, "_append"),
    "outcome": (DiskJournal, "committed"),
    "answer": (Futures, "resolve"),
    "snapshot files": (snapshots, "_write"),
    "manifest": (snapshots, "_write_manifest"),
    "snapshot record": (Snapshots, "counts"),
    "publish": (CheckpointStore, "publish"),
    "row": (Catalogue, "add_checkpoint"),
    "sampler row": (Catalogue, "add_sampler"),
    "run row": (Catalogue, "add_run"),
    "revive": (Recovery, "revive"),
    "replay": (Replay, "_tell"),
}
"""Each is reached twice, "before X" and "after X"; so are the passes of the fake engine. After a
pass what it does to the model is done, and nobody has heard of it."""


class Countdown:
    def __init__(self, count: int) -> None:
        self._left = count

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def install(point: str, count: int) -> None:
    """Raises `KeyError` for a point that there is none of."""
    when, _, name = point.partition(" ")
    countdown = Countdown(count)
    if kind := PASSES.get(name):
        _surround(FakeEngine, "execute", when, lambda w: isinstance(w, kind) and countdown())
    else:
        _surround(*POINTS[name], when, lambda *_: countdown())


def _surround(owner: Any, method: str, when: str, hook: Callable[..., object]) -> None:
    original = getattr(owner, method)

    @wraps(original)
    def surrounded(*arguments: Any, **named: Any) -> Any:
        rest = arguments[1:] if isinstance(owner, type) else arguments
        if when == "before":
            hook(*rest)
        result = original(*arguments, **named)
        if when == "after":
            hook(*rest)
        return result

    setattr(owner, method, surrounded)


def config(data: Path, port: int, engine: str) -> Config:
    """Snapshots come every few steps, so that a restart has something of everything to do."""
    if engine == "fake":
        return Config(
            models=(ModelSource(FAKE),),
            port=port,
            data=data,
            engine=EngineConfig(kind="fake"),
            scheduler=SchedulerConfig(gap_seconds=0.5, atom_tokens=16),
            journal=JournalConfig(replay_seconds=2e-3, segment_bytes=1 << 16),
            log_format="json",
        )
    return Config(
        models=(ModelSource(DEMO, demo.model_directory()),),
        port=port,
        data=data,
        engine=EngineConfig(threads=1),
        scheduler=SchedulerConfig(full_models=3),
        journal=JournalConfig(replay_seconds=1.0),
        log_format="json",
    )


if __name__ == "__main__":
    _, where, port, engine, point, count = sys.argv
    if point != "never":
        install(point, int(count))
    run(config(Path(where), int(port), engine))
