"""Words and figures about the core's state. Nothing here changes anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrl.scheduler.core import fairshare
from openrl.scheduler.core.lanes import OrderedLane
from openrl.scheduler.core.requests import Request
from openrl.scheduler.core.story import Statistics
from openrl.types import RequestId

if TYPE_CHECKING:
    from openrl.scheduler.core.state import State


def why_waiting(state: State, request_id: RequestId, now: float) -> str:
    request = state.queues.requests.get(request_id)
    if request is None:
        return "not in the queue"
    if _runs(state, request):
        return "running"
    if state.residency.capacity is None:
        return "waiting for the engine: the weights are being loaded"
    lane = state.queues.lanes.get(request.item.lane)
    if lane is not None and lane.paused:
        return "paused"
    if isinstance(lane, OrderedLane) and (before := _seq_before(lane, request)) is not None:
        return f"waiting for seq {before} of this model"
    return _capacity(state, request, now)


def kept_waiting(state: State, request_id: RequestId) -> bool:
    """Whether others' work, or a pause, is all that keeps the request from running."""
    request = state.queues.requests.get(request_id)
    if request is None or _runs(state, request):
        return False
    lane = state.queues.lanes.get(request.item.lane)
    if lane is not None and lane.paused:
        return True
    return not isinstance(lane, OrderedLane) or _seq_before(lane, request) is None


def _runs(state: State, request: Request) -> bool:
    if request.running:
        return True
    return state.flight is not None and request in state.flight.parts


def _seq_before(lane: OrderedLane, request: Request) -> int | None:
    """What must end, or arrive, before the request: an operation that runs, that waits, or
    a hole."""
    if lane.current is not None:
        return None if lane.current is request else lane.current.item.seq_id
    lowest = lane.lowest()
    if lowest is not request and lowest is not None:
        return lowest.item.seq_id
    return lane.next_seq if lane.ready_in is None else None


def _capacity(state: State, request: Request, now: float) -> str:
    owner = request.share.owner
    ahead = fairshare.ahead(state.queues.root, owner)
    seconds = (ahead + 1) * state.chronicle.mean_seconds
    if state.flight is not None:
        seconds += max(0.0, state.chronicle.mean_seconds - (now - state.flight.started))
    about = f"about {seconds:.0f} s" if seconds >= 1.0 else "less than 1 s"
    paused = "made room for others; " if request.preempted else ""
    return f"{paused}waiting for capacity: {_before(ahead)}, {about}"


def _before(owners: int) -> str:
    match owners:
        case 0:
            return "next, after the pass that runs"
        case 1:
            return "1 owner ahead"
        case _:
            return f"{owners} owners ahead"


def statistics(state: State) -> Statistics:
    requests = state.queues.requests.values()
    flying = {request.id for request in state.flight.parts} if state.flight else set()
    running = sum(1 for request in requests if request.running or request.id in flying)
    return Statistics(
        engine_ready=state.residency.capacity is not None,
        lanes=len(state.queues.lanes),
        requests_waiting=len(requests) - running,
        requests_running=running,
        rows_running=state.residency.rows,
        rows_preempted=sum(len(request.preempted) for request in requests),
        passes=dict(state.chronicle.passes),
        engine_seconds=state.chronicle.engine_seconds,
        idle_runnable_seconds=state.chronicle.idle_runnable_seconds,
        holds=state.chronicle.holds,
        held_seconds=state.chronicle.held_seconds,
        accounts=state.chronicle.accounts(),
    )
