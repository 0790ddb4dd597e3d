"""Calibration of one job alone, and one cell of the grid: so many jobs, thinking for so long."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from utilization_loops import Job, Step, thinks
from utilization_node import Gpu, Timeline
from utilization_timeline import Figures, Pass, figures, goodput, quantile

LEAST_STEPS = 3
"""Each job makes so many in a cell, however long that takes."""
LONGEST = 20.0
"""But it waits for them for so many seconds at most."""
APART = 0.05
"""The jobs of a cell start within this part of its time."""


@dataclass(frozen=True)
class Calibration:
    """Of one job alone: `rates` are sampled and trained tokens per second of an engine that does
    nothing else, at the job's own batch size; `engine` seconds of a step, and `latency`, what a
    step takes beside them when nobody thinks. Without a timeline the engine's seconds are the
    client's wait, and there is no latency."""

    rates: tuple[float, float]
    engine: float
    latency: float
    answers: tuple[tuple[int, ...], ...]
    trained: tuple[int, ...]

    def think_for(self, busy: float) -> float:
        """With which a job alone keeps the engine busy for that part of the time."""
        return max(0.0, self.engine / busy - self.engine - self.latency)


@dataclass(frozen=True)
class Cell:
    """`think` are mean seconds; `ratio` is the same over the engine's seconds of a step."""

    mode: str
    jobs: int
    ratio: float
    think: float
    heavy: bool = False
    name: str = "grid"


@dataclass
class Ran:
    """`idle_runnable` is the server's own count of seconds in which it did nothing although it
    could have; None without a timeline. `client_cpu` is what this process took, in seconds: the
    loops with the SDK, which share the machine with a server on it."""

    cell: Cell
    begin: float
    end: float
    steps: list[Step]
    passes: list[Pass] | None
    idle_runnable: float | None
    load: float
    client_cpu: float
    gpu: dict[str, float] = field(default_factory=dict)

    @property
    def wall(self) -> float:
        return self.end - self.begin

    @property
    def figures(self) -> Figures | None:
        return None if self.passes is None else figures(self.passes, self.begin, self.end)

    def tokens(self) -> tuple[float, float]:
        """As the clients saw them."""
        pairs = [step.tokens_in(self.begin, self.end) for step in self.steps]
        return sum(s for s, _ in pairs), sum(t for _, t in pairs)

    def goodput(self, rates: tuple[float, float]) -> float:
        if (found := self.figures) is not None:
            return goodput(found.sampled, found.trained, self.wall, rates)
        return goodput(*self.tokens(), self.wall, rates)

    def step_seconds(self) -> dict[int, list[float]]:
        """By job, of the steps that ended within the cell."""
        ended = [step for step in self.steps if self.begin <= step.updated <= self.end]
        jobs = {step.job: [] for step in self.steps}  # type: dict[int, list[float]]
        for step in ended:
            jobs[step.job].append(step.seconds)
        return jobs

    def mean_step(self) -> float:
        all_of_them = [seconds for job in self.step_seconds().values() for seconds in job]
        return sum(all_of_them) / max(len(all_of_them), 1)

    def report(self, rates: tuple[float, float]) -> dict[str, Any]:
        found = self.figures
        client = goodput(*self.tokens(), self.wall, rates)
        return {
            **vars(self.cell),
            "wall": self.wall,
            "load": self.load,
            "client_cpu": self.client_cpu / self.wall,
            "goodput": self.goodput(rates),
            "goodput_seen_by_clients": client,
            "step_seconds": self.mean_step(),
            "step_seconds_by_job": {
                job: {"steps": len(s), "mean": sum(s) / max(len(s), 1), "p95": quantile(s, 0.95)}
                for job, s in self.step_seconds().items()
            },
            "idle_runnable": None if self.idle_runnable is None else self.idle_runnable / self.wall,
            "timeline": None
            if found is None
            else {
                **vars(found),
                "busy_fraction": found.busy_fraction,
                "tokens_per_busy_second": found.tokens_per_busy_second,
            },
            "gpu": self.gpu,
        }


# --- one job alone ----------------------------------------------------------------------------


def calibrate(job: Job, timeline: Timeline | None, seconds: float) -> Calibration:
    never = threading.Event()
    for _ in range(2):
        job.step(0.0, never)  # whatever happens once only
    prompts = job.prompts()
    sampler = job.sampler()
    data = job.data(prompts, job.sample(sampler, prompts))
    sampled = _rate(lambda: _lengths(job, sampler, prompts), timeline, seconds)
    tokens = sum(datum.model_input.length for datum in data)
    trained = _rate(lambda: (job.train(data), tokens)[1], timeline, seconds)
    steps: list[Step] = []
    engine, wall = _timed(lambda: steps.append(_step(job, never)), timeline, 2 * seconds)
    count = len(steps)
    return Calibration(
        (sampled, trained),
        engine / count,
        (wall - engine) / count,
        tuple(step.lengths for step in steps),
        tuple(step.trained for step in steps),
    )


def _step(job: Job, never: threading.Event) -> Step:
    step = job.step(0.0, never)
    assert step is not None
    return step


def _lengths(job: Job, sampler: Any, prompts: Any) -> int:
    answers = job.sample(sampler, prompts)
    return sum(len(sequence.tokens) for answer in answers for sequence in answer.sequences)


def _rate(turn: Any, timeline: Timeline | None, seconds: float) -> float:
    made: list[int] = []
    engine, _ = _timed(lambda: made.append(turn()), timeline, seconds)
    return sum(made) / engine


def _timed(turn: Any, timeline: Timeline | None, seconds: float) -> tuple[float, float]:
    """Repeats `turn`; the engine's seconds, and those of the wall."""
    if timeline is not None:
        timeline.read()
    begin = time.monotonic()
    while time.monotonic() < begin + seconds:
        turn()
    wall = time.monotonic() - begin
    engine = wall if timeline is None else sum(one.seconds for one in timeline.read())
    return engine, wall


# --- a cell -----------------------------------------------------------------------------------


def run(
    cell: Cell, jobs: Sequence[Job], timeline: Timeline | None, gpu: Gpu, seconds: float
) -> Ran:
    """The measured time begins when every job has made a step. Jobs start apart, so that they
    are not in step by the benchmark's doing."""
    if timeline is not None:
        timeline.read()
    stop = threading.Event()
    threads = []
    for job in jobs:
        job.steps = []
        thinking = thinks(cell.think, cell.heavy, job.number)
        threads.append(threading.Thread(target=job.loop, args=(thinking, stop), daemon=True))
    for thread in threads:
        thread.start()
        time.sleep(APART * seconds / len(jobs))
    _until(lambda: all(job.steps for job in jobs), threads)
    before = None if timeline is None else timeline.counters()["idle_runnable_seconds"]
    begin, cpu = time.monotonic(), time.process_time()
    stop.wait(seconds)
    _until(
        lambda: all(sum(s.updated > begin for s in job.steps) >= LEAST_STEPS for job in jobs),
        threads,
    )
    end, cpu = time.monotonic(), time.process_time() - cpu
    after = None if timeline is None else timeline.counters()["idle_runnable_seconds"]
    stop.set()
    for thread in threads:
        thread.join()
    return Ran(
        cell,
        begin,
        end,
        [step for job in jobs for step in job.steps],
        None if timeline is None else timeline.read(),
        None if before is None or after is None else after - before,
        os.getloadavg()[0],
        cpu,
        gpu.means(begin, end),
    )


def _until(done: Any, threads: Sequence[threading.Thread]) -> None:
    """Raises `RuntimeError` when a loop has died."""
    begin = time.monotonic()
    while not done() and time.monotonic() < begin + LONGEST:
        if not all(thread.is_alive() for thread in threads):
            raise RuntimeError("a loop has ended with an error: see above")
        time.sleep(0.02)
