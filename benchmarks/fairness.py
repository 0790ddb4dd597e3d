"""How fair the scheduler is, and what that costs, on a simulated engine and clock.

    python benchmarks/fairness.py [--seconds 300] [--owners 2000]

Each scenario drives the real core with clients that send their next request when the last was
answered. Printed for each:

    Jain      index of the owners' engine seconds per weight, over those that always have work
              (1 is perfectly fair; 1/n is one owner with everything)
    wait      the worst wait of a newcomer for its first service, beside the stated bound: the
              running pass, and one turn of each other owner with work
    lost      engine time lost to fairness: the part of it that went into work (not into the
              overhead of passes), below that of a global first-come-first-served queue that
              fills its passes with whatever fits, with the same clients
    decision  median and 99th percentile of the time for one event, in milliseconds
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from openrl.config import SchedulerConfig
from openrl.engines.base import Capacity, RowId, WeightsKey
from openrl.scheduler.core import events as ev
from openrl.scheduler.core.state import State
from openrl.types import OwnerId, RequestId, SessionId

BASE = WeightsKey("base")
BLOCK = 16


# --- the engine -----------------------------------------------------------------------------


@dataclass
class Engine:
    """A small GPU: 20,000 tokens per second in training, 10 ms of overhead per pass."""

    blocks: int = 60_000
    max_rows: int = 256
    items: dict[RequestId, ev.Item] = field(default_factory=dict)
    rows: dict[RowId, list[int]] = field(default_factory=dict)  # [tokens held, tokens to go]
    preempted: dict[RowId, list[int]] = field(default_factory=dict)

    def capacity(self) -> Capacity:
        held = sum(-(-row[0] // BLOCK) for row in self.rows.values())
        return Capacity(self.blocks, self.blocks - held, BLOCK, self.max_rows, 8, 0, 0)

    def execute(self, order: ev.Start) -> ev.Finished:
        match order:
            case ev.StartTrain(_, _, atoms):
                tokens = sum(self.items[request].atoms[index] for request, index in atoms)
                return self._ended(order, [r for r, _ in atoms], 0.010 + tokens / 20_000)
            case ev.StartOptim(_, _, requests):
                return self._ended(order, requests, 0.004 + 0.002 * len(requests))
            case ev.StartControl(_, _, request):
                return self._ended(order, [request], 0.05)
            case ev.StartDecode():
                return self._decode(order)

    def _ended(self, order: ev.Start, requests: Iterable[RequestId], seconds: float) -> ev.Finished:
        parts = tuple(ev.PartEnded(request, True) for request in requests)
        return ev.Finished(order.pass_id, seconds, self.capacity(), parts)

    def _decode(self, order: ev.StartDecode) -> ev.Finished:
        for gone in order.drop:
            self.rows.pop(gone, None)
            self.preempted.pop(gone, None)
        for out in order.preempt:
            self.preempted[out] = self.rows.pop(out)
        prefilled = 0
        for back in order.resume:
            self.rows[back] = self.preempted.pop(back)
            prefilled += self.rows[back][0]
        for request, indexes in order.admit:
            size = self.items[request].sample
            assert size is not None
            prefilled += size.prompt_tokens
            for index in indexes:
                self.rows[RowId(request, index)] = [size.prompt_tokens, size.max_new_tokens]
        progress, made = [], 0
        for row_id, row in list(self.rows.items()):
            new = min(order.steps, row[1])
            row[0], row[1], made = row[0] + new, row[1] - new, made + new
            held = 0 if row[1] == 0 else -(-row[0] // BLOCK)
            progress.append(ev.RowProgress(row_id, new, held, row[1] == 0))
            if row[1] == 0:
                del self.rows[row_id]
        seconds = 0.005 + order.steps * 0.008 + made * 3e-5 + prefilled / 50_000
        return ev.Finished(order.pass_id, seconds, self.capacity(), rows=tuple(progress))


def overhead(order: ev.Start) -> float:
    """Seconds of a pass that do not depend on how much it holds."""
    match order:
        case ev.StartTrain():
            return 0.010
        case ev.StartOptim():
            return 0.004
        case ev.StartControl():
            return 0.0
        case ev.StartDecode():
            return 0.005


# --- the clients ----------------------------------------------------------------------------

Make = Callable[[str, int], list[ev.Item]]
"""The requests of a lane's next turn, from its name and the next seq_id."""


@dataclass
class Client:
    """One lane. `turns` are sent at once and kept up; a newcomer comes at `since`."""

    lane: str
    owner: str
    make: Make
    turns: int = 1
    think: float = 0.0
    since: float = 0.0
    weight: float = 1.0
    seq: int = 1
    open_requests: int = 0


def item(
    client: Client,
    seq: int,
    kind: ev.Kind,
    atoms: tuple[int, ...] = (),
    size: ev.SampleSize | None = None,
) -> ev.Item:
    request = RequestId(f"{client.lane}:{seq}")
    session = SessionId(client.owner)
    return ev.Item(
        request, OwnerId(client.owner), session, client.lane, seq, kind, BASE, atoms, size
    )


def trainer(lane: str, owner: str, atoms: tuple[int, ...], **options: float) -> Client:
    """Sends forward_backward and optim_step together, as training loops do."""

    def make(_: str, seq: int) -> list[ev.Item]:
        return [item(client, seq, "forward_backward", atoms), item(client, seq + 1, "optim_step")]

    client = Client(lane, owner, make, **options)  # type: ignore[arg-type]
    return client


def sampler(lane: str, owner: str, prompt: int, rows: int, new: int, **options: float) -> Client:
    def make(_: str, seq: int) -> list[ev.Item]:
        return [item(client, seq, "sample", size=ev.SampleSize(prompt, rows, new))]

    client = Client(lane, owner, make, **options)  # type: ignore[arg-type]
    return client


# --- schedulers -----------------------------------------------------------------------------


class FirstComeFirstServed:
    """The rival: one queue for all; a pass takes the oldest head, and of its kind whatever
    else fits. Training only."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._lanes: dict[str, list[ev.Item]] = {}
        self._heads: OrderedDict[str, int] = OrderedDict()  # lane: atoms sent of its head
        self._flight: list[str] | None = None
        self._ids = count(1)

    def handle(self, event: ev.Event, now: float) -> list[ev.Decision]:
        out: list[ev.Decision] = []
        match event:
            case ev.Submitted(one):
                queue = self._lanes.setdefault(one.lane, [])
                queue.append(one)
                if len(queue) == 1:
                    self._heads[one.lane] = 0
            case ev.Finished():
                self._return(out)
        if self._flight is None and self._heads:
            out.append(self._start())
        return out

    def _return(self, out: list[ev.Decision]) -> None:
        lanes, self._flight = self._flight or [], None
        for lane in dict.fromkeys(lanes):
            queue = self._lanes[lane]
            if self._heads[lane] >= max(1, len(queue[0].atoms)):
                out.append(ev.Resolve(queue.pop(0).request_id))
                del self._heads[lane]
                if queue:
                    self._heads[lane] = 0

    def _start(self) -> ev.Start:
        lead = self._lanes[next(iter(self._heads))][0].kind
        tokens, budget = 0, int(20_000 * (self._config.quantum_seconds - 0.01))
        taken: list[tuple[str, ev.Item, int]] = []
        for lane, sent in self._heads.items():
            head = self._lanes[lane][0]
            if head.kind != lead or len(taken) >= 2000:
                continue
            for index in range(sent, max(1, len(head.atoms))):
                size = head.atoms[index] if head.atoms else budget // 100
                if taken and tokens + size > budget:
                    break
                tokens += size
                taken.append((lane, head, index))
            if tokens >= budget:
                break
        for lane, _, index in taken:
            self._heads[lane] = index + 1
        self._flight = [lane for lane, _, _ in taken]
        pass_id = ev.PassId(next(self._ids))
        if lead == "optim_step":
            return ev.StartOptim(pass_id, BASE, tuple(one.request_id for _, one, _ in taken))
        return ev.StartTrain(pass_id, BASE, tuple((one.request_id, i) for _, one, i in taken))


# --- the run --------------------------------------------------------------------------------


@dataclass
class Run:
    """A simulation. `first_waits` are of newcomers, from arrival to the pass that serves them."""

    clients: list[Client]
    core: State | FirstComeFirstServed
    engine: Engine = field(default_factory=Engine)
    now: float = 0.0
    useful: float = 0.0
    busy: float = 0.0
    longest_pass: float = 0.0
    decisions: list[float] = field(default_factory=list)
    first_waits: dict[str, float] = field(default_factory=dict)
    _by_lane: dict[str, Client] = field(default_factory=dict)
    _agenda: list[tuple[float, int, Client | ev.Finished | None]] = field(default_factory=list)
    _order: Iterable[int] = field(default_factory=count)

    def seconds(self, seconds: float) -> Run:
        self._by_lane = {client.lane: client for client in self.clients}
        self._send(ev.EngineReady(self.engine.capacity()))
        for client in self.clients:
            if not isinstance(client.make(client.lane, 0)[0].sample, ev.SampleSize):
                self._send(ev.LaneOpened(client.lane, 1))
            self._at(client.since, client)
        while self._agenda and self._agenda[0][0] <= seconds:
            self.now, _, what = heappop(self._agenda)
            if isinstance(what, Client):
                for _ in range(what.turns if what.seq == 1 else 1):
                    self._turn(what)
            else:
                self._send(what or ev.Tick())
        return self

    def _at(self, when: float, what: Client | ev.Finished | None) -> None:
        heappush(self._agenda, (when, next(iter(self._order)), what))

    def _turn(self, client: Client) -> None:
        items = client.make(client.lane, client.seq)
        client.seq += len(items)
        for one in items:
            self.engine.items[one.request_id] = one
            self._send(ev.Submitted(one))

    def _send(self, event: ev.Event) -> None:
        began = time.perf_counter()
        decisions = self.core.handle(event, self.now)
        self.decisions.append(time.perf_counter() - began)
        for decision in decisions:
            match decision:
                case ev.Resolve(request_id):
                    self._answered(request_id)
                case ev.Refuse(_, error):
                    raise error
                case ev.WakeAt(when):
                    self._at(when, None)
                case _:
                    self._execute(decision)

    def _answered(self, request_id: RequestId) -> None:
        one = self.engine.items.pop(request_id)
        client = self._by_lane[one.lane]
        if one.kind != "forward_backward":  # the last of its turn
            self._at(self.now + client.think * random.random(), client)

    def _execute(self, order: ev.Start) -> None:
        for request in _requests(order):
            client = self._by_lane[request.rsplit(":", 1)[0]]
            self.first_waits.setdefault(client.lane, self.now - client.since)
        done = self.engine.execute(order)
        self.useful += done.seconds - overhead(order)
        self.busy += done.seconds
        self.longest_pass = max(self.longest_pass, done.seconds)
        self._at(self.now + done.seconds, done)


def _requests(order: ev.Start) -> list[RequestId]:
    match order:
        case ev.StartTrain(_, _, atoms):
            return [request for request, _ in atoms]
        case ev.StartOptim(_, _, requests):
            return list(requests)
        case ev.StartControl(_, _, request):
            return [request]
        case ev.StartDecode():
            return [request for request, _ in order.admit]


# --- scenarios ------------------------------------------------------------------------------


def newcomers(seconds: float) -> list[Client]:
    """Owners that come one after the other while everybody else is busy."""
    times = [seconds * (0.3 + 0.06 * index) for index in range(10)]
    return [
        trainer(f"new{i}", f"new{i}", (64,), since=when, think=1e9) for i, when in enumerate(times)
    ]


def flood(owners: int) -> list[Client]:
    """One owner keeps 10,000 requests queued in 100 lanes; the others have one small each."""
    loud = [trainer(f"loud{i}", "loud", (512,), turns=50) for i in range(100)]
    return loud + [trainer(f"m{i}", f"o{i}", (256,)) for i in range(owners)]


def huge_and_tiny(owners: int) -> list[Client]:
    """Every tenth owner sends batches of 64 atoms, the others single short sequences."""
    return [
        trainer(f"m{i}", f"o{i}", (1024,) * 64 if i % 10 == 0 else (64,), turns=2)
        for i in range(owners)
    ]


def weights(owners: int) -> list[Client]:
    """Three owners of weights 1, 2, 4, with as many lanes each."""
    return [
        trainer(f"{owner}{i}", owner, (256,) * 2, turns=2, weight=weight)
        for owner, weight in {"a": 1.0, "b": 2.0, "c": 4.0}.items()
        for i in range(max(8, owners // 30))
    ]


def mixed(owners: int) -> list[Client]:
    """As many samplers as trainers, all with more than the engine can do."""
    half = min(owners, 60) // 2
    train = [trainer(f"m{i}", f"t{i}", (1024,) * 4, turns=2) for i in range(half)]
    return train + [sampler(f"s{i}", f"s{i}", 200, 8, 128, turns=4) for i in range(half)]


SCENARIOS = {
    "flood": flood,
    "huge and tiny": huge_and_tiny,
    "weights 1:2:4": weights,
    "samplers and trainers": mixed,
}


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def report(name: str, owners: int, seconds: float) -> None:
    make = SCENARIOS[name]
    random.seed(0)
    clients = make(owners)
    by_owner = {client.owner: client.weight for client in clients}
    config = SchedulerConfig(owner_weights=by_owner)
    run = Run([*clients, *newcomers(seconds)], State(config)).seconds(seconds)
    assert isinstance(run.core, State)
    accounts = run.core.statistics().accounts
    used = [
        accounts["owner", owner].engine_seconds / by_owner[owner]
        for owner in by_owner
        if ("owner", owner) in accounts
    ]
    used += [0.0] * (len(by_owner) - len(used))
    waits = [wait for lane, wait in run.first_waits.items() if lane.startswith("new")]
    total = sum(by_owner.values())
    bound = run.longest_pass * (1 + min(len(by_owner), total))
    lost = "-"
    if all(not isinstance(one.make(one.lane, 0)[0].sample, ev.SampleSize) for one in clients):
        rival = Run([*make(owners), *newcomers(seconds)], FirstComeFirstServed(config)).seconds(
            seconds
        )
        lost = f"{1 - run.useful / run.busy / (rival.useful / rival.busy):.1%}"
    times = statistics.quantiles(run.decisions, n=100)
    print(
        f"{name:24} owners {len(by_owner):5}  Jain {jain(used):.3f}  "
        f"wait {max(waits, default=0):6.2f} s of {bound:7.1f} s  lost {lost:>6}  "
        f"busy {run.busy / seconds:4.0%}  decision {times[49] * 1e3:.3f} / {times[98] * 1e3:.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--owners", type=int, default=2000)
    options = parser.parse_args()
    for name in SCENARIOS:
        report(name, options.owners, options.seconds)


if __name__ == "__main__":
    main()
