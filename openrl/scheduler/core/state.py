"""The pure core: `handle(event, now)` takes what happened and answers with what to do.

The rules, each held by a test:

- one pass at a time, and none before the engine is ready;
- every submitted request is answered once, by `Resolve` or `Refuse`;
- the engine never idles while something could start;
- who goes next: `fairshare`; with whom: `planner` and `slices`; in what order: `lanes`.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from openrl.config import SchedulerConfig
from openrl.errors import Cancelled as CancelledError
from openrl.errors import NotFound, OpenRLError, OutOfMemory, ServerError, UserError
from openrl.scheduler.core import events as ev
from openrl.scheduler.core import explain, fairshare
from openrl.scheduler.core.checks import validate
from openrl.scheduler.core.company import Company
from openrl.scheduler.core.events import (
    Decision,
    Event,
    Finished,
    Item,
    Refuse,
    Resolve,
    RowProgress,
    WakeAt,
)
from openrl.scheduler.core.passes import Flight
from openrl.scheduler.core.planner import Planner
from openrl.scheduler.core.queues import Queues
from openrl.scheduler.core.requests import Request, Row
from openrl.scheduler.core.residency import Residency
from openrl.scheduler.core.settlement import settle
from openrl.scheduler.core.story import QUEUED, Chronicle, PassRecord, Statistics, StoryLine
from openrl.types import RequestId

LATE = "it was not done before the deadline that it was sent with: send it again, with more time"


class State:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.queues = Queues(config.gap_seconds, config.owner_weights, Company(config.hold_seconds))
        self.residency = Residency()
        self.planner = Planner(config, self.queues, self.residency)
        self.chronicle = Chronicle(config.pass_tokens)
        self.flight: Flight | None = None
        self._cut_short: dict[RequestId, OpenRLError] = {}
        self._asked: float | None = None
        self._held = False
        self._now = 0.0
        self._out: list[Decision] = []

    # --- the outside ---

    def handle(self, event: Event, now: float) -> list[Decision]:
        """`now` is in seconds and never goes back. Raises `AssertionError` for an event that
        the rules of `events` exclude: a bug of the caller."""
        before, self._now = self._now, max(now, self._now)
        if self._held:
            self.chronicle.idled(self._now - before)
        self._apply(event)
        self.queues.pass_gaps(self._now)
        for request in self.queues.overdue(self._now):
            self._withdraw(request, CancelledError(LATE))
        self._start()
        self._ask_for_tick()
        decisions, self._out = self._out, []
        return decisions

    def why_waiting(self, request_id: RequestId, now: float) -> str:
        """For people: what an unanswered request waits for."""
        return explain.why_waiting(self, request_id, now)

    def kept_waiting(self, request_id: RequestId) -> bool:
        """Whether others' work, or a pause, is all that keeps the request from running."""
        return explain.kept_waiting(self, request_id)

    def story(self, lane: str) -> tuple[StoryLine, ...]:
        """What happened to the requests of a model or sampling session, oldest first; as far
        back as memory is kept."""
        return self.chronicle.story(lane)

    def statistics(self) -> Statistics:
        return explain.statistics(self)

    def timeline(self) -> tuple[PassRecord, ...]:
        """The last passes, oldest first."""
        return tuple(self.chronicle.timeline)

    def validate(self) -> None:
        """Raises `AssertionError` when an invariant is broken. Slow: for tests."""
        validate(self)

    # --- events ---

    def _apply(self, event: Event) -> None:
        match event:
            case ev.Submitted(item):
                self._submit(item)
            case ev.Finished():
                self._finished(event)
            case ev.Tick():
                self._asked = None
            case ev.LaneOpened(lane, first_seq):
                self.queues.open(lane, first_seq)
            case ev.LaneClosed(lane, error):
                self._close(lane, error)
            case ev.LanePaused(lane):
                self.queues.pause(lane, True, self._now)
            case ev.LaneResumed(lane):
                self.queues.pause(lane, False, self._now)
            case ev.SeqConsumed(lane, seq_id):
                self.queues.consume(lane, seq_id, self._now)
            case ev.WeightChanged(owner, weight):
                self.queues.set_weight(owner, weight)
            case ev.Cancelled(request_id):
                if request := self.queues.requests.get(request_id):
                    self._withdraw(request, CancelledError("cancelled by its caller"))
            case ev.EngineReady(capacity):
                self.residency.report(capacity)
                for request in list(self.queues.requests.values()):
                    self._refuse_impossible(request)
            case ev.EngineLost(error):
                self._lost(error)
            case _:
                assert_never(event)

    def _submit(self, item: Item) -> None:
        request = self.queues.put(item, self._now)
        if request is not None:
            self._tell(request, QUEUED)
            self._refuse_impossible(request)
        elif item.lane in self.queues.lanes:
            message = (
                f"seq_id {item.seq_id} came after a later operation of {item.lane} had started"
            )
            self._out.append(Refuse(item.request_id, UserError(message)))
        else:
            self._out.append(Refuse(item.request_id, NotFound(f"no model {item.lane!r}")))

    def _close(self, lane: str, error: OpenRLError) -> None:
        for request in self.queues.close(lane):
            self._withdraw(request, error)

    def _withdraw(self, request: Request, error: OpenRLError) -> None:
        """Takes a request back; a part of training work that is in the engine ends first, and
        when it was the last the request is answered as usual."""
        if self.flight is not None and request in self.flight.parts:
            self._cut_short[request.id] = error
        else:
            self._refuse(request, error)

    def _refuse_impossible(self, request: Request) -> None:
        size = request.item.sample
        if size is None or self.residency.capacity is None:
            return
        need = self.residency.need(size.prompt_tokens + size.max_new_tokens)
        total = self.residency.pool(request.item.weights).total
        if need > total:
            tokens = f"{size.prompt_tokens} + {size.max_new_tokens} tokens"
            message = f"a sequence of {tokens} needs {need} KV blocks; the engine has {total}"
            self._refuse(request, OutOfMemory(message))

    def _lost(self, error: OpenRLError) -> None:
        self.flight = None
        self.residency.reset()
        for request in list(self.queues.requests.values()):
            if request.started is not None:
                request.running.clear()
                request.preempted.clear()
                self._refuse(request, error)

    # --- a pass comes back ---

    def _finished(self, event: Finished) -> None:
        flight = self.flight
        if flight is None or flight.id != event.pass_id:
            raise AssertionError(f"pass {event.pass_id} is not running")
        self.flight = None
        if event.capacity is not None:
            self.residency.report(event.capacity)
        self._settle(flight, event)
        if flight.group[1] == "sample":
            self._rows_ended(flight, event)
        else:
            self._parts_ended(flight, event)

    def _settle(self, flight: Flight, event: Finished) -> None:
        parts = settle(flight, event, self.planner.model(flight.group))
        for leaf, part in parts.items():
            fairshare.charge(leaf, part.seconds - flight.estimates.get(leaf, 0.0))
            self.chronicle.used(leaf, part.seconds, part.tokens)
        self.planner.turns.took(flight, event.seconds)
        self.chronicle.record(flight, event, parts, self._now)

    def _parts_ended(self, flight: Flight, event: Finished) -> None:
        ended: dict[RequestId, list[bool]] = {}
        for part in event.parts:
            ended.setdefault(part.request_id, []).append(part.ok)
        for request, sent in Counter(flight.parts).items():
            oks = ended.get(request.id, [])
            request.back += sent
            cut_short = self._cut_short.pop(request.id, None)
            if not all(oks) or (len(oks) == sent and not request.missing):
                self._resolve(request)
            elif len(oks) < sent:
                self._refuse(request, ServerError("the engine gave no outcome for it"))
            elif cut_short is not None:
                self._refuse(request, cut_short)

    def _rows_ended(self, flight: Flight, event: Finished) -> None:
        silent = dict(flight.rows)
        for one in event.rows:
            if row := silent.pop(one.row, None):
                self._row_reported(row, one)
        for row in silent.values():
            if request := self._request_of(row):
                self._refuse(request, ServerError("the engine lost a sequence of it"))

    def _row_reported(self, row: Row, report: RowProgress) -> None:
        request = self._request_of(row)
        if request is None:
            row.held = report.kv_blocks
            if report.ended:
                self.residency.forget_doomed(row)
            return
        self.residency.progress(row, report.new_tokens, report.kv_blocks)
        if report.ended:
            self.residency.ended(row)
            del request.running[row.id.sample]
            request.ended_rows += 1
            if not report.ok or request.ended_rows == request.rows:
                self._resolve(request)

    def _request_of(self, row: Row) -> Request | None:
        """The request that the row runs for; None when it has been answered."""
        request = self.queues.requests.get(row.id.request_id)
        return request if request and request.running.get(row.id.sample) is row else None

    # --- answers ---

    def _resolve(self, request: Request) -> None:
        self._answered(request, "done")
        self._out.append(Resolve(request.id))

    def _refuse(self, request: Request, error: OpenRLError) -> None:
        self._answered(request, f"refused: {error.message}")
        self._out.append(Refuse(request.id, error))

    def _answered(self, request: Request, how: str) -> None:
        for row in (*request.running.values(), *request.preempted.values()):
            self.residency.doom(row)
        request.running.clear()
        request.preempted.clear()
        self.queues.remove(request, self._now)
        self._cut_short.pop(request.id, None)
        self._tell(request, how)
        first = self._now if request.started is None else request.started
        self.chronicle.answered(request.share, request.item.kind, first - request.arrived)

    def _tell(self, request: Request, what: str) -> None:
        self.chronicle.tell(self._now, request.item.lane, request.id, what)

    # --- what next ---

    def _start(self) -> None:
        self._held = False
        if self.flight is not None or self.residency.capacity is None:
            return
        self.flight = self.planner.next_pass(self._now)
        if self.flight is not None:
            self.flight.waits = self._first_waits(self.flight)
            self._out.append(self.flight.order)
            self.chronicle.started(self.flight)
        else:
            self._held = any(self.queues.root.queues.values())
            self.chronicle.held(self.planner.held, self._now)

    def _first_waits(self, flight: Flight) -> tuple[float, ...]:
        """How long those requests have waited that this pass is the first to serve."""
        ids = dict.fromkeys((*(r.id for r in flight.parts), *(r.request_id for r in flight.rows)))
        served = (self.queues.requests[request] for request in ids)
        return tuple(self._now - r.arrived for r in served if r.started == flight.started)

    def _ask_for_tick(self) -> None:
        held = self.planner.held
        times = [self.queues.wake_at(), held.until if held and self.flight is None else None]
        when = min((time for time in times if time is not None), default=None)
        if when is not None and when != self._asked:
            self._asked = when
            self._out.append(WakeAt(when))
