"""At start: what `plans` has found is queued, and `replay` is ready to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from openrl.journal import Recovered
from openrl.scheduler.core.events import Event, LaneResumed
from openrl.scheduler.parts import Parts
from openrl.scheduler.pending import Pending
from openrl.scheduler.recovery.plans import Recovery
from openrl.scheduler.recovery.replay import Replay
from openrl.types import Failed, RequestId


def revive(
    parts: Parts,
    recovered: Recovered,
    post: Callable[[Event], None],
    submit: Callable[[Pending], None],
) -> Replay:
    """The base models are known, and nothing has been submitted yet."""
    revived = Recovery(recovered, parts).revive()
    for event in revived.events:
        post(event)
    for pending in revived.pending:
        submit(pending)
    for work, error in revived.failed:
        parts.completion.settle(work, Failed(error))
    if revived.suspects:
        parts.tasks.spawn(_one_by_one(parts, revived.suspects, post), "suspects")
    return Replay(revived.plans, recovered, parts, post)


async def _one_by_one(
    parts: Parts, suspects: Sequence[RequestId], post: Callable[[Event], None]
) -> None:
    """What the engine was at when a process ended is run in turn: should one of them end the next
    process too, the others are not blamed again."""
    for request_id in suspects:
        pending = parts.backlog.find(request_id)
        if pending is not None:
            post(LaneResumed(pending.work.lane))
        while parts.backlog.find(request_id) is not None:
            await parts.backlog.stirred()
