"""What a journal is told, and what it promises.

Rules that callers keep: a work is `accepted` before its POST is answered, and an outcome is
`committed` before its future resolves. Both return at once; `flushed` waits until everything
appended so far is durable. All is called on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Generator
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from openrl.types import ModelId, Outcome, RequestId, Work


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """`bytes` on disk in `segments` files, of which `live_bytes` are needed; `unflushed_bytes` in
    memory. `appended` records and `fsyncs` are counted since the start."""

    bytes: int = 0
    live_bytes: int = 0
    segments: int = 0
    unflushed_bytes: int = 0
    appended: int = 0
    fsyncs: int = 0
    last_fsync_seconds: float = 0.0
    trouble: str | None = None


class Journal(Protocol):
    """Samples are passed over: after a restart clients send them again."""

    @property
    def trouble(self) -> str | None:
        """Why nothing can be made durable just now; None when all is well."""
        ...

    def accepted(self, work: Work, atom_tokens: int | None = None) -> None:
        """`atom_tokens` of a creation: the size at which all requests of the model are cut."""
        ...

    def started(self, work: Work) -> None:
        """The engine has begun with it: what is found without an outcome was interrupted."""
        ...

    def redoing(self, model_id: ModelId, request_id: RequestId | None) -> None:
        """At a start, before the engine is given it again; None: the model is what it was. What
        makes the model, or the position of its snapshot, comes first. A start that ended in one
        is told from those that went on."""
        ...

    def committed(self, work: Work, outcome: Outcome) -> None: ...

    def snapshot(self, model_id: ModelId, position: RequestId, name: str) -> None:
        """The snapshot `name` is on disk. `position`: the last executed operation that it
        includes, whose outcome is committed already; operations up to it need no replay."""
        ...

    def ended(self, model_id: ModelId) -> None:
        """The model is gone, and what was journalled of it may go."""
        ...

    def forgotten(self, request_ids: Collection[RequestId]) -> None:
        """Their answers are no longer kept."""
        ...

    async def flushed(self) -> None:
        """Raises `Unavailable` when it has failed for good."""
        ...

    async def lost(self) -> NoReturn:
        """Raises `ServerError` when it has failed for good: nothing more will be durable."""
        ...

    async def clean(self) -> None:
        """Makes room, and erases models that have ended."""
        ...

    def size_of(self, model_id: ModelId) -> int:
        """Bytes that must be kept for the model until its next snapshot."""
        ...

    def statistics(self) -> JournalStatistics: ...


@dataclass(frozen=True, slots=True)
class Flushed:
    """Awaited as often as one likes: returns when all that is in the journal now is durable."""

    journal: Journal

    def __await__(self) -> Generator[Any, None, None]:
        return self.journal.flushed().__await__()


class NullJournal:
    """Durable for nobody: a restart forgets everything but named checkpoints."""

    trouble: str | None = None

    def accepted(self, work: Work, atom_tokens: int | None = None) -> None:
        pass

    def started(self, work: Work) -> None:
        pass

    def redoing(self, model_id: ModelId, request_id: RequestId | None) -> None:
        pass

    def committed(self, work: Work, outcome: Outcome) -> None:
        pass

    def snapshot(self, model_id: ModelId, position: RequestId, name: str) -> None:
        pass

    def ended(self, model_id: ModelId) -> None:
        pass

    def forgotten(self, request_ids: Collection[RequestId]) -> None:
        pass

    async def flushed(self) -> None:
        pass

    async def lost(self) -> NoReturn:
        await asyncio.get_running_loop().create_future()
        raise AssertionError("nobody sets it")

    async def clean(self) -> None:
        pass

    def size_of(self, model_id: ModelId) -> int:
        return 0

    def statistics(self) -> JournalStatistics:
        return JournalStatistics()
