"""What people and polls ask about the work that is accepted. Nothing here changes anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from openrl.scheduler.allowance import Allowances
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.core.state import State
from openrl.scheduler.core.story import PassRecord, Statistics, StoryLine
from openrl.scheduler.loading import Loading, ModelStatus
from openrl.scheduler.models import Models
from openrl.types import OwnerId, RequestId

QueueState = Literal["active", "paused_capacity", "paused_rate_limit"]


class Enquiries:
    def __init__(
        self,
        state: State,
        allowances: Allowances,
        loading: Loading,
        models: Models,
        backlog: Backlog,
        clock: Callable[[], float],
    ) -> None:
        self._state = state
        self._allowances = allowances
        self._loading = loading
        self._models = models
        self._backlog = backlog
        self._clock = clock

    # --- one request ---

    def why_waiting(self, request_id: RequestId) -> str:
        pending = self._backlog.find(request_id)
        if pending is None:
            return "it is being written down"
        if (left := self._rate_limited(request_id)) is not None:
            rate = self._allowances.tokens_per_minute
            return f"waiting for your rate of {rate} tokens per minute: about {left:.0f} s"
        if not self._loading.ready:
            for status in self.status():
                if self._models.base(status.name).weights == pending.weights:
                    return f"the base model is loading: {status.stage}, {status.fraction:.0%}"
        return self._state.why_waiting(request_id, self._clock())

    def queue_state(self, request_id: RequestId) -> QueueState:
        """The SDK shows the reason to people for a paused queue only, so that is what it is when
        something else than the request's own model keeps it."""
        if self._rate_limited(request_id) is not None:
            return "paused_rate_limit"
        if not self._loading.ready or self._state.kept_waiting(request_id):
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

    def owner_weight(self, owner: OwnerId) -> float:
        return self._state.queues.weight(owner)
