"""The invariants of the core, checked after every event under test."""

from __future__ import annotations

from typing import TYPE_CHECKING

from openrl.scheduler.core import fairshare
from openrl.scheduler.core.lanes import OrderedLane, SampleLane
from openrl.scheduler.core.packing import PASS_KINDS

if TYPE_CHECKING:
    from openrl.scheduler.core.fairshare import Share
    from openrl.scheduler.core.state import State


def validate(state: State) -> None:
    _requests_are_in_their_lanes(state)
    _lanes_are_filed_under_their_heads(state)
    _shares_agree(state.queues.root)
    _rows_agree(state)
    _counters_agree(state)
    _engine_is_busy_while_work_can_start(state)


def _requests_are_in_their_lanes(state: State) -> None:
    listed = {}
    for lane in state.queues.lanes.values():
        for request in lane.all():
            assert request.id not in listed, f"{request.id} is in two lanes"
            listed[request.id] = request
    for request_id, request in state.queues.requests.items():
        at_home = listed.pop(request_id, None) is request
        assert at_home or request_id in state._cut_short, f"{request_id} is in no lane"
    assert not listed, f"lanes hold answered requests: {list(listed)}"
    flying = () if state.flight is None else state.flight.parts
    assert all(request.id in state.queues.requests for request in flying)


def _lanes_are_filed_under_their_heads(state: State) -> None:
    for lane in state.queues.lanes.values():
        head = state.queues.head(lane, state._now)
        group = (head.item.weights, PASS_KINDS[head.item.kind]) if head else None
        assert lane.ready_in == group, f"{lane.name} is filed under {lane.ready_in}, not {group}"
        assert lane.share.groups == ({group} if group else set())
        if isinstance(lane, OrderedLane):
            assert all(seq >= lane.next_seq for seq in lane.waiting)
        else:
            assert {r.id for r in lane.requests.values() if r.rows_wait} == set(lane.waiting)


def _shares_agree(node: Share) -> None:
    for child in node.children.values():
        assert child.parent is node
        if child.children:
            below = {group for one in child.children.values() for group in one.groups}
            assert child.groups == below, f"{child.name}: {child.groups} is not {below}"
        for group in child.groups:
            assert child.key in node.queues[group]
        _shares_agree(child)
    for group, queue in node.queues.items():
        assert len(queue) == sum(1 for one in node.children.values() if group in one.groups)


def _rows_agree(state: State) -> None:
    residency = state.residency
    rows = list(residency.all_rows())
    assert residency.rows == len(rows)
    assert residency.growth == sum(row.growth for row in rows)
    for owner, mine in residency.running.items():
        assert mine
        assert residency.blocks[owner] == sum(row.blocks for row in mine.values())
    for weights, count in residency.counts.items():
        assert count == len(residency.rows_of(weights))
    running = {row.id for row in rows}
    listed = {
        row.id for request in state.queues.requests.values() for row in request.running.values()
    }
    assert running == listed, "rows run for nobody, or are not in the batch"
    for request in state.queues.requests.values():
        if isinstance(state.queues.lanes.get(request.item.lane), SampleLane):
            parted = len(request.running) + len(request.preempted) + request.ended_rows
            assert parted == request.next_row, f"{request.id} lost a row"
    if residency.capacity is not None:
        assert residency.rows <= residency.known.max_rows


def _counters_agree(state: State) -> None:
    samples: dict[str, int] = {}
    for request in state.queues.requests.values():
        if request.item.sample:
            owner = request.item.owner
            samples[owner] = samples.get(owner, 0) + 1
    assert state.queues.samplers == samples


def _engine_is_busy_while_work_can_start(state: State) -> None:
    if state.flight is not None or state.residency.capacity is None:
        return
    if (held := state.planner.held) is not None:
        assert state._now < held.until <= state._now + state.config.hold_seconds
        assert held.head.id in state.queues.requests
        return
    root = state.queues.root
    ready = [group for group in root.queues if fairshare.first(root, group)]
    assert not ready, f"the engine idles with work for {ready}"
    assert state.residency.rows == 0, "the engine idles with rows to step"
