"""A server in a process of its own, for `benchmarks/api.py`; ends when its stdin closes.

    python benchmarks/api_node.py idle|torch|echo [--model NAME=PATH] [--process thread|child]

`idle` is the whole server over an engine without a model: what it costs is the API, the
scheduler and the shell. `echo` is a bare aiohttp application that answers with the body it got.
The first line on stdout is the address.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import uvloop
from aiohttp import web

from openrl import demo, threads
from openrl.config import Config, EngineConfig, Limits, ModelSource, environ
from openrl.engines.base import (
    AtomPiece,
    BaseModelInfo,
    Capacity,
    ControlPass,
    ControlReport,
    DecodePass,
    DecodeReport,
    Executed,
    LoadProgress,
    OptimPass,
    OptimReport,
    Pass,
    Report,
    RowId,
    RowReport,
    TrainPass,
    TrainReport,
    WeightsKey,
)
from openrl.server import keep_collections_short, node
from openrl.types import (
    ForwardBackwardOutput,
    OptimStepDone,
    SampledSequence,
    SampleOutput,
)

MODEL = "idle/none"
ROWS = 256


class IdleEngine:
    """Answers in the right shapes at once; a decode slice takes `step_seconds` for each step, in
    which it sleeps."""

    def __init__(self, step_seconds: float = 2e-3) -> None:
        self._step_seconds = step_seconds
        self._rows: dict[RowId, int] = {}  # tokens to go

    def describe(self) -> Sequence[BaseModelInfo]:
        return [
            BaseModelInfo(MODEL, WeightsKey(MODEL), 32768, 152_000, (1,), MODEL, 256, "none"),
        ]

    def load(self, progress: Callable[[LoadProgress], None]) -> Capacity:
        return self._capacity()

    def close(self) -> None:
        pass

    def execute(self, work: Pass) -> Executed:
        began = time.perf_counter()
        report = self._report(work)
        return Executed(report, time.perf_counter() - began, self._capacity())

    def _capacity(self) -> Capacity:
        return Capacity(1 << 20, 1 << 20, 16, ROWS, 64, 0, 1 << 30)

    def _report(self, work: Pass) -> Report:
        match work:
            case TrainPass(pieces=pieces):
                return TrainReport(tuple(_output(piece) for piece in pieces))
            case OptimPass(pieces=steps):
                return OptimReport(tuple(OptimStepDone({"grad_norm": 1.0}, 1) for _ in steps))
            case ControlPass():
                return ControlReport()
            case DecodePass():
                return self._decode(work)

    def _decode(self, work: DecodePass) -> DecodeReport:
        for row in (*work.drop, *work.preempt):
            self._rows.pop(row, None)
        prompts: Mapping = {start.request_id: SampleOutput(()) for start in work.admit}
        for start in work.admit:
            for index in start.indexes:
                self._rows[RowId(start.request_id, index)] = start.max_new_tokens
        time.sleep(self._step_seconds * work.steps)
        return DecodeReport(
            tuple(self._advance(row, work.steps) for row in list(self._rows)), prompts
        )

    def _advance(self, row: RowId, steps: int) -> RowReport:
        made = min(steps, self._rows[row])
        self._rows[row] -= made
        if self._rows[row]:
            return RowReport(row, made, 1)
        del self._rows[row]
        tokens, logprobs = np.full(made, 5, np.int32), np.full(made, -1.0, np.float32)
        return RowReport(row, made, 0, SampledSequence(tokens, logprobs, "length"))


def _output(piece: AtomPiece) -> ForwardBackwardOutput:
    outputs = tuple({"logprobs": np.full(len(d.tokens), -1.0, np.float32)} for d in piece.data)
    return ForwardBackwardOutput(outputs, {"loss:sum": 1.0, "num_tokens:sum": 1.0})


async def serve_openrl(config: Config, engine: IdleEngine | None) -> None:
    async with node(config, engine=engine) as running:
        await running.actor.loaded()
        keep_collections_short()
        print(running.address, flush=True)
        await _stdin_closed()


async def serve_echo() -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read(), content_type=request.content_type)

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.post("/{path:.*}", echo)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    print(f"http://{host}:{port}", flush=True)
    await _stdin_closed()
    await runner.cleanup()


async def _stdin_closed() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("idle", "torch", "echo"))
    parser.add_argument("--model", help="NAME=PATH; the demo model when left out")
    parser.add_argument("--process", choices=("thread", "child"), default=None)
    parser.add_argument("--switch-interval", type=float, default=None, help="seconds")
    given = parser.parse_args()
    if given.switch_interval is not None:
        sys.setswitchinterval(given.switch_interval)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if given.kind == "echo":
            runner.run(serve_echo())
            return
        name, _, path = (given.model or f"{demo.NAME}={demo.model_directory()}").partition("=")
        with tempfile.TemporaryDirectory() as data:
            options = {} if given.process is None else {"process": given.process}
            config = Config(
                models=(ModelSource(name, Path(path)),),
                port=0,
                data=Path(data),
                drain_seconds=0.0,
                engine=EngineConfig(kind="torch", **options),
                limits=Limits(),
            )
            config = threads.settle(config, environ)
            engine = IdleEngine() if given.kind == "idle" else None
            runner.run(serve_openrl(config, engine))


if __name__ == "__main__":
    main()
