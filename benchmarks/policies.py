"""What the scheduler's rules are worth, on a simulated engine and clock: exact, without noise.

    python benchmarks/policies.py [--jobs 1 2 3 6] [--ratios 0 0.25 1 1.73 3] [--seconds 120]

Drives the real core with the loops of `utilization.py` (sampler, samples, environment,
forward_backward and optim_step) on an engine whose passes cost what was measured there. So two
versions of a rule can be compared within seconds, to the last digit. What it can't see: what
passes cost that are unlike the measured ones, and the machine's other work.

    U        goodput: (sampled / R_s + trained / R_t) / wall, R_s and R_t of one job alone
    step     mean seconds of a step, and how much longer than alone
    busy     part of the wall in which the engine computed
    jobs     models in a pass of sampling and of training, by engine time
    spread   of the jobs' steps: the most over the least
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from facts import RESULTS, facts
from utilization_timeline import goodput

from openrl.config import SchedulerConfig
from openrl.engines.base import Capacity, RowId, WeightsKey
from openrl.scheduler.core import events as ev
from openrl.scheduler.core.packing import cut_atoms
from openrl.scheduler.core.state import State
from openrl.types import OwnerId, RequestId, SessionId

BASE = WeightsKey("base")
MODES = ("fused", "separate", "in_turn")
BLOCK = 16
WARM = 10.0
"""Seconds that are not counted: the cost model learns, loops fall into step or out of it."""


@dataclass(frozen=True)
class Costs:
    """Seconds: of a slice by 1, steps, tokens made, tokens prefilled; of a pass of training by 1,
    tokens, models; of optim_steps by 1, models; of a control operation; `handover` is what goes
    by between two passes, `trip` what a round trip costs a client beside the engine."""

    sample: tuple[float, float, float, float]
    train: tuple[float, float, float]
    optim: tuple[float, float]
    control: float
    handover: float = 2e-3
    trip: float = 7e-3


ENGINES = {
    # The demo model on one core of an EPYC: fitted to the passes of utilization.json.
    "cpu": Costs((3e-3, 2.8e-3, 6.5e-5, 1.9e-4), (1.64e-2, 1.26e-4, 1e-3), (4e-4, 1.1e-4), 1.2e-3),
}


@dataclass
class Engine:
    """Rows hold tokens made and to be made; `lengths` decides where a row ends."""

    costs: Costs
    items: dict[RequestId, ev.Item] = field(default_factory=dict)
    lengths: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[RowId, list[int]] = field(default_factory=dict)

    def capacity(self) -> Capacity:
        return Capacity(1 << 20, 1 << 20, BLOCK, 4096, 8, 0, 0)

    def execute(self, order: ev.Start) -> ev.Finished:
        costs = self.costs
        match order:
            case ev.StartTrain(_, _, atoms):
                tokens = sum(self.items[request].atoms[index] for request, index in atoms)
                models = len({self.items[request].lane for request, _ in atoms})
                return self._ended(order, [r for r, _ in atoms], costs.train, 1, tokens, models)
            case ev.StartOptim(_, _, requests):
                return self._ended(order, requests, costs.optim, 1, len(requests))
            case ev.StartControl(_, _, request):
                return self._ended(order, [request], (costs.control,), 1)
            case ev.StartDecode():
                return self._decode(order)

    def _ended(
        self, order: ev.Start, requests: Iterable[RequestId], costs: Sequence[float], *by: float
    ) -> ev.Finished:
        parts = tuple(ev.PartEnded(request, True) for request in requests)
        return ev.Finished(order.pass_id, _dot(costs, by), self.capacity(), parts)

    def _decode(self, order: ev.StartDecode) -> ev.Finished:
        for gone in (*order.drop, *order.preempt):
            self.rows.pop(gone, None)
        prefilled = 0
        for request, indexes in order.admit:
            size = self.items[request].sample
            assert size is not None
            prefilled += size.prompt_tokens
            for index in indexes:
                self.rows[RowId(request, index)] = [0, self.lengths[request][index]]
        progress, made, steps = [], 0, 0
        for row, (had, to_go) in list(self.rows.items()):
            new = min(order.steps, to_go)
            self.rows[row] = [had + new, to_go - new]
            made, steps = made + new, max(steps, new)
            progress.append(ev.RowProgress(row, new, 0 if new == to_go else 1, new == to_go))
            if new == to_go:
                del self.rows[row]
        seconds = _dot(self.costs.sample, (1, steps, made, prefilled))
        return ev.Finished(order.pass_id, seconds, self.capacity(), rows=tuple(progress))


def _dot(weights: Sequence[float], features: Sequence[float]) -> float:
    return sum(w * x for w, x in zip(weights, features, strict=True))


@dataclass
class Loop:
    """One job: an owner, a model and, for each step, a sampler. `prompts` requests of `samples`
    rows. Answers end geometrically, at `most` tokens at the latest, as the demo model's do."""

    name: str
    think: float
    prompts: int = 2
    samples: int = 8
    prompt: int = 32
    most: int = 32
    mean: float = 12.0
    seq: int = 0
    step: int = 0
    begun: float = 0.0
    waits_for: int = 0
    answers: list[int] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)  # (ended, seconds)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.name)

    def sampler(self) -> list[ev.Item]:
        return [self._item("control")]

    def sample(self) -> Iterator[tuple[ev.Item, tuple[int, ...]]]:
        self.answers = []
        for number in range(self.prompts):
            lengths = tuple(self._length() for _ in range(self.samples))
            self.answers += lengths
            size = ev.SampleSize(self.prompt, self.samples, self.most)
            lane = f"{self.name}-s{self.step}"
            yield self._made(lane, number, "sample", (), size), lengths

    def train(self) -> list[ev.Item]:
        sizes = [self.prompt + length - 1 for length in self.answers]
        cuts = cut_atoms(sizes, SchedulerConfig().atom_tokens)
        atoms = tuple(sum(sizes[start:stop]) for start, stop in cuts)
        return [self._item("forward_backward", atoms), self._item("optim_step")]

    def _length(self) -> int:
        return min(self.most, 1 + int(self._chance.expovariate(1 / self.mean)))

    def _item(self, kind: ev.Kind, atoms: tuple[int, ...] = ()) -> ev.Item:
        self.seq += 1
        return self._made(self.name, self.seq, kind, atoms, None)

    def _made(
        self, lane: str, seq: int, kind: ev.Kind, atoms: tuple[int, ...], size: ev.SampleSize | None
    ) -> ev.Item:
        request, owner = RequestId(f"{lane}:{seq}"), OwnerId(self.name)
        return ev.Item(request, owner, SessionId(self.name), lane, seq, kind, BASE, atoms, size)


@dataclass
class Run:
    """`tokens` are sampled and trained ones of passes that ended in the counted time."""

    loops: list[Loop]
    core: State
    engine: Engine
    now: float = 0.0
    busy: float = 0.0
    tokens: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seconds_by_kind: dict[str, float] = field(default_factory=dict)
    _agenda: list[tuple[float, int, object]] = field(default_factory=list)
    _order: Iterator[int] = field(default_factory=count)

    def run(self, seconds: float) -> Run:
        self._send(ev.EngineReady(self.engine.capacity()))
        for number, loop in enumerate(self.loops):
            self._send(ev.LaneOpened(loop.name, 1))
            self._at(0.037 * number, (self._begin, loop))
        while self._agenda and self._agenda[0][0] <= seconds + WARM:
            self.now, _, what = heappop(self._agenda)
            if isinstance(what, tuple):
                what[0](*what[1:])
            else:
                self._send(what)  # type: ignore[arg-type]
        return self

    def _at(self, when: float, what: object) -> None:
        heappush(self._agenda, (when, next(self._order), what))

    # --- a job ---

    def _begin(self, loop: Loop) -> None:
        loop.begun, loop.step = self.now, loop.step + 1
        self._submit(loop, loop.sampler())

    def _submit(self, loop: Loop, items: Iterable[ev.Item]) -> None:
        for item in items:
            loop.waits_for += 1
            self.engine.items[item.request_id] = item
            self._send(ev.Submitted(item))

    def _sample(self, loop: Loop) -> None:
        """Requests of one moment arrive a millisecond apart."""
        for number, (item, lengths) in enumerate(loop.sample()):
            self.engine.lengths[item.request_id] = lengths
            loop.waits_for += 1
            self.engine.items[item.request_id] = item
            self._at(self.now + 1e-3 * number, ev.Submitted(item))

    def _answered(self, request: RequestId) -> None:
        item = self.engine.items.pop(request)
        loop = next(one for one in self.loops if one.name == item.owner)
        loop.waits_for -= 1
        if loop.waits_for:
            return
        trip = self.engine.costs.trip
        match item.kind:
            case "control":
                self._at(self.now + trip, (self._sample, loop))
            case "sample":
                self._at(self.now + trip + loop.think, (self._train, loop))
            case _:
                loop.steps.append((self.now + trip, self.now + trip - loop.begun))
                self._at(self.now + trip, (self._begin, loop))

    def _train(self, loop: Loop) -> None:
        self._submit(loop, loop.train())

    # --- the core ---

    def _send(self, event: ev.Event) -> None:
        for decision in self.core.handle(event, self.now):
            match decision:
                case ev.Resolve(request):
                    self._answered(request)
                case ev.Refuse(_, error):
                    raise error
                case ev.WakeAt(when):
                    self._at(when, ev.Tick())
                case _:
                    self._execute(decision)

    def _execute(self, order: ev.Start) -> None:
        models = _models(order, self.engine)
        done = self.engine.execute(order)
        if self.now >= WARM:
            self._count(order, done, models)
        self._at(self.now + done.seconds + self.engine.costs.handover, done)

    def _count(self, order: ev.Start, done: ev.Finished, models: int) -> None:
        self.busy += done.seconds
        kind = type(order).__name__.removeprefix("Start").lower()
        self.tokens[0] += sum(row.new_tokens for row in done.rows)
        if isinstance(order, ev.StartTrain):
            self.tokens[1] += sum(self.engine.items[r].atoms[i] for r, i in order.atoms)
        if isinstance(order, ev.StartDecode):
            models = len({self.engine.items[row.row.request_id].owner for row in done.rows})
        for name, value in ((kind, done.seconds), (f"{kind} models", models * done.seconds)):
            self.seconds_by_kind[name] = self.seconds_by_kind.get(name, 0.0) + value

    def per_pass(self, kind: str) -> float:
        return self.seconds_by_kind.get(f"{kind} models", 0.0) / self.seconds_by_kind.get(kind, 1.0)


def _models(order: ev.Start, engine: Engine) -> int:
    match order:
        case ev.StartTrain(_, _, atoms):
            return len({engine.items[request].lane for request, _ in atoms})
        case ev.StartOptim(_, _, requests):
            return len(requests)
        case _:
            return 1


# --- cells ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    goodput: float
    step: float
    busy: float
    sample_jobs: float
    train_jobs: float
    spread: float


def simulate(costs: Costs, jobs: int, think: float, mode: str, seconds: float) -> Run:
    config = SchedulerConfig(sharing=mode)  # type: ignore[arg-type]
    loops = [Loop(f"job{number}", think) for number in range(jobs)]
    return Run(loops, State(config), Engine(costs)).run(seconds)


def figures(run: Run, rates: tuple[float, float], seconds: float) -> Figures:
    by_job = [[took for ended, took in loop.steps if ended >= WARM] for loop in run.loops]
    means = [sum(one) / max(1, len(one)) for one in by_job]
    return Figures(
        goodput(run.tokens[0], run.tokens[1], seconds, rates),
        sum(map(sum, by_job)) / max(1, sum(map(len, by_job))),
        run.busy / seconds,
        run.per_pass("decode"),
        run.per_pass("train"),
        max(means) / min(means),
    )


@dataclass(frozen=True)
class Alone:
    """One job that never thinks: tokens per engine second of each kind, and a step's seconds."""

    rates: tuple[float, float]
    engine: float


def alone(costs: Costs, seconds: float) -> Alone:
    run = simulate(costs, 1, 0.0, "fused", seconds)
    steps = sum(ended >= WARM for ended, _ in run.loops[0].steps)
    sampled = run.tokens[0] / run.seconds_by_kind["decode"]
    return Alone((sampled, run.tokens[1] / run.seconds_by_kind["train"]), run.busy / steps)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, default="cpu")
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2, 3, 6])
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.25, 1.0, 1.73, 3.0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=120.0)
    options = parser.parse_args()
    costs = ENGINES[options.engine]
    single = alone(costs, options.seconds)
    print(f"one job alone: {single.engine * 1e3:.0f} ms of engine time for a step")
    print(f"{'Z/G':>5} {'J':>2} {'mode':8} {'U':>6} {'step':>7} {'growth':>7} {'busy':>5} jobs")
    cells: list[dict[str, object]] = []
    for ratio in options.ratios:
        think = ratio * single.engine
        base = figures(
            simulate(costs, 1, think, "fused", options.seconds), single.rates, options.seconds
        )
        for jobs in options.jobs:
            for mode in options.modes if jobs > 1 else options.modes[:1]:
                run = simulate(costs, jobs, think, mode, options.seconds)
                f = figures(run, single.rates, options.seconds)
                cells.append({"ratio": ratio, "jobs": jobs, "mode": mode, **vars(f)})
                print(
                    f"{ratio:5.2f} {jobs:2} {mode:8} {f.goodput:6.3f} {f.step:6.3f}s"
                    f" {f.step / base.step - 1:+7.1%} {f.busy:5.0%} {f.sample_jobs:.2f}"
                    f" {f.train_jobs:.2f} {f.spread:.2f}",
                    flush=True,
                )
    path = RESULTS / f"policies-{options.engine}.json"
    path.write_text(json.dumps({**facts(), "alone": vars(single), "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    main()
