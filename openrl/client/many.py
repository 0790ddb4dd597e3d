"""Many answers at once, each as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def as_they_come(
    coroutines: Iterable[Coroutine[Any, Any, T]],
) -> AsyncGenerator[tuple[int, T], None]:
    """The place and the result of each. The first failure is raised; what is left then, or when
    the caller goes away, is cancelled."""
    loop = asyncio.get_running_loop()
    tasks = {loop.create_task(each): place for place, each in enumerate(coroutines)}
    left = set(tasks)
    try:
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: tasks[task]):
                yield tasks[task], task.result()
    finally:
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
