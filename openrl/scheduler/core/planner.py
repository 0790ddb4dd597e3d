"""Which pass runs next, and what goes into it.

Who leads: `turns`. Compatible heads of other lanes fill the pass in the order
of need, up to a budget of tokens and of estimated seconds (the quantum).

While other work keeps the engine busy lanes fall into step by themselves. When there is none, the
heads of forward_backwards may be held for milliseconds: see `company`. optim_steps are not, since
they come with their gradients and cost next to nothing. Two operations of one lane never share a
pass: it would be exact for neighbouring forward_backwards, but those are large already.
"""

from __future__ import annotations

from collections.abc import Iterator

from openrl.config import SchedulerConfig
from openrl.engines.base import WeightsKey
from openrl.scheduler.core import costs, fairshare
from openrl.scheduler.core.company import Hold
from openrl.scheduler.core.costs import CostModel
from openrl.scheduler.core.events import PassId, StartControl, StartOptim, StartTrain
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.lanes import OrderedLane
from openrl.scheduler.core.packing import Budget, Group
from openrl.scheduler.core.passes import Candidate, Draft, Flight, filling
from openrl.scheduler.core.queues import Queues
from openrl.scheduler.core.requests import Request
from openrl.scheduler.core.residency import Residency
from openrl.scheduler.core.sharing import Sharing
from openrl.scheduler.core.slices import Slicer
from openrl.scheduler.core.turns import Turns


class Planner:
    def __init__(self, config: SchedulerConfig, queues: Queues, residency: Residency) -> None:
        self._config = config
        self._queues = queues
        self._residency = residency
        self._models: dict[WeightsKey, dict[str, CostModel]] = {}
        self._passes = 0
        self.held: Hold | None = None
        self._sharing = Sharing(config.sharing, residency)
        self.turns = Turns(config.quantum_seconds if self._sharing.fused else 0.0)
        self._slicer = Slicer(config, queues, residency, self._sharing, self.model, self._id)

    def model(self, group: Group) -> CostModel:
        weights, kind = group
        return self._models.setdefault(weights, costs.guesses())[kind]

    def next_pass(self, now: float) -> Flight | None:
        """None when nothing can start."""
        candidates = sorted(self._candidates(), key=self.turns.need)
        self.held = self._hold(candidates, now)
        for lead in () if self.held else self.turns.order(candidates):
            self._sharing.led(lead)
            if flight := self._lead(lead, candidates, now):
                flight.jumped = lead.before is not None
                return flight
        return self._slicer.sweep(now)

    def _hold(self, candidates: list[Candidate], now: float) -> Hold | None:
        """For company, when the engine has nothing else to do and the pass has room."""
        if len(candidates) != 1 or not self._sharing.fused:
            return None
        group, leaf = candidates[0].group, candidates[0].leaf
        if group[1] != "train" or leaf is None or self._is_full(group):
            return None
        worth = self.model(group).estimate(costs.train_features(1.0, 0, 0.0))
        return self._queues.company.hold(self._head(leaf)[1], worth, now)

    def _is_full(self, group: Group) -> bool:
        """Whether the heads that are ready fill a pass."""
        tokens, lanes = 0, 0
        for leaf in fairshare.leaves(self._queues.root, group):
            _, request = self._head(leaf)
            tokens, lanes = tokens + sum(request.item.atoms[request.sent :]), lanes + 1
            seconds = self.model(group).estimate(costs.train_features(1.0, tokens, lanes))
            if tokens >= self._config.pass_tokens or seconds >= self._config.quantum_seconds:
                return True
        return False

    def _candidates(self) -> Iterator[Candidate]:
        node, running = self._sharing.among(self._queues.root, list(self._slicer.running()))
        for group in node.queues:
            if leaf := fairshare.first(node, group):
                yield Candidate(fairshare.tags(leaf), group, leaf)
        yield from running

    def _lead(self, lead: Candidate, others: list[Candidate], now: float) -> Flight | None:
        match lead.group[1]:
            case "train":
                return self._train(self._draft(lead), now)
            case "optim":
                return self._optim(self._draft(lead), now)
            case "control":
                return self._control(self._draft(lead), now)
            case "sample":
                return self._slicer.lead(lead, others, now)

    def _draft(self, lead: Candidate) -> Draft:
        quantum = self._config.quantum_seconds
        budget = Budget(quantum, self._config.pass_tokens)
        only = self._sharing.only(lead)
        jumps = lead.before is not None
        return Draft(lead.group, self._queues.root, lead.clock, quantum, budget, jumps, only=only)

    def _train(self, draft: Draft, now: float) -> Flight:
        pieces: list[tuple[Request, int]] = []
        with filling(draft):
            while leaf := draft.next():
                lane, request = self._head(leaf)
                tokens = request.next_tokens
                seconds = self._atom_seconds(draft, leaf, tokens)
                if not draft.budget.fits(seconds, tokens):
                    draft.pass_over(leaf)
                    continue
                pieces.append((request, request.sent))
                self._send(draft, lane, request, now)
                draft.take(leaf, seconds, tokens)
        pieces.sort(key=lambda piece: (piece[0].item.lane, piece[0].item.seq_id, piece[1]))
        atoms = tuple((request.id, index) for request, index in pieces)
        order = StartTrain(self._id(), draft.group[0], atoms)
        return Flight(
            order.pass_id,
            draft.group,
            now,
            order,
            parts=tuple(request for request, _ in pieces),
            tokens=tuple(request.tokens_of(index) for request, index in pieces),
            estimates=draft.estimates,
            held=self._queues.company.started(draft.group[0], now),
        )

    def _atom_seconds(self, draft: Draft, leaf: Share, tokens: int) -> float:
        fixed = 0.0 if draft.estimates else 1.0
        lanes = 0.0 if leaf in draft.estimates else 1.0
        return self.model(draft.group).estimate(costs.train_features(fixed, tokens, lanes))

    def _optim(self, draft: Draft, now: float) -> Flight:
        steps: list[Request] = []
        while leaf := draft.next():
            lane, request = self._head(leaf)
            fixed = 0.0 if steps else 1.0
            seconds = self.model(draft.group).estimate(costs.optim_features(fixed, 1.0))
            if not draft.budget.fits(seconds, 0):
                break
            steps.append(request)
            self._send(draft, lane, request, now)
            draft.take(leaf, seconds, 0)
        order = StartOptim(self._id(), draft.group[0], tuple(request.id for request in steps))
        return self._whole(order, draft, tuple(steps), now)

    def _control(self, draft: Draft, now: float) -> Flight:
        leaf = draft.next()
        assert leaf is not None
        lane, request = self._head(leaf)
        self._send(draft, lane, request, now)
        draft.take(leaf, self.model(draft.group).estimate((1.0,)), 0)
        order = StartControl(self._id(), draft.group[0], request.id)
        return self._whole(order, draft, (request,), now)

    def _whole(
        self,
        order: StartOptim | StartControl,
        draft: Draft,
        requests: tuple[Request, ...],
        now: float,
    ) -> Flight:
        tokens = (0,) * len(requests)
        return Flight(
            order.pass_id, draft.group, now, order, requests, tokens, estimates=draft.estimates
        )

    def _head(self, leaf: Share) -> tuple[OrderedLane, Request]:
        lane = self._queues.lanes[leaf.name]
        assert isinstance(lane, OrderedLane)
        request = lane.current or lane.lowest()
        assert request is not None
        return lane, request

    def _send(self, draft: Draft, lane: OrderedLane, request: Request, now: float) -> None:
        if not draft.budget.pieces and not draft.jumps:
            fairshare.serve(lane.share)
        if lane.current is None:
            lane.start(request)
            request.started = now
        request.sent += 1
        self._queues.refresh(lane, now)

    def _id(self) -> PassId:
        self._passes += 1
        return PassId(self._passes)
