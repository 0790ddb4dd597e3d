"""What recovery reads. Today's implementation keeps nothing; the hooks are where a log goes.

Rules that callers keep: a work is `accepted` before its POST is answered, and an outcome is
`committed` before its future resolves. Both return at once; `flushed` waits until everything
appended so far is durable.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

from openrl.types import ModelId, Outcome, RequestId, Work


class Journal(Protocol):
    def accepted(self, work: Work) -> None: ...

    def committed(self, request_id: RequestId, outcome: Outcome) -> None: ...

    def version(self, model_id: ModelId, version: int) -> None:
        """`optim_step` number `version` of the model has been applied."""
        ...

    async def flushed(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Flushed:
    """Awaited as often as one likes: returns when all that is in the journal now is durable."""

    journal: Journal

    def __await__(self) -> Generator[Any, None, None]:
        return self.journal.flushed().__await__()


class NullJournal:
    """Durable for nobody: a restart forgets everything but named checkpoints."""

    def accepted(self, work: Work) -> None:
        pass

    def committed(self, request_id: RequestId, outcome: Outcome) -> None:
        pass

    def version(self, model_id: ModelId, version: int) -> None:
        pass

    async def flushed(self) -> None:
        pass
