"""What the journal costs: bytes per second, the wait for a group commit, and the time to open.

OMP_NUM_THREADS=1 python benchmarks/journal.py [--directory DIR] [--mib 1024] [--json FILE]

append   works of 64 datums of 256 tokens, flushed after each 16: MB/s, of that the encoding on
         the event loop; beside the same bytes written to one file and synced as often.
commit   1, 16 and 256 appenders of small works, each waiting for its own: p50 and p99.
open     the first time a log of that size is read (the system may have it in memory).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from openrl.journal import DiskJournal
from openrl.types import (
    AdamParams,
    CreateModel,
    Datum,
    ForwardBackward,
    LoraConfig,
    ModelCreated,
    ModelId,
    Operation,
    OptimStep,
    OptimStepDone,
    OwnerId,
    RequestId,
    SessionId,
    Work,
)

RESULTS = Path(__file__).parent / "results" / "journal.json"
DATUMS, TOKENS = 64, 256
TOGETHER = 16
APPENDERS = (1, 16, 256)
COMMITS = 2048

Row = dict[str, Any]


def work(model: str, seq: int, operation: Operation) -> Work:
    name = RequestId(f"{model}:{seq}")
    return Work(name, OwnerId("alice"), SessionId("s"), model, seq, operation)


def batch() -> ForwardBackward:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, (DATUMS, TOKENS))
    weights = rng.random((DATUMS, TOKENS), np.float32)
    data = tuple(
        Datum(row.astype(np.int32), {"target_tokens": row, "weights": each})
        for row, each in zip(ids, weights, strict=True)
    )
    return ForwardBackward(data, "cross_entropy", {})


def create(journal: DiskJournal, model: str) -> None:
    first = work(model, 0, CreateModel("base", LoraConfig()))
    journal.accepted(first)
    journal.committed(first, ModelCreated(ModelId(model), "base", LoraConfig()))


async def append(directory: Path, size: int) -> Row:
    journal, _ = await DiskJournal.open(directory, max_bytes=1 << 40)
    create(journal, "s:train:0")
    operation, appended, encoding = batch(), 0, 0.0
    began = time.perf_counter()
    while journal.statistics().bytes + journal.statistics().unflushed_bytes < size:
        for _ in range(TOGETHER):
            appended += 1
            start = time.perf_counter()
            journal.accepted(work("s:train:0", appended, operation))
            encoding += time.perf_counter() - start
        await journal.flushed()
    seconds = time.perf_counter() - began
    told = journal.statistics()
    await journal.aclose()
    raw = raw_writes(directory / "raw", told.bytes // appended * TOGETHER, appended // TOGETHER)
    return {
        "mb_per_second": told.bytes / seconds / 1e6,
        "raw_mb_per_second": told.bytes / raw / 1e6,
        "encoding_ms_of_a_work": encoding / appended * 1e3,
        "bytes_of_a_work": told.bytes // appended,
        "bytes": told.bytes,
    }


def raw_writes(path: Path, size: int, count: int) -> float:
    """Seconds for `count` writes of `size` bytes, each made durable."""
    piece = os.urandom(size)
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    began = time.perf_counter()
    for _ in range(count):
        os.write(file, piece)
        os.fdatasync(file)
    seconds = time.perf_counter() - began
    os.close(file)
    path.unlink()
    return seconds


async def commit(directory: Path, appenders: int) -> Row:
    journal, _ = await DiskJournal.open(directory)
    waits: list[float] = []
    each = max(8, COMMITS // appenders)

    async def one(number: int) -> None:
        model = f"s:train:{number}"
        create(journal, model)
        await journal.flushed()
        for seq in range(1, each + 1):
            step = work(model, seq, OptimStep(AdamParams()))
            began = time.perf_counter()
            journal.accepted(step)
            journal.committed(step, OptimStepDone({}, seq))
            await journal.flushed()
            waits.append(time.perf_counter() - began)

    await asyncio.gather(*(one(number) for number in range(appenders)))
    told = journal.statistics()
    await journal.aclose()
    size = told.bytes // told.fsyncs
    raw = raw_writes(directory / "raw", size, 200) / 200
    return {
        "appenders": appenders,
        "p50_ms": float(np.percentile(waits, 50) * 1e3),
        "p99_ms": float(np.percentile(waits, 99) * 1e3),
        "commits_per_sync": len(waits) / told.fsyncs,
        "raw_sync_ms": raw * 1e3,
    }


async def opening(directory: Path) -> Row:
    size = sum(path.stat().st_size for path in directory.glob("*.log"))  # noqa: ASYNC240
    began = time.perf_counter()
    journal, recovered = await DiskJournal.open(directory, max_bytes=1 << 40)
    seconds = time.perf_counter() - began
    await journal.aclose()
    pending = sum(len(model.pending) for model in recovered.models)
    return {"bytes": size, "works": pending, "seconds": seconds}


async def run(directory: Path, size: int) -> Row:
    results: Row = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    for number, appenders in enumerate(APPENDERS):
        results.setdefault("commit", []).append(await commit(directory / str(number), appenders))
        print(results["commit"][-1])
    results["append"] = await append(directory / "append", size)
    print(results["append"])
    results["open"] = await opening(directory / "append")
    print(results["open"])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        results = asyncio.run(run(Path(directory), given.mib << 20))
    given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
