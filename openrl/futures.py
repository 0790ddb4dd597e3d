"""Waiting: one entry per accepted request, resolved exactly once, fetched as often as asked.

Entries are kept for a retention time after they resolve, since a client may lose an answer and
ask again; answers that are more than a bound, or larger together, make room, those first that have
been handed out. Times are seconds on the clock that is passed in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, fields, is_dataclass

import numpy as np

from openrl.errors import NotFound, ServerError
from openrl.types import Failed, Outcome, OwnerId, RequestId

KEPT_BYTES = 1 << 30
"""How many bytes of numbers the answers that are kept may hold together."""

KEPT = 1 << 18
"""How many answers are kept at most: each takes some 2.5 KiB beside its numbers, here and in the
journal's index, and a busy server gives hundreds in a second."""

_LAST_SECONDS = 0.5
"""How long a poll is held while the server ends."""


_ARRIVED = asyncio.Event()
"""Of every answer that is there: each its own would take as much as the rest of the entry."""
_ARRIVED.set()


@dataclass(slots=True)
class Entry:
    """`encoded`: an answer by content type, kept between telling its size and handing it out.
    `size` counts the bytes of the numbers in `outcome`. `stored` reads an outcome that an earlier
    process came to, when somebody asks for it."""

    request_id: RequestId
    owner: OwnerId
    kind: str
    lane: str
    outcome: Outcome | None = None
    resolved_at: float | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    encoded: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    handed_out: bool = False
    stored: Callable[[], Outcome] | None = None


class Futures:
    def __init__(
        self,
        clock: Callable[[], float],
        retention_seconds: float,
        kept_bytes: int = KEPT_BYTES,
        on_forgotten: Callable[[Collection[RequestId]], None] = lambda _: None,
    ) -> None:
        """`on_forgotten` hears whose answers are no longer kept."""
        self._clock = clock
        self._retention = retention_seconds
        self._kept_bytes = kept_bytes
        self._entries: dict[RequestId, Entry] = {}
        self._ending = False
        self._on_forgotten = on_forgotten
        self._listeners: list[Callable[[Entry], None]] = []

    def on_resolved(self, listener: Callable[[Entry], None]) -> None:
        """Called with each entry when its outcome is there. Must not raise."""
        self._listeners.append(listener)

    def __len__(self) -> int:
        return len(self._entries)

    def counts(self) -> tuple[int, int]:
        """How many wait for their outcome, and how many have it."""
        resolved = sum(1 for entry in self._entries.values() if entry.resolved_at is not None)
        return len(self._entries) - resolved, resolved

    def open(self, request_id: RequestId, owner: OwnerId, kind: str, lane: str) -> None:
        if request_id in self._entries:
            raise AssertionError(f"{request_id} is open already")
        self._entries[request_id] = Entry(request_id, owner, kind, lane)

    def restore(
        self,
        request_id: RequestId,
        owner: OwnerId,
        kind: str,
        lane: str,
        size: int,
        stored: Callable[[], Outcome],
    ) -> None:
        """An answer of an earlier process, of about so many bytes: kept as if it had arrived now,
        read when asked for. `stored` raises `ServerError` when it cannot be read."""
        self.open(request_id, owner, kind, lane)
        entry = self._entries[request_id]
        entry.resolved_at, entry.size, entry.stored = self._clock(), size, stored

    def find(self, request_id: RequestId, owner: OwnerId) -> Entry:
        """Raises `NotFound` for an unknown id and for another owner's alike."""
        entry = self._entries.get(request_id)
        if entry is None or entry.owner != owner:
            raise NotFound(
                f"no request {request_id!r}: it was never made, or its answer is no longer kept"
            )
        return entry

    def known(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def resolve(self, request_id: RequestId, outcome: Outcome) -> None:
        entry = self._entries[request_id]
        if entry.outcome is not None:
            raise AssertionError(f"{request_id} is resolved already")
        entry.outcome = outcome
        entry.size = _size(outcome)
        entry.resolved_at = self._clock()
        entry.arrived.set()
        entry.arrived = _ARRIVED
        for listener in self._listeners:
            listener(entry)

    async def wait(self, entry: Entry, seconds: float) -> Outcome | None:
        """None when the outcome has not arrived within `seconds`, or the server ends."""
        if entry.stored is not None:
            _read(entry)
        if entry.outcome is None and seconds > 0:
            try:
                async with asyncio.timeout(
                    min(seconds, _LAST_SECONDS) if self._ending else seconds
                ):
                    await (asyncio.sleep(seconds) if self._ending else entry.arrived.wait())
            except TimeoutError:
                return None
        entry.handed_out = entry.outcome is not None
        return entry.outcome

    def release(self) -> None:
        """The process ends: nobody waits any longer for what it will not finish."""
        self._ending = True
        for entry in self._entries.values():
            entry.arrived.set()

    def sweep(self) -> int:
        """Forgets what resolved longer than the retention ago, and what is over the bound of
        bytes; returns how many entries that was."""
        horizon = self._clock() - self._retention
        resolved = [entry for entry in self._entries.values() if entry.resolved_at is not None]
        old = [entry for entry in resolved if _resolved(entry) < horizon]
        young = [entry for entry in resolved if _resolved(entry) >= horizon]
        gone = [*old, *self._surplus(young)]
        for entry in gone:
            del self._entries[entry.request_id]
        self._on_forgotten([entry.request_id for entry in gone])
        return len(gone)

    def _surplus(self, resolved: list[Entry]) -> Iterator[Entry]:
        """The oldest of those that were handed out, and only then of the others."""
        count, size = len(resolved), sum(entry.size for entry in resolved)
        if count <= KEPT and size <= self._kept_bytes:
            return
        for entry in sorted(resolved, key=lambda entry: (not entry.handed_out, _resolved(entry))):
            if count > KEPT or (size > self._kept_bytes and entry.size):
                count, size = count - 1, size - entry.size
                yield entry


def _read(entry: Entry) -> None:
    assert entry.stored is not None
    try:
        entry.outcome = entry.stored()
    except ServerError as error:
        entry.outcome = Failed(error)
    entry.size, entry.stored = _size(entry.outcome), None
    entry.arrived = _ARRIVED


def _resolved(entry: Entry) -> float:
    assert entry.resolved_at is not None
    return entry.resolved_at


def _size(value: object) -> int:
    """Bytes of all arrays in a frozen value."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, tuple):
        return sum(map(_size, value))
    if is_dataclass(value):
        return sum(_size(getattr(value, each.name)) for each in fields(value))
    return 0
