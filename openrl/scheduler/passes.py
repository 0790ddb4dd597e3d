"""Which pass runs next, and what goes into it.

The neediest leaf that can start leads; compatible heads of other lanes fill the pass, in the
order of need, up to a budget of tokens and of estimated seconds. Company must not be more than
one quantum of service ahead of the leader: an owner that rides along with everybody would
otherwise get more than its weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from openrl.config import SchedulerConfig
from openrl.engines.base import RowId, WeightsKey
from openrl.scheduler import costs, fairshare
from openrl.scheduler.costs import CostModel, Features
from openrl.scheduler.events import (
    PassId,
    Start,
    StartControl,
    StartDecode,
    StartOptim,
    StartTrain,
)
from openrl.scheduler.fairshare import Share
from openrl.scheduler.lanes import OrderedLane, SampleLane
from openrl.scheduler.packing import Budget, Group
from openrl.scheduler.queues import Queues
from openrl.scheduler.requests import Request, Row
from openrl.scheduler.residency import Residency

MISFITS = 16
"""How many heads that are too large for the room left are passed over in one pass."""


@dataclass(slots=True, eq=False)
class Flight:
    """A pass in the engine. `parts` are its training requests, one entry for each atom;
    `prefills` the tokens that rows joining the batch cost; `estimates` what was charged."""

    id: PassId
    group: Group
    started: float
    order: Start
    parts: list[Request] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rows: dict[RowId, Row] = field(default_factory=dict)
    prefills: dict[RowId, int] = field(default_factory=dict)
    estimates: dict[Share, float] = field(default_factory=dict)


@dataclass(slots=True)
class Candidate:
    """Something that could lead: a ready leaf, or (`leaf` None) the rows that run already."""

    need: tuple[float, ...]
    group: Group
    leaf: Share | None


@dataclass(slots=True, eq=False)
class Draft:
    """A pass being filled."""

    group: Group
    clock: float
    budget: Budget
    estimates: dict[Share, float] = field(default_factory=dict)

    def charge(self, leaf: Share, seconds: float, tokens: int) -> None:
        self.budget.take(seconds, tokens)
        self.estimates[leaf] = self.estimates.get(leaf, 0.0) + seconds
        fairshare.charge(leaf, seconds)


class Planner:
    def __init__(self, config: SchedulerConfig, queues: Queues, residency: Residency) -> None:
        self._config = config
        self._queues = queues
        self._residency = residency
        self._models: dict[WeightsKey, dict[str, CostModel]] = {}
        self._passes = 0

    def model(self, group: Group) -> CostModel:
        weights, kind = group
        return self._models.setdefault(weights, costs.guesses())[kind]

    def next_pass(self, now: float) -> Flight | None:
        """None when nothing can start."""
        candidates = sorted(self._candidates(), key=lambda one: one.need)
        for candidate in candidates:
            flight = self._lead(candidate, candidates, now)
            if flight is not None:
                return flight
        return self._sweep(now)

    def _candidates(self) -> Iterator[Candidate]:
        root = self._queues.root
        for group in root.queues:
            if leaf := fairshare.first(root, group):
                yield Candidate(fairshare.tags(leaf), group, leaf)
        for weights, count in self._residency.counts.items():
            if count:
                yield Candidate((self._batch_tag(weights),), (weights, "sample"), None)

    def _lead(self, lead: Candidate, others: list[Candidate], now: float) -> Flight | None:
        _, kind = lead.group
        if kind == "sample":
            return self._decode(lead, others, now)
        assert lead.leaf is not None
        fairshare.serve(lead.leaf)
        if kind == "train":
            return self._train(lead, now)
        if kind == "optim":
            return self._optim(lead, now)
        return self._control(lead, now)

    # --- training ---

    def _train(self, lead: Candidate, now: float) -> Flight:
        draft = self._draft(lead)
        pieces: list[tuple[Request, int]] = []
        for lane, request in self._heads(draft):
            index, tokens = request.sent, request.next_tokens
            new = lane.share not in draft.estimates
            seconds = self._part_seconds(draft, tokens, new)
            if not draft.budget.fits(seconds, tokens):
                continue
            self._send(lane, request, now)
            pieces.append((request, index))
            draft.charge(lane.share, seconds, tokens)
        pieces.sort(key=lambda piece: (piece[0].item.lane, piece[0].item.seq_id, piece[1]))
        order = StartTrain(self._id(), lead.group[0], tuple((r.id, i) for r, i in pieces))
        flight = self._flight(order, draft, now)
        flight.parts = [request for request, _ in pieces]
        flight.tokens = [r.item.atoms[i] if r.item.atoms else 0 for r, i in pieces]
        return flight

    def _part_seconds(self, draft: Draft, tokens: int, new_lane: bool) -> float:
        fixed = 0.0 if draft.estimates else 1.0
        return self.model(draft.group).estimate(
            costs.train_features(fixed, tokens, 1.0 if new_lane else 0.0)
        )

    def _optim(self, lead: Candidate, now: float) -> Flight:
        draft = self._draft(lead)
        steps: list[Request] = []
        for lane, request in self._heads(draft):
            fixed = 0.0 if steps else 1.0
            seconds = self.model(lead.group).estimate(costs.optim_features(fixed, 1.0))
            if not draft.budget.fits(seconds, 0):
                break
            self._send(lane, request, now)
            steps.append(request)
            draft.charge(lane.share, seconds, 0)
        order = StartOptim(self._id(), lead.group[0], tuple(request.id for request in steps))
        flight = self._flight(order, draft, now)
        flight.parts = steps
        return flight

    def _control(self, lead: Candidate, now: float) -> Flight:
        draft = self._draft(lead)
        lane, request = next(self._heads(draft))
        self._send(lane, request, now)
        draft.charge(lane.share, self.model(lead.group).estimate((1.0,)), 0)
        order = StartControl(self._id(), lead.group[0], request.id)
        flight = self._flight(order, draft, now)
        flight.parts = [request]
        return flight

    def _heads(self, draft: Draft) -> Iterator[tuple[OrderedLane, Request]]:
        """Heads in the order of need; one that was not taken is passed over for this pass."""
        aside: list[Share] = []
        while len(aside) < MISFITS and (leaf := self._company(draft)):
            lane = self._queues.lanes[leaf.name]
            assert isinstance(lane, OrderedLane)
            request = lane.current or lane.lowest()
            assert request is not None
            sent = request.sent
            yield lane, request
            if request.sent == sent:
                fairshare.unready(leaf, draft.group)
                aside.append(leaf)
        for leaf in aside:
            fairshare.ready(leaf, draft.group)

    def _send(self, lane: OrderedLane, request: Request, now: float) -> None:
        if lane.current is None:
            lane.start(request)
            request.started = now
        request.sent += 1
        self._queues.refresh(lane, now)

    # --- sampling ---

    def _batch_tag(self, weights: WeightsKey) -> float:
        """The need of the rows that run: the mean of their owners' tags. A row never leads for
        itself, since all others would ride on its need."""
        tags = total = 0.0
        owners = self._queues.root.children
        for owner, rows in self._residency.running.items():
            count = sum(1 for row in rows.values() if row.weights == weights)
            if count:
                tags += count * owners[owner].tag
                total += count
        return tags / total

    def _decode(self, lead: Candidate, others: list[Candidate], now: float) -> Flight | None:
        weights = lead.group[0]
        if lead.leaf is not None and not self._room_for(lead.leaf):
            return None
        return self._slice(lead, self._steps(lead, others), now)

    def _slice(self, lead: Candidate, steps: int, now: float) -> Flight:
        weights = lead.group[0]
        if lead.leaf is not None:
            fairshare.serve(lead.leaf)
        else:
            fairshare.advance(self._queues.root, lead.need[0])
        drop = self._residency.drop(weights)
        draft = self._draft(lead)
        admit, resume, prefills = self._admit(draft, now)
        order = StartDecode(self._id(), weights, admit, resume, (), drop, steps)
        flight = self._flight(order, draft, now)
        flight.rows = {row.id: row for row in self._residency.rows_of(weights)}
        flight.prefills = prefills
        return flight

    def _steps(self, lead: Candidate, others: list[Candidate]) -> int:
        return self._config.decode_steps

    def _room_for(self, leaf: Share) -> bool:
        request = self._waiting(leaf)
        return self._residency.fits(self._blocks(request))

    def _waiting(self, leaf: Share) -> Request:
        lane = self._queues.lanes[leaf.name]
        assert isinstance(lane, SampleLane)
        request = lane.head()
        assert request is not None
        return request

    def _blocks(self, request: Request) -> int:
        size = request.item.sample
        assert size is not None
        return self._residency.need(size.prompt_tokens + size.max_new_tokens)

    def _admit(
        self, draft: Draft, now: float
    ) -> tuple[tuple[tuple[RequestId, tuple[int, ...]], ...], tuple[RowId, ...], dict[RowId, int]]:
        ...

    # --- bookkeeping ---

    def _draft(self, lead: Candidate) -> Draft:
        budget = Budget(self._config.quantum_seconds, self._config.pass_tokens)
        return Draft(lead.group, lead.need[0], budget)

    def _company(self, draft: Draft) -> Share | None:
        leaf = fairshare.first(self._queues.root, draft.group)
        if leaf is None or not draft.budget.pieces:
            return leaf
        owner = owner_of(leaf)
        ahead = (owner.tag - draft.clock) * owner.weight
        return leaf if ahead <= self._config.quantum_seconds else None

    def _flight(self, order: Start, draft: Draft, now: float) -> Flight:
        return Flight(order.pass_id, draft.group, now, order, estimates=draft.estimates)

    def _id(self) -> PassId:
        self._passes += 1
        return PassId(self._passes)

    def _sweep(self, now: float) -> Flight | None:
        return None


def owner_of(leaf: Share) -> Share:
    """The share of the leaf's owner: the root's child above it."""
    node = leaf
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
    return node
