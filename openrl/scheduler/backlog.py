"""Everything that is accepted and not answered yet, and how much of it each owner has."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from openrl.scheduler.pending import Pending
from openrl.types import OwnerId, RequestId, Sample, SessionId


@dataclass(slots=True)
class Share:
    """What one owner has in the backlog. `pace` is the mean time between answers of late, in
    seconds, the last being `answered_at`."""

    requests: int = 0
    samples: int = 0
    payload_bytes: int = 0
    pace: float | None = None
    answered_at: float | None = None

    def answered(self, now: float) -> None:
        if self.answered_at is not None:
            gap = now - self.answered_at
            self.pace = gap if self.pace is None else self.pace + _NEWS * (gap - self.pace)
        self.answered_at = now


OWNERS = 4096
"""Of so many owners without requests the pace is remembered at most."""

_NEWS = 0.1  # the part of a mean that its newest value makes up


class Backlog:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: dict[RequestId, Pending] = {}
        self._shares: dict[OwnerId, Share] = {}
        self._sessions: Counter[SessionId] = Counter()
        self._stirred = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Pending]:
        return iter(tuple(self._requests.values()))

    def find(self, request_id: RequestId) -> Pending | None:
        return self._requests.get(request_id)

    def get(self, request_id: RequestId) -> Pending:
        return self._requests[request_id]

    def share(self, owner: OwnerId) -> Share:
        return self._shares.get(owner, Share())

    def seconds_to_next(self, owner: OwnerId) -> float:
        """About how long until one of the owner's requests is answered: 1 to 30 s."""
        share = self.share(owner)
        if share.pace is None or share.answered_at is None:
            return 5.0
        since = self._clock() - share.answered_at
        return min(30.0, max(1.0, share.pace, since))

    def sessions(self) -> tuple[SessionId, ...]:
        """Those that have something here."""
        return tuple(self._sessions)

    def busy(self, session_id: SessionId) -> bool:
        return session_id in self._sessions

    def add(self, pending: Pending) -> None:
        self._requests[pending.work.request_id] = pending
        self._sessions[pending.work.session_id] += 1
        share = self._shares.setdefault(pending.work.owner, Share())
        share.requests += 1
        share.samples += isinstance(pending.work.operation, Sample)
        share.payload_bytes += pending.payload_bytes

    def remove(self, request_id: RequestId) -> None:
        pending = self._requests.pop(request_id)
        share = self._shares[pending.work.owner]
        share.requests -= 1
        share.answered(self._clock())
        share.samples -= isinstance(pending.work.operation, Sample)
        share.payload_bytes -= pending.payload_bytes
        if not share.requests and len(self._shares) > OWNERS:
            del self._shares[pending.work.owner]
        self._leave(pending.work.session_id)
        self.stir()

    def _leave(self, session_id: SessionId) -> None:
        self._sessions[session_id] -= 1
        if not self._sessions[session_id]:
            del self._sessions[session_id]

    def stir(self) -> None:
        """Wakes all who wait for a change."""
        woken, self._stirred = self._stirred, asyncio.Event()
        woken.set()

    async def stirred(self) -> None:
        """Returns when something may have been removed since the call."""
        await self._stirred.wait()

    async def empty(self) -> None:
        while self._requests:
            await self.stirred()
