"""Decode slices: which rows join, leave and stay, and for how many steps they run.

Rows join in the order of need while their memory fits. When the neediest row does not fit, no
other joins either: room is kept until it does, or is taken back from owners that hold more
than their guaranteed part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from openrl.config import SchedulerConfig
from openrl.engines.base import RowId, WeightsKey
from openrl.scheduler.core import costs, fairshare
from openrl.scheduler.core.costs import CostModel
from openrl.scheduler.core.events import PassId, StartDecode
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.lanes import SampleLane
from openrl.scheduler.core.packing import Budget, Group
from openrl.scheduler.core.passes import Candidate, Draft, Flight
from openrl.scheduler.core.queues import Queues
from openrl.scheduler.core.requests import Request, Row
from openrl.scheduler.core.residency import Residency
from openrl.scheduler.core.sharing import Sharing
from openrl.types import OwnerId, RequestId


@dataclass(slots=True, eq=False)
class Changes:
    """What a slice does to the batch before it steps. `prefills` are tokens by joining row."""

    admit: dict[RequestId, list[int]] = field(default_factory=dict)
    resume: list[RowId] = field(default_factory=list)
    preempt: list[Row] = field(default_factory=list)
    prefills: dict[RowId, int] = field(default_factory=dict)


class Slicer:
    def __init__(
        self,
        config: SchedulerConfig,
        queues: Queues,
        residency: Residency,
        sharing: Sharing,
        model: Callable[[Group], CostModel],
        new_id: Callable[[], PassId],
    ) -> None:
        self._config = config
        self._queues = queues
        self._residency = residency
        self._sharing = sharing
        self._model = model
        self._new_id = new_id

    def running(self) -> Iterator[Candidate]:
        """The batches as candidates. A batch needs as much as its owners do on the average of
        its rows. By its neediest row alone, either all others would ride on that row's need, or
        it would decode by itself, at nearly the price of the whole batch."""
        for weights, count in self._residency.counts.items():
            if count:
                rows = self._residency.rows_of(weights)
                tag = sum(row.share.owner.tag for row in rows) / count
                yield Candidate((tag,), (weights, "sample"), None)

    def lead(self, lead: Candidate, others: list[Candidate], now: float) -> Flight | None:
        """None when the leader is a row that has to wait for room."""
        neediest = next((one.leaf for one in others if one.group[1] == "sample" and one.leaf), None)
        sharing = self._sharing.may_sample(lead, neediest)
        if lead.leaf is None:
            if lead.before is None:
                fairshare.advance(self._queues.root, lead.clock)
            open_door = neediest is not None and self._fits(self._waiting(neediest))
            return self._slice(lead, open_door and sharing, now)
        if lead.leaf is not neediest or not sharing:
            return None
        if not self._fits(self._waiting(lead.leaf)):
            away = self._make_room(lead.leaf, lead.group[0], now)
            if away is not None or not self._victims(self._waiting(lead.leaf)):
                return away
        if lead.before is None:
            fairshare.serve(lead.leaf)
        return self._slice(lead, True, now)

    def sweep(self, now: float) -> Flight | None:
        """With nothing else to do, the engine forgets rows that nobody wants."""
        for weights in self._residency.doomed:
            return self._clear(weights, Changes(), now)
        return None

    # --- room ---

    def _make_room(self, leaf: Share, weights: WeightsKey, now: float) -> Flight | None:
        """A pass over *other* weights that frees memory, when that is where it is held."""
        for other in self._residency.doomed:
            if other != weights:
                return self._clear(other, Changes(), now)
        victims = self._victims(self._waiting(leaf))
        away = next((row for row in victims if row.weights != weights), None)
        return self._evict(away, now) if away else None

    def _evict(self, victim: Row, now: float) -> Flight:
        """A pass that takes one row of its weights out, and steps the others once."""
        changes = Changes()
        self._preempt(victim, changes, now)
        return self._clear(victim.weights, changes, now)

    def _clear(self, weights: WeightsKey, changes: Changes, now: float) -> Flight:
        """A pass for what leaves the batch. Its other rows make one step if they can do so in
        the memory that they have among themselves; if not, they leave as well."""
        rows = self._reserve(weights, 1)
        victims = self._residency.outgrown(weights, self._part())
        freed = sum(max(row.blocks, row.held) for row in victims if row.weights == weights)
        enough = freed >= self._residency.lack(weights)
        for row in victims if enough else rows:
            if row.weights == weights:
                self._preempt(row, changes, now)
        draft = Draft((weights, "sample"), self._queues.root, 0.0, 0.0, Budget(0.0, 0))
        return self._flight(draft, changes, 1, now)

    def _victims(self, request: Request) -> list[Row]:
        return self._residency.victims(
            request.item.owner,
            self._blocks(request),
            request.item.weights,
            self._part(),
        )

    def _part(self) -> Callable[[OwnerId], float]:
        """Each owner's guaranteed part of the memory, among those that sample."""
        total = self._queues.sampling_weight()
        return lambda owner: self._queues.weight(owner) / total

    def _reserve(self, weights: WeightsKey, steps: int) -> list[Row]:
        rows = self._residency.rows_of(weights)
        for row in rows:
            self._residency.reserve(row, steps)
        return rows

    def _grow(self, weights: WeightsKey, steps: int, changes: Changes, now: float) -> Flight | None:
        """Makes room for what the rows of a slice can write. What other weights hold goes by a
        pass over them, which is returned and comes first."""
        self._reserve(weights, steps)
        if self._residency.lack(weights) <= 0:
            return None
        for other in self._residency.doomed:
            if other != weights:
                return self._clear(other, Changes(), now)
        victims = self._residency.outgrown(weights, self._part())
        for row in victims:
            if row.weights != weights:
                return self._evict(row, now)
        for row in victims:
            self._preempt(row, changes, now)
        return None

    def _preempt(self, row: Row, changes: Changes, now: float) -> None:
        request = self._queues.requests[row.id.request_id]
        self._residency.preempt(row)
        del request.running[row.id.sample]
        request.preempted[row.id.sample] = row
        changes.preempt.append(row)
        lane = self._lane(row.share)
        lane.preempted(request)
        self._queues.refresh(lane, now)

    # --- the slice ---

    def _slice(self, lead: Candidate, open_door: bool, now: float) -> Flight:
        most = self._config.decode_steps
        quantum = self._config.quantum_seconds
        budget = Budget(quantum, self._config.pass_tokens)
        draft = Draft(lead.group, self._queues.root, lead.clock, quantum, budget)
        draft.riders_only = lead.leaf is None
        draft.only = self._sharing.only(lead)
        changes = Changes()
        if first := self._grow(lead.group[0], most, changes, now):
            return first
        if open_door and not changes.preempt:
            self._fill(draft, changes, now)
        return self._flight(draft, changes, most, now)

    def _fill(self, draft: Draft, changes: Changes, now: float) -> None:
        while leaf := draft.next():
            request = self._waiting(leaf)
            tokens = self._prefill(request, changes)
            row_steps = float(self._config.decode_steps)
            features = costs.decode_features(0.0, 0.0, row_steps, tokens)
            seconds = self._model(draft.group).estimate(features)
            if not draft.budget.fits(seconds, tokens) or not self._room(request, changes, now):
                return
            self._join(leaf, request, tokens, changes, now)
            draft.take(leaf, seconds, tokens)

    def _room(self, request: Request, changes: Changes, now: float) -> bool:
        """Takes room back where the request's owner is entitled to it. No row both joins and
        leaves in one slice."""
        if any(row.id.request_id == request.id for row in changes.preempt):
            return False
        if self._fits(request):
            return True
        victims = self._victims(request)
        weights = request.item.weights
        if not all(row.weights == weights and row.id not in changes.prefills for row in victims):
            return False
        for row in victims:
            self._preempt(row, changes, now)
        return bool(victims)

    def _join(
        self, leaf: Share, request: Request, tokens: int, changes: Changes, now: float
    ) -> None:
        if request.preempted:
            sample, row = request.preempted.popitem(last=False)
            changes.resume.append(row.id)
        else:
            row = self._next_row(request)
            sample = request.next_row
            request.next_row += 1
            changes.admit.setdefault(request.id, []).append(sample)
        request.running[sample] = row
        request.started = now if request.started is None else request.started
        changes.prefills[row.id] = tokens
        self._residency.admit(row, self._residency.expected_blocks(row, self._config.decode_steps))
        lane = self._lane(leaf)
        lane.admitted(request)
        self._queues.refresh(lane, now)

    def _next_row(self, request: Request) -> Row:
        """The row that would join next: a preempted one, or a new one."""
        if request.preempted:
            return next(iter(request.preempted.values()))
        item = request.item
        assert item.sample is not None
        prompt, most = item.sample.prompt_tokens, item.sample.max_new_tokens
        row = RowId(item.request_id, request.next_row)
        return Row(row, item.owner, item.weights, request.share, prompt, prompt + most, prompt)

    def _prefill(self, request: Request, changes: Changes) -> int:
        """Tokens that the next row's joining costs; a request's prompt is read once a slice."""
        if request.preempted:
            return next(iter(request.preempted.values())).tokens
        size = request.item.sample
        assert size is not None
        return 0 if request.id in changes.admit else size.prompt_tokens

    def _flight(self, draft: Draft, changes: Changes, most: int, now: float) -> Flight:
        weights = draft.group[0]
        rows = self._residency.rows_of(weights)
        order = StartDecode(
            self._new_id(),
            weights,
            tuple((request, tuple(rows)) for request, rows in changes.admit.items()),
            tuple(changes.resume),
            tuple(row.id for row in changes.preempt),
            self._residency.drop(weights),
            self._steps(draft.group, len(rows), sum(changes.prefills.values()), most),
            self._config.quantum_seconds,
        )
        flight = Flight(order.pass_id, draft.group, now, order, estimates=draft.estimates)
        flight.rows = {row.id: row for row in rows}
        flight.prefills = changes.prefills
        flight.preempted = tuple(changes.preempt)
        return flight

    def _steps(self, group: Group, rows: int, prefilled: int, most: int) -> int:
        """As many as fit into the quantum."""
        model = self._model(group)
        fixed = model.estimate(costs.decode_features(1.0, 0.0, 0.0, prefilled))
        step = model.estimate(costs.decode_features(0.0, 1.0, rows, 0.0))
        room = self._config.quantum_seconds - fixed
        return max(1, min(most, int(room / step))) if step > 0.0 else most

    # --- looking up ---

    def _fits(self, request: Request) -> bool:
        return self._residency.fits(self._blocks(request), request.item.weights)

    def _blocks(self, request: Request) -> int:
        return self._residency.expected_blocks(self._next_row(request), self._config.decode_steps)

    def _waiting(self, leaf: Share) -> Request:
        request = self._lane(leaf).head()
        assert request is not None
        return request

    def _lane(self, leaf: Share) -> SampleLane:
        lane = self._queues.lanes[leaf.name]
        assert isinstance(lane, SampleLane)
        return lane
