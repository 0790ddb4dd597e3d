"""Sampling end to end: clients of the SDK, a server in a process of its own, its CPU time.

    OMP_NUM_THREADS=1 python benchmarks/sampling_server.py [--quick] [--json FILE]

`clients` clients train nothing and sample `samples` sequences of `tokens` tokens each from a Qwen3
of about four million parameters, each from unnamed weights of its own, for some rounds. What
counts is sampled tokens per CPU-second of the server: the door, the scheduler and the engine,
with all of its processes. Then `singles` requests for one sequence each, with a common prefix,
at nearly the same moment, as an RL trainer's environments send them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tinker
from random_qwen3 import save_random_qwen3
from tinker import types

MODEL = "bench/qwen3-4m"


@dataclass(frozen=True)
class Server:
    url: str
    process: psutil.Process

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the process with the door and the scheduler, and of the engine's."""
        children = self.process.children(recursive=True)
        return _cpu(self.process), sum(map(_cpu, children))


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


@contextmanager
def serving(root: Path, directory: Path) -> Iterator[Server]:
    """Until its weights are there."""
    log = (root / "server.log").open("w")
    command = [
        sys.executable,
        "-c",
        "from openrl.cli import main; main()",
        "serve",
        "--port",
        "0",
        "--data",
        str(root),
    ]
    command += ["--model", f"{MODEL}={directory}", "--threads", "1", "--log-format", "json"]
    child = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
    try:
        yield Server(_address(root / "server.log"), psutil.Process(child.pid))
    finally:
        child.terminate()
        child.wait(60)


def _address(log: Path) -> str:
    for _ in range(600):
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found[0]
        time.sleep(0.1)
    raise RuntimeError(log.read_text())


def sampler_of(url: str, number: int) -> tinker.SamplingClient:
    service = tinker.ServiceClient(base_url=url, api_key=f"tml-{number}")
    training = service.create_lora_training_client(base_model=MODEL, rank=16, seed=number)
    return training.save_weights_and_get_sampling_client()


def companies(server: Server, args: argparse.Namespace) -> dict[str, float]:
    """All clients ask again as soon as all have their answers."""
    samplers = [sampler_of(server.url, i) for i in range(args.clients)]
    rng = np.random.default_rng(0)
    prompts = [types.ModelInput.from_ints(rng.integers(3, 4096, 48).tolist()) for _ in samplers]
    params = types.SamplingParams(max_tokens=args.tokens, stop=[])

    def turn() -> None:
        asked = [s.sample(p, args.samples, params) for s, p in zip(samplers, prompts, strict=True)]
        for future in asked:
            sequences = future.result().sequences
            assert [len(each.tokens) for each in sequences] == [args.tokens] * args.samples

    turn()
    return measured(server, turn, args.rounds, args.clients * args.samples * args.tokens)


def singles(server: Server, args: argparse.Namespace) -> dict[str, float]:
    """One of the weights of its own, as a trainer has."""
    sampler = sampler_of(server.url, 99)
    rng = np.random.default_rng(1)
    prefix = rng.integers(3, 4096, 64).tolist()
    tails = [rng.integers(3, 4096, 8).tolist() for _ in range(args.singles)]
    params = types.SamplingParams(max_tokens=args.tokens, stop=[])

    async def turn() -> None:
        asked = [
            sampler.sample_async(types.ModelInput.from_ints(prefix + tail), 1, params)
            for tail in tails
        ]
        answers = await asyncio.gather(*asked)
        assert all(len(one.sequences[0].tokens) == args.tokens for one in answers)
        hits = [one.prompt_cache_hit_tokens for one in answers]
        assert sum(hit == 64 for hit in hits) >= len(hits) - 1, "the prefix is computed once"

    return measured(server, lambda: asyncio.run(turn()), 1, args.singles * args.tokens)


def measured(server: Server, turn: Any, rounds: int, tokens: int) -> dict[str, float]:
    before, began = server.cpu_seconds(), time.monotonic()
    for _ in range(rounds):
        turn()
    wall = time.monotonic() - began
    door, engine = (b - a for a, b in zip(before, server.cpu_seconds(), strict=True))
    return {
        "tokens": float(rounds * tokens),
        "server_cpu_seconds": door + engine,
        "of_these_door_and_scheduler": door,
        "of_these_engine": engine,
        "wall_seconds": wall,
        "tokens_per_server_cpu_second": rounds * tokens / (door + engine),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--singles", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="two rounds, 64 singles")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.singles = 2, 64
    warnings.simplefilter("ignore")
    logging.getLogger("tinker").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shape = {"vocab": 4096, "hidden": 192, "layers": 6, "heads": 6}
        parameters = save_random_qwen3(root / "model", **shape, context=2048)
        with serving(root, root / "model") as server:
            report: dict[str, Any] = {"parameters": parameters, "load": os.getloadavg()[0]}
            report["clients"] = companies(server, args)
            report["singles"] = singles(server, args)
    for kind in ("clients", "singles"):
        rate, wall = (report[kind][k] for k in ("tokens_per_server_cpu_second", "wall_seconds"))
        part = report[kind]["of_these_engine"] / report[kind]["server_cpu_seconds"]
        print(
            f"{kind:8} {rate:8.0f} sampled tokens per server CPU-second, {part:.0%} of them the "
            f"engine's; {wall:.1f} s in all"
        )
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
