"""A simulated engine and a driver that keeps an account of its own of what the core did.

`Engine` executes decisions by the rules of `engines.base` with made-up costs. It keeps KV
memory strictly: holding more than there is, stepping an unknown row or sending an atom out of
order raises `AssertionError`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from openrl.config import SchedulerConfig
from openrl.engines.base import Capacity, KVPool, RowId, WeightsKey
from openrl.scheduler.core import events as ev
from openrl.scheduler.core.state import State
from openrl.types import OwnerId, RequestId, SessionId

BASE = WeightsKey("base")


def capacity(blocks: int = 64, rows: int = 8, block_tokens: int = 16) -> Capacity:
    return Capacity(blocks, blocks, block_tokens, rows, 8, 0, 0)


def item(
    lane: str,
    seq: int,
    *,
    kind: ev.Kind = "forward_backward",
    owner: str | None = None,
    atoms: tuple[int, ...] = (100,),
    weights: WeightsKey = BASE,
    deadline: float | None = None,
) -> ev.Item:
    return ev.Item(
        RequestId(f"{lane}:{seq}"),
        OwnerId(owner or f"owner-{lane}"),
        SessionId(f"session-{lane}"),
        lane,
        seq,
        kind,
        weights,
        atoms if kind == "forward_backward" else (),
        None,
        deadline,
    )


def sample(
    lane: str,
    seq: int,
    *,
    owner: str | None = None,
    prompt: int = 20,
    rows: int = 1,
    new: int = 12,
    weights: WeightsKey = BASE,
    deadline: float | None = None,
) -> ev.Item:
    return ev.Item(
        RequestId(f"{lane}:{seq}"),
        OwnerId(owner or f"owner-{lane}"),
        SessionId(f"session-{lane}"),
        lane,
        seq,
        "sample",
        weights,
        (),
        ev.SampleSize(prompt, rows, new),
        deadline,
    )


@dataclass
class SimulatedRow:
    prompt: int
    left: int
    made: int = 0
    resident: bool = True

    def blocks(self, block_tokens: int) -> int:
        return -(-(self.prompt + self.made) // block_tokens) if self.resident else 0


@dataclass
class Engine:
    """`fails` says whether a part or row fails; `length` how many tokens a row will make."""

    room: Capacity
    token_seconds: float = 1e-3
    fixed_seconds: float = 5e-3
    step_seconds: float = 2e-3
    row_seconds: float = 5e-4
    fails: Callable[[], bool] = lambda: False
    length: Callable[[int], int] = lambda most: most
    items: dict[RequestId, ev.Item] = field(default_factory=dict)
    rows: dict[RowId, SimulatedRow] = field(default_factory=dict)

    def execute(self, order: ev.Start) -> ev.Finished:
        match order:
            case ev.StartTrain(pass_id, _, atoms):
                tokens = sum(self.items[request].atoms[index] for request, index in atoms)
                return self._parts(pass_id, [r for r, _ in atoms], tokens * self.token_seconds)
            case ev.StartOptim(pass_id, _, requests):
                return self._parts(pass_id, requests, len(requests) * self.fixed_seconds)
            case ev.StartControl(pass_id, _, request):
                return self._parts(pass_id, [request], self.fixed_seconds)
            case ev.StartDecode():
                return self._decode(order)

    def _parts(
        self, pass_id: ev.PassId, requests: Iterable[RequestId], seconds: float
    ) -> ev.Finished:
        parts = tuple(ev.PartEnded(request, not self.fails()) for request in requests)
        return ev.Finished(pass_id, self.fixed_seconds + seconds, self.capacity(), parts)

    def _decode(self, order: ev.StartDecode) -> ev.Finished:
        for row in order.drop:
            del self.rows[row]
        for row in order.preempt:
            assert self.rows[row].resident
            self.rows[row].resident = False
        prefilled = 0
        for row in order.resume:
            assert not self.rows[row].resident
            self.rows[row].resident = True
            prefilled += self.rows[row].prompt + self.rows[row].made
        for request, indexes in order.admit:
            size = self.items[request].sample
            assert size is not None
            prefilled += size.prompt_tokens
            for index in indexes:
                assert RowId(request, index) not in self.rows
                self.rows[RowId(request, index)] = SimulatedRow(
                    size.prompt_tokens, self.length(size.max_new_tokens)
                )
        return self._steps(order, prefilled)

    def _steps(self, order: ev.StartDecode, prefilled: int) -> ev.Finished:
        stepping = {
            row_id: row
            for row_id, row in self.rows.items()
            if row.resident and self.items[row_id.request_id].weights == order.weights
        }
        steps = min(order.steps, max((row.left for row in stepping.values()), default=0))
        progress = []
        made = {row_id: min(steps, row.left) for row_id, row in stepping.items()}
        row_steps = sum(made.values())
        for row_id, row in stepping.items():
            row.made, row.left = row.made + made[row_id], row.left - made[row_id]
        self.capacity()  # at its fullest: before the rows that ended leave
        for row_id, row in stepping.items():
            ok = not self.fails()
            ended = row.left == 0 or not ok
            held = 0 if ended else row.blocks(self.room.block_tokens)
            progress.append(ev.RowProgress(row_id, made[row_id], held, ended, ok))
            if ended:
                del self.rows[row_id]
        seconds = self.fixed_seconds + steps * self.step_seconds + row_steps * self.row_seconds
        seconds += prefilled * self.token_seconds / 4
        return ev.Finished(order.pass_id, seconds, self.capacity(), rows=tuple(progress))

    def capacity(self) -> Capacity:
        """Every memory of its own is held to strictly, and the common one by all others."""
        held: Counter[WeightsKey | None] = Counter()
        for row_id, row in self.rows.items():
            weights = self.items[row_id.request_id].weights
            pool = weights if weights in self.room.kv_pools else None
            held[pool] += row.blocks(self.room.block_tokens)
        resident = sum(1 for row in self.rows.values() if row.resident)
        assert resident <= self.room.max_rows
        totals = {key: pool.total for key, pool in self.room.kv_pools.items()}
        for key, total in (*totals.items(), (None, self.room.kv_blocks_total)):
            assert held[key] <= total, f"{held[key]} KV blocks are held of {total} of {key}"
        pools = {key: KVPool(total, total - held[key]) for key, total in totals.items()}
        free = self.room.kv_blocks_total - held[None]
        return replace(self.room, kv_blocks_free=free, kv_pools=pools)


@dataclass
class Driver:
    """Runs the core against the engine on a simulated clock; `answers` counts the answers of
    each request, `orders` holds every pass in order."""

    config: SchedulerConfig = field(default_factory=SchedulerConfig)
    engine: Engine = field(default_factory=lambda: Engine(capacity()))
    now: float = 0.0
    check: bool = True
    orders: list[ev.Start] = field(default_factory=list)
    answers: dict[RequestId, list[ev.Resolve | ev.Refuse]] = field(default_factory=dict)
    submitted: list[RequestId] = field(default_factory=list)
    wake: float | None = None
    running: ev.Finished | None = None
    ends: float = 0.0

    def __post_init__(self) -> None:
        self.state = State(self.config)

    def send(self, event: ev.Event) -> list[ev.Decision]:
        if isinstance(event, ev.Submitted):
            self.engine.items[event.item.request_id] = event.item
            self.submitted.append(event.item.request_id)
        decisions = self.state.handle(event, self.now)
        for decision in decisions:
            self._obey(decision)
        if self.check:
            self.state.validate()
        return decisions

    def _obey(self, decision: ev.Decision) -> None:
        match decision:
            case ev.Resolve(request_id) | ev.Refuse(request_id):
                self.answers.setdefault(request_id, []).append(decision)
            case ev.WakeAt(when):
                self.wake = when
            case _:
                assert self.running is None, "two passes at once"
                self.orders.append(decision)
                self.running = self.engine.execute(decision)
                self.ends = self.now + self.running.seconds

    def ready(self) -> None:
        self.send(ev.EngineReady(self.engine.capacity()))

    def open(self, *lanes: str, first_seq: int = 1) -> None:
        for lane in lanes:
            self.send(ev.LaneOpened(lane, first_seq))

    def submit(self, *items: ev.Item) -> None:
        for one in items:
            self.send(ev.Submitted(one))

    def step(self) -> bool:
        """To the next moment at which something happens; False when nothing will."""
        if self.running is not None and (self.wake is None or self.ends <= self.wake):
            self.now, done, self.running = max(self.now, self.ends), self.running, None
            self.send(done)
        elif self.wake is not None:
            self.now, self.wake = max(self.now, self.wake), None
            self.send(ev.Tick())
        else:
            return False
        return True

    def drain(self, until: float = float("inf"), most: int = 100_000) -> None:
        for _ in range(most):
            if self.now >= until or not self.step():
                return
        raise AssertionError("it never ends")

    def resolved(self) -> list[RequestId]:
        return [r for r, all_ in self.answers.items() if isinstance(all_[0], ev.Resolve)]

    def refusal(self, request_id: str) -> ev.Refuse:
        (answer,) = self.answers[RequestId(request_id)]
        assert isinstance(answer, ev.Refuse)
        return answer

    def order_of(self, lane: str) -> list[str]:
        """The lane's requests in the order of their first part."""
        seen: dict[str, None] = {}
        for order in self.orders:
            for request in requests_of(order):
                if self.engine.items[request].lane == lane:
                    seen.setdefault(request)
        return list(seen)


def requests_of(order: ev.Start) -> list[RequestId]:
    match order:
        case ev.StartTrain(_, _, atoms):
            return [request for request, _ in atoms]
        case ev.StartOptim(_, _, requests):
            return list(requests)
        case ev.StartControl(_, _, request):
            return [request]
        case ev.StartDecode():
            return [request for request, _ in order.admit]


def coin(seed: int, chance: float) -> Callable[[], bool]:
    flip = random.Random(seed)
    return lambda: flip.random() < chance
