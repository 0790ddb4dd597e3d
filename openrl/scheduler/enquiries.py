"""What people and polls ask about the work that is accepted. Nothing here changes anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from openrl.engines.base import Capacity
from openrl.scheduler.allowance import Allowances
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.core.events import Kind
from openrl.scheduler.core.state import State
from openrl.scheduler.core.story import PassRecord, Statistics, StoryLine
from openrl.scheduler.core.tallies import HOUR, SLICE_SECONDS, Slice, Tallies
from openrl.scheduler.loading import Loading, ModelStatus
from openrl.scheduler.models import Models
from openrl.scheduler.pending import Pending, kind_of
from openrl.types import OwnerId, RequestId, SessionId

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one lane has unanswered: `count` requests, the oldest since `since` (on the clock of
    `now()`; None while it is not in the queue yet), which waits as `why` says."""

    lane: str
    owner: OwnerId
    session_id: SessionId
    count: int
    request_id: RequestId
    kind: Kind
    since: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Memory:
    """`capacity` is None before the engine is ready. By owner: blocks of KV memory that running
    rows hold, bytes of unnamed samplers, models that are alive, bytes of queued payloads."""

    capacity: Capacity | None
    kv_blocks: Mapping[OwnerId, int]
    pinned_bytes: Mapping[OwnerId, int]
    models: Mapping[OwnerId, int]
    queued_bytes: Mapping[OwnerId, int]


class Enquiries:
    def __init__(
        self,
        state: State,
        allowances: Allowances,
        loading: Loading,
        models: Models,
        backlog: Backlog,
        clock: Callable[[], float],
        trouble: Callable[[], str | None],
    ) -> None:
        """`trouble` says why nothing can be made durable just now."""
        self._state = state
        self._allowances = allowances
        self._loading = loading
        self._models = models
        self._backlog = backlog
        self._clock = clock
        self._trouble = trouble

    # --- one request ---

    def why_waiting(self, request_id: RequestId) -> str:
        pending = self._backlog.find(request_id)
        if pending is None:
            return self._why_unanswered(request_id)
        if self._loading.failure is not None:
            return f"{self._loading.failure.message}; it goes on when the server is back"
        if (missing := self._loading.failure_of(pending.weights)) is not None:
            return f"{missing.message}; what is kept of the model goes on with the next start"
        if (left := self._rate_limited(request_id)) is not None:
            rate = self._allowances.tokens_per_minute(pending.work.owner)
            return f"waiting for your rate of {rate} tokens per minute: about {left:.0f} s"
        if not self._loading.ready:
            for status in self.status():
                if self._models.base(status.name).weights == pending.weights:
                    return f"the base model is loading: {status.stage}, {status.fraction:.0%}"
        return self._state.why_waiting(request_id, self._clock())

    def _why_unanswered(self, request_id: RequestId) -> str:
        """It has an outcome which is not durable yet, or its model waits for another process."""
        away = self._models.away.get(request_id.rpartition(":")[0])
        return away or self._trouble() or "it is being written down"

    def queue_state(self, request_id: RequestId) -> QueueState:
        """The SDK shows the reason to people for a paused queue only, so that is what it is when
        something else than the request's own model keeps it."""
        if self._rate_limited(request_id) is not None:
            return "paused_rate_limit"
        if request_id.rpartition(":")[0] in self._models.away or self._trouble() is not None:
            return "paused_capacity"
        stands = not self._loading.ready or self._loading.failure is not None
        if stands or self._state.kept_waiting(request_id):
            return "paused_capacity"
        return "active"

    def _rate_limited(self, request_id: RequestId) -> float | None:
        pending = self._backlog.find(request_id)
        if pending is None:
            return None
        return self._allowances.seconds_left(pending.work.owner, request_id, self._clock())

    # --- all of it ---

    def status(self) -> tuple[ModelStatus, ...]:
        """One for each public base model."""
        return self._loading.status(self._models.bases)

    def engine_seconds(self) -> float:
        """How long the engine has worked since it started."""
        return self._state.chronicle.engine_seconds

    def now(self) -> float:
        """On the clock of the timeline and of stories, in seconds."""
        return self._clock()

    def statistics(self) -> Statistics:
        return self._state.statistics()

    def timeline(self) -> tuple[PassRecord, ...]:
        return self._state.timeline()

    def story(self, lane: str) -> tuple[StoryLine, ...]:
        return self._state.story(lane)

    def stories(self, prefix: str) -> tuple[StoryLine, ...]:
        """Of all lanes whose names begin so: a session's, say."""
        return self._state.chronicle.stories(prefix)

    def request_story(self, request_id: RequestId) -> tuple[StoryLine, ...]:
        return self._state.chronicle.of_request(request_id)

    def tallies(self) -> Tallies:
        """To be read, not kept."""
        return self._state.chronicle.tallies

    def hour(self) -> tuple[Slice, ...]:
        """When the engine was busy, oldest first; slices in which nothing ran are left out."""
        since = self._clock() - HOUR
        return tuple(each for each in self.tallies().hour if each.start > since - SLICE_SECONDS)

    def waiting(self) -> tuple[Waiting, ...]:
        """One for each lane with unanswered requests, in the order of their oldest."""
        oldest: dict[str, Pending] = {}
        counts: Counter[str] = Counter()
        for pending in self._backlog:
            oldest.setdefault(pending.work.lane, pending)
            counts[pending.work.lane] += 1
        return tuple(self._waiting(one, counts[lane]) for lane, one in oldest.items())

    def _waiting(self, pending: Pending, count: int) -> Waiting:
        work = pending.work
        queued = self._state.queues.requests.get(work.request_id)
        return Waiting(
            lane=work.lane,
            owner=work.owner,
            session_id=work.session_id,
            count=count,
            request_id=work.request_id,
            kind=kind_of(work.operation),
            since=queued.arrived if queued else None,
            why=self.why_waiting(work.request_id),
        )

    def memory(self) -> Memory:
        residency = self._state.residency
        queued: Counter[OwnerId] = Counter()
        for pending in self._backlog:
            queued[pending.work.owner] += pending.payload_bytes
        return Memory(
            capacity=residency.capacity,
            kv_blocks={owner: held for owner, held in residency.blocks.items() if held},
            pinned_bytes=self._models.pins.bytes_by_owner(),
            models=self._models.alive_by_owner(),
            queued_bytes=queued,
        )

    def owner_weight(self, owner: OwnerId) -> float:
        return self._state.queues.weight(owner)
