"""Events on their way to the core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from openrl.scheduler.core.events import Event


class Inbox:
    """`wake_at`: when the core wants to hear of the time, if at all."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.wake_at: float | None = None

    def post(self, event: Event) -> None:
        self._events.put_nowait(event)

    async def next(self, also_at: float | None) -> Event | None:
        """None when it is time: `wake_at`, or `also_at`. What is given out is to be `handled`."""
        if not self._events.empty():
            return self._events.get_nowait()
        try:
            async with asyncio.timeout(self._seconds_to(also_at)):
                return await self._events.get()
        except TimeoutError:
            self.wake_at = None
            return None

    def _seconds_to(self, also_at: float | None) -> float | None:
        times = [when for when in (self.wake_at, also_at) if when is not None]
        return max(0.0, min(times) - self._clock()) if times else None

    def handled(self) -> None:
        """The event that was given out last."""
        self._events.task_done()

    async def empty(self) -> None:
        """Returns when all that has been posted is handled."""
        await self._events.join()
