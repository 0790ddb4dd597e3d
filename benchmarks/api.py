"""What the door, the shell and the scheduler cost, and how long a heartbeat waits.

OMP_NUM_THREADS=1 python benchmarks/api.py [--only cost,decisions,heartbeat]
    [--model NAME=PATH] [--process thread,child] [--seconds 20] [--nice -10] [--json FILE]

cost        forward_backward + optim_step, sent together as loops do, and both polls, in each
            encoding: server CPU of a turn and requests per second, over an engine without a
            model; beside a bare aiohttp application that answers the same bytes with
            themselves. The two take turns, so that a busy machine harms both alike.
decisions   time of one event in the scheduler's core with 10, 1,000 and 10,000 lanes.
heartbeat   latency of `session_heartbeat` while the unmodified SDK has 2,000 samples in
            flight, over the engine without a model and over the torch engine, busy decoding;
            beside the bare application's, which shares the machine and has nothing to do: what
            is in that figure is the machine's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from api_decisions import decision_times
from api_node import MODEL as IDLE_MODEL
from api_traffic import ENCODINGS, HEADERS, Api, Process, Shape, Trainer, api, heartbeats

from openrl import demo

HERE = Path(__file__).parent
ROUNDS = 3
SHAPES = ((Shape(1, 16), 150), (Shape(64, 256), 12))
"""With the turns of each loop in a round."""

LOOPS = 8
IN_FLIGHT = 2000
NEW_TOKENS = 64
EVERY = 0.02

Row = dict[str, Any]


@contextmanager
def server(*arguments: str, nice: int = 0) -> Iterator[Process]:
    """`nice` is inherited from here, so that only what differs is said."""
    more = nice - os.getpriority(os.PRIO_PROCESS, 0)
    prefix = ("nice", "-n", str(more)) if more else ()
    running = Process(*prefix, sys.executable, str(HERE / "api_node.py"), *arguments)
    try:
        yield running
    finally:
        running.close()


# --- cost -----------------------------------------------------------------------------------


@dataclass
class Tally:
    cpu: float = 0.0
    wall: float = 0.0
    turns: int = 0

    async def measure(
        self, running: Process, trainers: list[Trainer], turns: int, ours: bool
    ) -> None:
        bodies = [trainer.bodies(turns) for trainer in trainers]
        cpu, began = running.cpu_seconds(), time.perf_counter()
        await asyncio.gather(
            *(one.run(mine, ours) for one, mine in zip(trainers, bodies, strict=True))
        )
        self.wall += time.perf_counter() - began
        self.cpu += running.cpu_seconds() - cpu
        self.turns += turns * len(trainers)


async def cost() -> list[Row]:
    with server("idle") as ours, server("echo") as echo:
        async with api(ours.first_line) as one, api(echo.first_line) as other:
            session = await one.session()
            rows = []
            for number, encoding in enumerate(ENCODINGS):
                for shape, turns in SHAPES:
                    models = [
                        await one.model(session, 1000 * number + 100 * shape.datums + i, IDLE_MODEL)
                        for i in range(LOOPS)
                    ]
                    mine = [Trainer(one, model, encoding, shape) for model in models]
                    theirs = [Trainer(other, model, encoding, shape) for model in models]
                    rows.append(await _compared(ours, echo, mine, theirs, turns))
                    rows[-1] = {"encoding": encoding, "shape": str(shape)} | rows[-1]
                    print(_line(rows[-1]), flush=True)
            return rows


async def _compared(
    ours: Process, echo: Process, mine: list[Trainer], theirs: list[Trainer], turns: int
) -> Row:
    tally, bare = Tally(), Tally()
    for _ in range(ROUNDS):
        await tally.measure(ours, mine, turns, True)
        await bare.measure(echo, theirs, turns, False)
    return {
        "cpu_ms_per_turn": round(1e3 * tally.cpu / tally.turns, 2),
        "echo_cpu_ms_per_turn": round(1e3 * bare.cpu / bare.turns, 2),
        "requests_per_second": round(4 * tally.turns / tally.wall),
        "echo_requests_per_second": round(4 * bare.turns / bare.wall),
        "load": _load(),
    }


# --- heartbeat ------------------------------------------------------------------------------


async def heartbeat(kind: str, model: str, seconds: float, nice: int, *options: str) -> Row:
    with server(kind, *options, nice=nice) as ours, server("echo", nice=nice) as echo:
        async with api(ours.first_line) as one, api(echo.first_line) as other:
            beat = json.dumps({"session_id": await one.session()}).encode()
            quiet = await _both(one, other, beat, min(5.0, seconds))
            load = Process(
                sys.executable,
                str(HERE / "api_load.py"),
                ours.first_line,
                model,
                str(IN_FLIGHT),
                str(NEW_TOKENS),
            )
            waiting = await _all_in_flight(one)
            cpu = ours.cpu_seconds()
            busy, floor = await _both(one, other, beat, seconds)
            cpu = (ours.cpu_seconds() - cpu) / seconds
            waiting = [waiting, await _waiting(one)]
            done = load.close()
    # Names alone: paths are of the machine.
    row = {"engine": kind, "model": model, "options": [o.partition("=")[0] for o in options]}
    row |= {"heartbeats": len(busy), "in_flight": waiting, "samples_done": int(done or 0)}
    for name, latencies in (("", busy), ("floor_", floor), ("quiet_", quiet[0])):
        p50, p99, most = np.percentile(latencies, [50, 99, 100]) * 1e3
        row |= {f"{name}p50_ms": _ms(p50), f"{name}p99_ms": _ms(p99), f"{name}max_ms": _ms(most)}
    row |= {"server_cores": round(cpu, 2), "load": _load()}
    print(_line(row), flush=True)
    return row


async def _both(
    one: Api, other: Api, beat: bytes, seconds: float
) -> tuple[list[float], list[float]]:
    mine, theirs = await asyncio.gather(
        heartbeats(one, beat, seconds, EVERY), heartbeats(other, beat, seconds, EVERY)
    )
    return mine, theirs


async def _all_in_flight(server: Api) -> int:
    """A slow machine takes its time to send them; what is there after a while is what counts."""
    waiting = 0
    for _ in range(45):
        await asyncio.sleep(1.0)
        waiting = await _waiting(server)
        if waiting >= 0.95 * IN_FLIGHT:
            break
    return waiting


async def _waiting(server: Api) -> int:
    """How many requests the server has accepted and not answered."""
    url = f"{server.url}/api/v1/openrl/statistics?limit=1"
    async with server.http.get(url, headers=HEADERS) as response:
        requests = (await response.json())["requests"]
    return int(requests["waiting"] + requests["running"])


def _ms(value: float) -> float:
    return round(float(value), 2)


# --- all ------------------------------------------------------------------------------------


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _line(row: Row) -> str:
    return "  ".join(f"{key} {value}" for key, value in row.items() if value not in ([], None))


def facts() -> Row:
    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, cwd=HERE).stdout.strip()

    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    dirty = bool(said("git", "status", "--porcelain", "--untracked-files=no"))
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": said("git", "rev-parse", "--short", "HEAD") + ("+" if dirty else ""),
        "command": "python benchmarks/api.py " + " ".join(sys.argv[1:]),
        "machine": {
            "cpu": names[0] if names else platform.processor(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "system": platform.system(),
        },
        "load_at_start": _load(),
    }


async def run(given: argparse.Namespace) -> Row:
    results = facts()
    parts = given.only.split(",")
    if "decisions" in parts:
        results["decisions"] = decision_times()
        for row in results["decisions"]:
            print(_line(row), flush=True)
    if "cost" in parts:
        results["cost"] = await cost()
    if "heartbeat" in parts:
        model = given.model or f"{demo.NAME}={demo.model_directory()}"
        os.setpriority(os.PRIO_PROCESS, 0, given.nice)
        rows = [await heartbeat("idle", IDLE_MODEL, given.seconds, given.nice)]
        for where in given.process.split(",") * given.rounds:
            options = ("--model", model, "--process", where)
            name = model.partition("=")[0]
            rows.append(await heartbeat("torch", name, given.seconds, given.nice, *options))
        results["heartbeat"] = rows
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="decisions,cost,heartbeat")
    parser.add_argument("--model", help="of the torch engine; the demo model when left out")
    parser.add_argument("--process", default="thread", help="where the torch engine runs")
    parser.add_argument("--rounds", type=int, default=1, help="of the torch engine, in turn")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each heartbeat measurement")
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        help="priority of all processes in the heartbeat's part: below 0, for root, other work on "
        "the machine counts for less",
    )
    parser.add_argument("--json", type=Path, default=HERE / "results" / "api.json")
    given = parser.parse_args()
    results = asyncio.run(run(given))
    given.json.parent.mkdir(exist_ok=True)
    given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
