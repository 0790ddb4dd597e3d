"""How much of an engine one, two, three and six RL jobs use together, and what each waits for it.

    OMP_NUM_THREADS=1 python benchmarks/utilization.py [--seconds 8] [--quick]
    python benchmarks/utilization.py --base-url http://HOST:PORT --api-key KEY --model NAME

Each job is a reinforcement-learning loop through the unmodified `tinker` SDK: new sampler, sample,
environment, forward_backward and optim_step. The environment only takes time: Z seconds, the same
each time or heavy-tailed (Pareto, exponent 1.5, equal mean). G is the engine's time of a step.

    U        (sampled tokens / R_s + trained tokens / R_t) / wall; R_s and R_t are what the engine
             does for one job alone at its own batch size, calibrated first. Fusing may make it
             more than 1
    busy     part of the wall in which the engine computed
    idle     part in which it did not although accepted work could have run: the server's count
    ideal    of U: min(1, n E / (E + V)); and simulated, with the costs of the measured passes

Three servers run at once and take turns, cell by cell: `fused` is the ordinary one, `separate` has
coalescing off (`scheduler.sharing`), `in_turn` drains one tenant's queue before the next one's, as
today's servers do. With `--base-url` one server is measured, whoever made it; without our
timeline what the clients see is reported.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tinker
from facts import RESULTS, facts
from utilization_ideal import Costs, Done, Loop, fit, ideal
from utilization_loops import Job, Workload, thinks
from utilization_node import ADMIN, Gpu, Timeline, serving
from utilization_plots import draw
from utilization_runs import Calibration, Cell, Ran, calibrate, run
from utilization_timeline import goodput

MODES = ("fused", "separate", "in_turn")
SOLO_BUSY = 0.35
"""What a job alone keeps busy in the cells whose throughput and step time have targets."""
IDLE_SECONDS = 2.0


@dataclass
class Contender:
    """A server under one mode, with its jobs; `timeline` None when it tells none."""

    mode: str
    jobs: list[Job]
    timeline: Timeline | None


def cells(
    modes: Sequence[str], jobs: Sequence[int], ratios: Sequence[float], found: Calibration
) -> Iterator[Cell]:
    """The ones that are compared with one another come one after the other."""
    g = found.engine
    for count in [count for count in (1, 3) if count <= max(jobs)]:
        think = found.think_for(SOLO_BUSY)
        yield Cell(modes[0], count, think / g, think, name="35% busy")
    for ratio in ratios:
        for count in jobs:
            for mode in modes if count > 1 else modes[:1]:
                yield Cell(mode, count, ratio, ratio * g)
    for count in jobs:
        yield Cell(modes[0], count, 1.0, g, heavy=True, name="heavy tail")


def contenders(stack: ExitStack, options: argparse.Namespace) -> Iterator[Contender]:
    count = max(options.jobs)
    if options.base_url:
        timeline = Timeline(options.base_url, options.api_key)
        told = timeline if timeline.is_told() else None
        keys = [options.api_key] * count
        yield Contender("given", _jobs(options.base_url, keys, options), told)
        return
    keys = [f"tml-tenant-{number}-of-a-benchmark" for number in range(count)]
    arguments = [*options.serve.split(), *(("--model", options.model) if options.model else ())]
    for mode in options.modes:
        data = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(serving(data, mode, *arguments))
        timeline = Timeline(url, ADMIN)
        assert timeline.is_told()
        yield Contender(mode, _jobs(url, keys, options), timeline)


def _jobs(url: str, keys: Sequence[str], options: argparse.Namespace) -> list[Job]:
    name = options.model.partition("=")[0] if options.model else _first_model(url, keys[0])
    return [Job(number, url, key, name, options.workload) for number, key in enumerate(keys)]


def _first_model(url: str, key: str) -> str:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    (model, *_) = service.get_server_capabilities().supported_models
    assert model.model_name is not None
    return model.model_name


# --- beside the ideal -------------------------------------------------------------------------


def beside_ideal(
    ran: Ran, found: Calibration, costs: Costs, workload: Workload
) -> dict[str, float]:
    """`formula` is min(1, n E / (E + V)); `simulated` knows no way between client and engine,
    `with_latency` has what that way takes a job alone."""
    cell = ran.cell

    def simulated(latency: float) -> float:
        def make() -> list[Loop]:
            return [
                Loop(
                    thinks(cell.think, cell.heavy, number),
                    found.answers,
                    found.trained,
                    workload.prompts * workload.prompt,
                    latency / 3,
                )
                for number in range(cell.jobs)
            ]

        def worth(done: Done) -> float:
            return goodput(done.sampled, done.trained, done.wall, found.rates)

        return worth(ideal(make, costs, worth))

    whole = found.engine + cell.think
    return {
        "formula": min(1.0, cell.jobs * found.engine / whole),
        "simulated": simulated(0.0),
        "with_latency": simulated(found.latency),
    }


# --- the whole --------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[Ran]]:
    head = facts()
    with ExitStack() as stack:
        gpu = stack.enter_context(Gpu())
        servers = {each.mode: each for each in contenders(stack, options)}
        modes = list(servers)
        first = servers[modes[0]]
        for each in servers.values():  # whatever happens once only
            for job in each.jobs:
                job.step(0.0, _Never())
        idle = idle_baseline(first, gpu)
        found = calibrate(first.jobs[0], first.timeline, options.seconds / 2)
        _say(found)
        grid = list(cells(modes, options.jobs, options.ratios, found))
        runs = []
        for cell in grid:
            server = servers[cell.mode]
            runs.append(run(cell, server.jobs[: cell.jobs], server.timeline, gpu, options.seconds))
            _line(runs[-1], found)
    reports = [one.report(found.rates) for one in runs]
    passes = [p for one in runs if one.cell.mode == modes[0] for p in one.passes or ()]
    if passes:
        costs = fit(passes)
        head["costs"] = asdict(costs)
        for one, report in zip(runs, reports, strict=True):
            if one.cell.mode == modes[0]:
                report["ideal"] = beside_ideal(one, found, costs, options.workload)
    head |= {
        "server": options.base_url or "openrl serve " + options.serve,
        "workload": asdict(options.workload),
        "idle": idle,
        "calibration": {
            "sampled_per_second": found.rates[0],
            "trained_per_second": found.rates[1],
            "engine_seconds_per_step": found.engine,
            "latency_per_step": found.latency,
        },
        "cells": reports,
    }
    head["targets"] = targets(reports)
    return head, runs


class _Never:
    """An event that is never set, for jobs that don't think."""

    def wait(self, _: float) -> bool:
        return False


def idle_baseline(server: Contender, gpu: Gpu) -> dict[str, Any]:
    """Nobody asks for anything."""
    if server.timeline is not None:
        server.timeline.read()
    begin = time.monotonic()
    time.sleep(IDLE_SECONDS)
    end = time.monotonic()
    busy = None if server.timeline is None else sum(p.seconds for p in server.timeline.read())
    return {"seconds": end - begin, "busy": busy, "gpu": gpu.means(begin, end)}


def targets(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was to be reached, and what was."""

    def one(name: str, mode: str, jobs: int, ratio: float | None = None) -> dict[str, Any] | None:
        for cell in cells:
            if (cell["name"], cell["mode"], cell["jobs"]) == (name, mode, jobs) and (
                ratio is None or cell["ratio"] == ratio
            ):
                return cell
        return None

    found: list[dict[str, Any]] = []

    def say(what: str, value: float, target: float, at_most: bool) -> None:
        met = value <= target if at_most else value >= target
        found.append({"what": what, "measured": value, "target": target, "met": met})

    fused = [c for c in cells if c["mode"] == cells[0]["mode"] and c["idle_runnable"] is not None]
    if fused:
        worst = max(c["idle_runnable"] for c in fused)
        say("engine idle while work is runnable, worst cell", worst, 0.02, True)
    if beside := [c for c in cells if "ideal" in c]:
        for kind in ("simulated", "with_latency"):
            shares = [c["goodput"] / c["ideal"][kind] for c in beside]
            say(f"goodput beside the ideal ({kind}), worst cell", min(shares), 0.95, False)
    mode = cells[0]["mode"]
    solo, three = (one("35% busy", mode, n) for n in (1, 3))
    if solo and three:
        say(
            "35% busy alone: goodput of 3 jobs over 1",
            three["goodput"] / solo["goodput"],
            2.5,
            False,
        )
        growth = three["step_seconds"] / solo["step_seconds"] - 1
        say("35% busy alone: growth of a step with 3 jobs", growth, 0.25, True)
    together, apart = (one("grid", m, 6, 1.0) for m in ("fused", "separate"))
    if together and apart:
        ratio = together["goodput"] / apart["goodput"]
        say("6 jobs, Z/G = 1: goodput over that without coalescing", ratio, 1.4, False)
    return found


def _say(found: Calibration) -> None:
    engine, beside = found.engine * 1e3, found.latency * 1e3
    print(
        f"one job alone: {found.rates[0]:.0f} sampled, {found.rates[1]:.0f} trained tokens/s; a"
        f" step takes the engine {engine:.0f} ms, and {beside:.0f} ms beside"
    )
    print(
        f"\n{'cell':10} {'mode':8} {'J':>2} {'Z/G':>5} {'U':>6} {'busy':>5} {'idle':>6}"
        f" {'tok/busy s':>10} {'step':>7} {'wait p50/p95 ms':>16} {'jobs/pass: sample train':>24}"
    )


def _line(ran: Ran, found: Calibration) -> None:
    cell, seen = ran.cell, ran.figures
    u = ran.goodput(found.rates)
    words = f"{cell.name:10} {cell.mode:8} {cell.jobs:2} {cell.ratio:5.2f} {u:6.3f}"
    if seen is None or ran.idle_runnable is None:
        print(f"{words} {'':>24} {ran.mean_step():6.2f}s", flush=True)
        return
    jobs = f"{seen.jobs.get('sample', 0):.2f} {seen.jobs.get('train', 0):.2f}"
    print(
        f"{words} {seen.busy_fraction:5.0%} {ran.idle_runnable / ran.wall:6.1%}"
        f" {seen.tokens_per_busy_second:10.0f} {ran.mean_step():6.2f}s"
        f" {seen.wait_p50 * 1e3:8.0f}/{seen.wait_p95 * 1e3:.0f} {jobs:>22}",
        flush=True,
    )


def save(report: dict[str, Any], runs: Sequence[Ran], options: argparse.Namespace) -> None:
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    raw = [
        {
            "cell": asdict(one.cell),
            "begin": one.begin,
            "end": one.end,
            "steps": [asdict(step) for step in one.steps],
            "passes": [asdict(p) for p in one.passes or ()],
        }
        for one in runs
    ]
    path = options.json.with_name(options.json.stem + "-raw.json.gz")
    path.write_bytes(gzip.compress(json.dumps(raw, separators=(",", ":")).encode(), mtime=0))
    draw(report, runs, options.json.with_suffix(".png"))


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--base-url", help="measure this server instead of starting any")
    parser.add_argument("--api-key", default="tml-tenant-of-a-benchmark", help="for --base-url")
    parser.add_argument("--model", help="NAME=PATH, or the NAME at --base-url; default: the demo's")
    parser.add_argument("--serve", default="--threads 1", help="arguments for `openrl serve`")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 3, 6])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.25, 1.0, 3.0], help="Z/G")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each cell, at least")
    parser.add_argument("--prompts", type=int, default=Workload.prompts, help="of a step")
    parser.add_argument("--samples", type=int, default=Workload.samples, help="of each prompt")
    parser.add_argument("--prompt", type=int, default=Workload.prompt, help="tokens")
    parser.add_argument("--answer", type=int, default=Workload.answer, help="tokens at most")
    parser.add_argument("--quick", action="store_true", help="two jobs, a tenth of a second each")
    parser.add_argument("--json", type=Path, default=RESULTS / "utilization.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.jobs, options.ratios, options.seconds = [1, 2], [1.0], 0.1
    options.workload = Workload(options.prompts, options.samples, options.prompt, options.answer)
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    warnings.simplefilter("ignore")
    logging.getLogger("tinker").setLevel(logging.ERROR)
    report, runs = measure(options)
    save(report, runs, options)
    print()
    for each in report["targets"]:
        sign = "met   " if each["met"] else "missed"
        print(f"{sign} {each['measured']:7.3f} (target {each['target']:g})  {each['what']}")
    os._exit(0)  # the SDK's threads have no end


if __name__ == "__main__":
    main()
