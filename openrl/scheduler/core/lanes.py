"""Lanes: one model's operations in order, or one sampling session's samples in any order.

The rules of an ordered lane:

- operations start in the order of `seq_id`, each after the one before it has ended;
- a hole is waited for until the lowest waiting operation is `gap` seconds old, then skipped;
- an operation below one that has started is too late;
- a consumed seq_id is passed over without waiting; a failed operation fails itself alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush

from openrl.scheduler.core.company import Habit
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.packing import Group
from openrl.scheduler.core.requests import Request
from openrl.types import RequestId


@dataclass(slots=True, eq=False)
class Lane:
    """What every lane has. `ready_in` is the group that its head is queued for, if any."""

    name: str
    share: Share
    paused: bool = False
    ready_in: Group | None = None


@dataclass(slots=True, eq=False)
class OrderedLane(Lane):
    """`gap_until` is the end of the wait for a hole that was asked for last."""

    next_seq: int = 0
    gap_until: float | None = None
    current: Request | None = None
    waiting: dict[int, Request] = field(default_factory=dict)
    consumed: set[int] = field(default_factory=set)
    habit: Habit = field(default_factory=Habit)
    _seqs: list[int] = field(default_factory=list)

    def put(self, request: Request) -> bool:
        """False when a later operation has started already."""
        seq = request.item.seq_id
        if seq < self.next_seq:
            return False
        if seq in self.waiting:
            raise AssertionError(f"{self.name} holds seq_id {seq} already")
        self.waiting[seq] = request
        heappush(self._seqs, seq)
        return True

    def consume(self, seq: int) -> None:
        if seq >= self.next_seq:
            self.consumed.add(seq)
            self._skip_consumed()

    def lowest(self) -> Request | None:
        while self._seqs and self._seqs[0] not in self.waiting:
            heappop(self._seqs)
        return self.waiting[self._seqs[0]] if self._seqs else None

    def gap_ends(self, gap: float) -> float | None:
        """When the lowest waiting operation stops waiting for a hole below it."""
        lowest = self.lowest()
        if lowest is None or lowest.item.seq_id == self.next_seq:
            return None
        return lowest.arrived + gap

    def head(self, now: float, gap: float) -> Request | None:
        """The operation that may be sent to the engine (or more of it) now."""
        if self.paused:
            return None
        if self.current is not None:
            return self.current if self.current.unsent else None
        until = self.gap_ends(gap)
        return self.lowest() if until is None or until <= now else None

    def start(self, request: Request) -> None:
        """The head begins; nothing below it can run any more."""
        seq = request.item.seq_id
        del self.waiting[seq]
        self.current = request
        self.next_seq = seq + 1
        self._skip_consumed()

    def remove(self, request: Request) -> None:
        """The operation has been answered, whether it ran or not."""
        if self.current is request:
            self.current = None
        elif self.waiting.get(request.item.seq_id) is request:
            del self.waiting[request.item.seq_id]
            self.consume(request.item.seq_id)

    @property
    def empty(self) -> bool:
        return self.current is None and not self.waiting

    def all(self) -> Iterator[Request]:
        if self.current is not None:
            yield self.current
        yield from self.waiting.values()

    def _skip_consumed(self) -> None:
        self.consumed = {seq for seq in self.consumed if seq >= self.next_seq}
        while self.next_seq in self.consumed:
            self.consumed.discard(self.next_seq)
            self.next_seq += 1


@dataclass(slots=True, eq=False)
class SampleLane(Lane):
    """`requests` are all that have not been answered; `waiting` those with rows to admit,
    first come first served, except that preempted rows come back first."""

    requests: dict[RequestId, Request] = field(default_factory=dict)
    waiting: OrderedDict[RequestId, Request] = field(default_factory=OrderedDict)

    def put(self, request: Request) -> bool:
        self.requests[request.id] = request
        self.waiting[request.id] = request
        return True

    def head(self) -> Request | None:
        if self.paused or not self.waiting:
            return None
        return next(iter(self.waiting.values()))

    def remove(self, request: Request) -> None:
        if self.requests.get(request.id) is request:
            del self.requests[request.id]
            self.waiting.pop(request.id, None)

    def all(self) -> Iterator[Request]:
        yield from self.requests.values()

    def admitted(self, request: Request) -> None:
        """A row of the request joined; the request waits on while it has others."""
        if not request.rows_wait:
            del self.waiting[request.id]

    def preempted(self, request: Request) -> None:
        self.waiting[request.id] = request
        self.waiting.move_to_end(request.id, last=False)


AnyLane = OrderedLane | SampleLane
