"""A burst of requests goes in a few at a time, so that what keeps clients and nodes alive passes.

The event loop takes what has become ready in the order in which it came: without this a
heartbeat that arrives behind a thousand polls waits until all of those have been handled.
"""

from __future__ import annotations

import asyncio
from collections import deque

from aiohttp import web

from openrl.api.middleware import OPEN_ROUTES, Handler

AT_ONCE = 8
PASSING = OPEN_ROUTES | {"/api/v1/session_heartbeat"}


class Turnstile:
    """Lets `at_once` callers through in each turn of the event loop, in the order they came."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._turning = False

    async def enter(self) -> None:
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left and not self._waiting:
            self._left -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        await place

    def _turn(self) -> None:
        self._left = self._at_once
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():  # by the caller's being cancelled
                place.set_result(None)
                self._left -= 1
        self._turning = self._left < self._at_once
        if self._turning:
            asyncio.get_running_loop().call_soon(self._turn)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PASSING:
            await self.enter()
        return await handler(request)
