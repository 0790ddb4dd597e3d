"""Waiting: one entry per accepted request, resolved exactly once, fetched as often as asked.

Entries are kept for a retention time after they resolve, since a client may lose an answer and
ask again. Times are seconds on the clock that is passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from openrl.errors import NotFound
from openrl.types import Outcome, OwnerId, RequestId


@dataclass(slots=True)
class Entry:
    """`encoded`: an answer by content type, kept between telling its size and handing it out."""

    request_id: RequestId
    owner: OwnerId
    kind: str
    lane: str
    outcome: Outcome | None = None
    resolved_at: float | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    encoded: dict[str, bytes] = field(default_factory=dict)


class Futures:
    def __init__(self, clock: Callable[[], float], retention_seconds: float) -> None:
        self._clock = clock
        self._retention = retention_seconds
        self._entries: dict[RequestId, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request_id: RequestId, owner: OwnerId, kind: str, lane: str) -> None:
        if request_id in self._entries:
            raise AssertionError(f"{request_id} is open already")
        self._entries[request_id] = Entry(request_id, owner, kind, lane)

    def find(self, request_id: RequestId, owner: OwnerId) -> Entry:
        """Raises `NotFound` for an unknown id and for another owner's alike."""
        entry = self._entries.get(request_id)
        if entry is None or entry.owner != owner:
            raise NotFound(f"no request {request_id!r}: it was never made or is past its retention")
        return entry

    def known(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def resolve(self, request_id: RequestId, outcome: Outcome) -> None:
        entry = self._entries[request_id]
        if entry.outcome is not None:
            raise AssertionError(f"{request_id} is resolved already")
        entry.outcome = outcome
        entry.resolved_at = self._clock()
        entry.arrived.set()

    async def wait(self, entry: Entry, seconds: float) -> Outcome | None:
        """None when the outcome has not arrived within `seconds`."""
        if entry.outcome is None and seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await entry.arrived.wait()
            except TimeoutError:
                return None
        return entry.outcome

    def sweep(self) -> int:
        """Forgets entries that resolved longer than the retention ago; returns how many."""
        horizon = self._clock() - self._retention
        old = [e.request_id for e in self._entries.values() if _resolved_before(e, horizon)]
        for request_id in old:
            del self._entries[request_id]
        return len(old)


def _resolved_before(entry: Entry, horizon: float) -> bool:
    return entry.resolved_at is not None and entry.resolved_at < horizon
