"""What the journal costs a training loop: steps per second through the server, with it and without.

OMP_NUM_THREADS=1 python benchmarks/journal_steps.py [--rounds 4] [--seconds 30] [--json FILE]

A step is a `forward_backward` of 64 sequences of 256 tokens with `importance_sampling`, and an
`optim_step`, sent together by our client. Two servers stand side by side, one with
`journal.enabled = false`; they take turns, so that what else the machine does falls on both.
`idle` is an engine without a model: all time is the server's, so it gives the milliseconds that
the journal adds to a step, not the part that it is of one. `torch` is a Qwen3 of a million
parameters, far smaller than any that is trained in earnest: the journal's part is larger here. A
turn should hold ten of its steps at least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import uvloop
from api_node import IdleEngine
from random_qwen3 import save_random_qwen3

import openrl
from openrl import demo
from openrl.config import Config, EngineConfig, JournalConfig, ModelSource
from openrl.server import keep_collections_short, node
from openrl.types import Datum

RESULTS = Path(__file__).parent / "results" / "journal_steps.json"
DATUMS, TOKENS, VOCABULARY = 64, 256, 704
MODEL = "benchmark/qwen3-1m"
WARM_STEPS = 2

Row = dict[str, Any]


async def serve(engine: str, model: Path, data: Path, journal: bool) -> None:
    config = Config(
        models=(ModelSource(MODEL, model),),
        port=0,
        data=data,
        drain_seconds=0.0,
        engine=EngineConfig(threads=1),
        journal=JournalConfig(enabled=journal),
    )
    async with node(config, engine=IdleEngine() if engine == "idle" else None) as running:
        await running.actor.loaded()
        keep_collections_short()
        print(running.address, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextmanager
def server(engine: str, model: Path, data: Path, journal: bool) -> Iterator[str]:
    arguments = ["--serve", engine, str(model), str(data), str(int(journal))]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate(timeout=120)


def batch(vocabulary: int) -> list[Datum]:
    rng = np.random.default_rng(0)
    data = []
    for row in rng.integers(2, vocabulary, (DATUMS, TOKENS + 1)):
        inputs = {
            "target_tokens": row[1:],
            "logprobs": np.full(TOKENS, -2.0, np.float32),
            "advantages": rng.standard_normal(TOKENS).astype(np.float32),
        }
        data.append(Datum(row[:-1].astype(np.int32), inputs))
    return data


class Loop:
    """One client's training, a stretch at a time."""

    def __init__(self, model: openrl.client.Model) -> None:
        self._model, self._data = model, batch(VOCABULARY)

    async def step(self) -> None:
        gradient = await self._model.forward_backward(self._data, "importance_sampling")
        done = await self._model.optim_step()
        await gradient
        await done

    async def steps_per_second(self, seconds: float) -> float:
        began, steps = time.perf_counter(), 0
        while (passed := time.perf_counter() - began) < seconds:
            await self.step()
            steps += 1
        return steps / passed


async def compare(addresses: dict[bool, str], name: str, rounds: int, seconds: float) -> Row:
    """Turns in the order with, without, without, with: a machine that gets slower favours none."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    async with (
        openrl.connect(addresses[True], "tml-benchmark") as one,
        openrl.connect(addresses[False], "tml-benchmark") as other,
    ):
        loops = {
            journal: Loop(await client.create_model(name, rank=8, seed=1))
            for journal, client in ((True, one), (False, other))
        }
        for loop in loops.values():
            for _ in range(WARM_STEPS):
                await loop.step()
        for number in range(rounds):
            for journal in (True, False) if number % 2 == 0 else (False, True):
                rates[journal].append(await loops[journal].steps_per_second(seconds))
                print(f"journal {journal}: {rates[journal][-1]:.3f} steps/s", flush=True)
    pairs = [1.0 - a / b for a, b in zip(rates[True], rates[False], strict=True)]
    return {
        "with": median(rates[True]),
        "without": median(rates[False]),
        "cost": 1.0 - median(rates[True]) / median(rates[False]),
        "milliseconds_of_a_step": 1e3 / median(rates[True]) - 1e3 / median(rates[False]),
        "cost_of_each_pair": pairs,
    }


def measured(engine: str, rounds: int, seconds: float, directory: Path) -> Row:
    path, name = demo.model_directory(), "idle/none"
    if engine == "torch":
        path, name = directory / "model", MODEL
        save_random_qwen3(path, vocab=VOCABULARY, hidden=128, layers=4, heads=4, context=TOKENS * 2)
    with ExitStack() as stack:
        addresses = {
            journal: stack.enter_context(
                server(engine, path, directory / f"{engine}-{journal}", journal)
            )
            for journal in (True, False)
        }
        return asyncio.run(compare(addresses, name, rounds, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=30.0, help="of one turn")
    parser.add_argument("--directory", type=Path, help="where journals lie; a temporary one")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        engine, model, data, journal = given.serve
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(engine, Path(model), Path(data), journal == "1"))
        return
    results: Row = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "datums": DATUMS,
        "tokens": TOKENS,
    }
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        for engine in ("idle", "torch"):
            results[engine] = measured(engine, given.rounds, given.seconds, Path(directory))
            print(engine, results[engine], flush=True)
    given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
