"""All lanes and unanswered requests, and which of them could start now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush

from openrl.scheduler.core import fairshare
from openrl.scheduler.core.company import Company
from openrl.scheduler.core.events import Item
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.lanes import AnyLane, OrderedLane, SampleLane
from openrl.scheduler.core.packing import PASS_KINDS, Group
from openrl.scheduler.core.requests import Request
from openrl.types import OwnerId, RequestId


class Queues:
    """The tree of shares is kept in step with the lanes by `refresh`, which everything that
    may change a lane's head calls."""

    def __init__(
        self, gap_seconds: float, owner_weights: Mapping[str, float], company: Company
    ) -> None:
        self.root = Share("", None)
        self.lanes: dict[str, AnyLane] = {}
        self.requests: dict[RequestId, Request] = {}
        self.samplers: dict[OwnerId, int] = {}  # unanswered sample requests
        self.company = company
        self._gap_seconds = gap_seconds
        self._weights = dict(owner_weights)
        self._gaps: list[tuple[float, str]] = []
        self._deadlines: list[tuple[float, RequestId]] = []

    # --- lanes ---

    def open(self, name: str, first_seq: int) -> None:
        if name in self.lanes:
            raise AssertionError(f"lane {name} is open already")
        self.lanes[name] = OrderedLane(name, Share(name, None), next_seq=first_seq)

    def close(self, name: str) -> list[Request]:
        """Forgets the lane; returns its requests, which are unanswered still."""
        lane = self.lanes.pop(name, None)
        if lane is None:
            return []
        requests = list(lane.all())
        if isinstance(lane, OrderedLane):
            self.company.forget(lane.habit)
        self._unready(lane)
        fairshare.release(lane.share)
        return requests

    def pause(self, name: str, paused: bool, now: float) -> None:
        if lane := self.lanes.get(name):
            lane.paused = paused
            self.refresh(lane, now)
            self._forget_empty(lane)

    def consume(self, name: str, seq: int, now: float) -> None:
        if lane := self.ordered(name):
            lane.consume(seq)
            self.refresh(lane, now)

    def ordered(self, name: str) -> OrderedLane | None:
        lane = self.lanes.get(name)
        if isinstance(lane, SampleLane):
            raise AssertionError(f"lane {name} is for samples")
        return lane

    def _sampling(self, item: Item) -> SampleLane:
        lane = self.lanes.get(item.lane)
        if lane is None:
            lane = self.lanes[item.lane] = SampleLane(item.lane, Share(item.lane, None))
        if not isinstance(lane, SampleLane):
            raise AssertionError(f"lane {item.lane} is a model's")
        return lane

    def _attached(self, lane: AnyLane, item: Item) -> Share:
        """The lane's leaf, put under its owner and session by its first item."""
        if lane.share.parent is None:
            owner = self.root.child(item.owner, self.weight(item.owner))
            lane.share = owner.child(item.session_id).child(lane.name)
        return lane.share

    # --- requests ---

    def put(self, item: Item, now: float) -> Request | None:
        """None when the item comes too late for its lane, or the lane is not there."""
        if item.request_id in self.requests:
            raise AssertionError(f"{item.request_id} is queued already")
        lane = self._sampling(item) if item.kind == "sample" else self.ordered(item.lane)
        if lane is None:
            return None
        request = Request(item, self._attached(lane, item), now)
        if not lane.put(request):
            return None
        if isinstance(lane, OrderedLane):
            self.company.came(lane.habit, now)
        self.requests[request.id] = request
        self._count_sampler(request, 1)
        if item.deadline is not None:
            self._watch_deadline(item.deadline, item.request_id)
        self.refresh(lane, now)
        return request

    def _watch_deadline(self, deadline: float, request_id: RequestId) -> None:
        """Those of requests that are answered go by themselves only when they come first."""
        heappush(self._deadlines, (deadline, request_id))
        if len(self._deadlines) > 2 * len(self.requests) + 64:
            self._deadlines = [each for each in self._deadlines if each[1] in self.requests]
            heapify(self._deadlines)

    def remove(self, request: Request, now: float) -> None:
        """The request is answered: it leaves its lane, and what waited behind it may start."""
        del self.requests[request.id]
        self._count_sampler(request, -1)
        lane = self.lanes.get(request.item.lane)
        if lane is None:
            return
        lane.remove(request)
        if isinstance(lane, OrderedLane) and lane.empty:
            self.company.left(lane.name, lane.habit, request.item.weights, now)
        self.refresh(lane, now)
        self._forget_empty(lane)

    def _forget_empty(self, lane: AnyLane) -> None:
        """A lane of samples is there while it holds any, or a pause."""
        if isinstance(lane, SampleLane) and not lane.requests and not lane.paused:
            self.close(lane.name)

    def _count_sampler(self, request: Request, sign: int) -> None:
        if request.item.kind != "sample":
            return
        owner = request.item.owner
        self.samplers[owner] = self.samplers.get(owner, 0) + sign
        if not self.samplers[owner]:
            del self.samplers[owner]

    # --- what could start ---

    def refresh(self, lane: AnyLane, now: float) -> None:
        """Files the lane's head under its group, or takes it out."""
        group = self._group(self.head(lane, now))
        if group != lane.ready_in:
            self._unready(lane)
            if group is not None:
                fairshare.ready(lane.share, group)
                lane.ready_in = group
        if isinstance(lane, OrderedLane):
            self._watch_gap(lane, now)

    def head(self, lane: AnyLane, now: float) -> Request | None:
        if isinstance(lane, SampleLane):
            return lane.head()
        return lane.head(now, self._gap_seconds)

    def _group(self, head: Request | None) -> Group | None:
        return (head.item.weights, PASS_KINDS[head.item.kind]) if head else None

    def _unready(self, lane: AnyLane) -> None:
        if lane.ready_in is not None:
            fairshare.unready(lane.share, lane.ready_in)
            lane.ready_in = None

    def _watch_gap(self, lane: OrderedLane, now: float) -> None:
        until = lane.gap_ends(self._gap_seconds)
        if until is not None and until > now and until != lane.gap_until:
            heappush(self._gaps, (until, lane.name))
        lane.gap_until = until

    # --- weights ---

    def weight(self, owner: OwnerId) -> float:
        return self._weights.get(owner, 1.0)

    def set_weight(self, owner: OwnerId, weight: float) -> None:
        if not weight > 0.0:
            raise AssertionError(f"the weight of {owner} must be above 0, not {weight}")
        self._weights[owner] = weight
        if share := self.root.children.get(owner):
            share.weight = weight

    def sampling_weight(self) -> float:
        """The weights of all owners with unanswered samples together."""
        return sum(self.weight(owner) for owner in self.samplers)

    # --- time ---

    def wake_at(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self.requests:
            heappop(self._deadlines)
        while self._gaps and not self._gap_is_open(*self._gaps[0]):
            heappop(self._gaps)
        times = [queue[0][0] for queue in (self._gaps, self._deadlines) if queue]
        return min(times, default=None)

    def _gap_is_open(self, until: float, name: str) -> bool:
        lane = self.lanes.get(name)
        return isinstance(lane, OrderedLane) and lane.gap_until == until

    def pass_gaps(self, now: float) -> None:
        """Lets the lanes go on whose wait for a hole is over."""
        while self._gaps and self._gaps[0][0] <= now:
            lane = self.lanes.get(heappop(self._gaps)[1])
            if lane is not None:
                self.refresh(lane, now)

    def overdue(self, now: float) -> Iterator[Request]:
        while self._deadlines and self._deadlines[0][0] <= now:
            request = self.requests.get(heappop(self._deadlines)[1])
            if request is not None:
                yield request
