"""Everything that is accepted and not answered yet, and how much of it each owner has."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from openrl.scheduler.pending import Pending
from openrl.types import OwnerId, RequestId, Sample, SessionId


@dataclass(slots=True)
class Share:
    """What one owner has in the backlog."""

    samples: int = 0
    payload_bytes: int = 0


class Backlog:
    def __init__(self) -> None:
        self._requests: dict[RequestId, Pending] = {}
        self._shares: dict[OwnerId, Share] = {}
        self._sessions: Counter[SessionId] = Counter()
        self._shrunk = asyncio.Event()

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

    def busy(self, session_id: SessionId) -> bool:
        return session_id in self._sessions

    def add(self, pending: Pending) -> None:
        self._requests[pending.work.request_id] = pending
        self._sessions[pending.work.session_id] += 1
        share = self._shares.setdefault(pending.work.owner, Share())
        share.samples += isinstance(pending.work.operation, Sample)
        share.payload_bytes += pending.payload_bytes

    def remove(self, request_id: RequestId) -> None:
        pending = self._requests.pop(request_id)
        share = self._shares[pending.work.owner]
        share.samples -= isinstance(pending.work.operation, Sample)
        share.payload_bytes -= pending.payload_bytes
        self._leave(pending.work.session_id)
        self._wake()

    def _leave(self, session_id: SessionId) -> None:
        self._sessions[session_id] -= 1
        if not self._sessions[session_id]:
            del self._sessions[session_id]

    def _wake(self) -> None:
        woken, self._shrunk = self._shrunk, asyncio.Event()
        woken.set()

    async def shrunk(self) -> None:
        """Returns when something has been removed since the call."""
        await self._shrunk.wait()

    async def empty(self) -> None:
        while self._requests:
            await self.shrunk()
