"""One stream of server-sent events that a dashboard lives on.

Events: `hello` (who looks; whether the numbers go on where the cursor was), `passes`, `points` and
`hour` (what is new), `engine`, `jobs` and `memory` (whole, when they changed), `clock` (each
second). The id of an event is a cursor, `BOOT.PASS.POINT`: with it as `Last-Event-ID` or `?cursor=`
the stream goes on without a hole, as far back as memory is kept. A client reads it with `fetch`,
since `EventSource` sends no key.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from openrl.api import auth, codec
from openrl.api.board import Board, View
from openrl.api.services import Services
from openrl.errors import Overloaded
from openrl.scheduler.core.tallies import HOUR

STREAMS = 64
"""Open at once."""

PASSES = 500
"""In one event."""

POINTS = 4000
"""At the beginning of a stream; a model's whole curve has a route of its own."""

PERIOD_SECONDS = 1.0


@dataclass(slots=True)
class Cursor:
    """What the reader has: the last pass, the last point, the hour up to a time."""

    passed: int = -1
    point: int = 0
    hour: float = float("-inf")


@dataclass(slots=True)
class Stream:
    """What goes out in one turn, and what was said in earlier ones."""

    view: View
    boot: str
    cursor: Cursor
    said: dict[str, bytes] = field(default_factory=dict)

    def hello(self, holder: Any, resumed: bool) -> bytes:
        viewer = {"owner": holder.owner, "admin": holder.admin}
        value = {"boot": self.boot, "resumed": resumed, "viewer": viewer, "keyless": holder.near}
        return self._event("hello", value | self.view.clock())

    def turn(self) -> bytes:
        return b"".join([*self._news(), *self._changes(), self._event("clock", self.view.clock())])

    def _news(self) -> list[bytes]:
        events = []
        while True:
            passes, self.cursor.passed = self.view.passes(self.cursor.passed, PASSES)
            if passes:
                events.append(self._event("passes", passes))
            if len(passes) < PASSES:
                break
        points, self.cursor.point = self.view.points(self.cursor.point, POINTS)
        if points:
            events.append(self._event("points", points))
        if slices := self.view.hour(self.cursor.hour):
            self.cursor.hour = slices[-1][0]  # which may grow, and comes again
            if (encoded := self._event("hour", slices)) != self.said.get("hour"):
                self.said["hour"] = encoded
                events.append(encoded)
        return events

    def _changes(self) -> list[bytes]:
        events = []
        for name, value in self.view.sections().items():
            encoded = codec.encode(value, codec.Encoding.JSON)
            if self.said.get(name) != encoded:
                self.said[name] = encoded
                events.append(self._frame(name, encoded))
        return events

    def _event(self, name: str, value: object) -> bytes:
        return self._frame(name, codec.encode(value, codec.Encoding.JSON))

    def _frame(self, name: str, data: bytes) -> bytes:
        cursor = f"{self.boot}.{self.cursor.passed}.{self.cursor.point}"
        return b"id: %s\nevent: %s\ndata: %s\n\n" % (cursor.encode(), name.encode(), data)


class Live:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._board = Board(services)
        self._open = 0
        self._closing = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/api/v1/openrl/live", self.stream)]

    def attach(self, app: web.Application) -> None:
        """A server that stops need not wait for streams: they end."""
        app.on_shutdown.append(self._close)

    async def _close(self, _: web.Application) -> None:
        self._closing.set()

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Passes, jobs, curves and memory as server-sent events."""
        if self._open >= STREAMS:
            raise Overloaded(f"{STREAMS} dashboards are open already", retry_after=10.0)
        response = web.StreamResponse(headers=_HEADERS)
        self._open += 1
        try:
            await response.prepare(request)
            with suppress(ConnectionError):
                await self._write(request, response)
        finally:
            self._open -= 1
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse) -> None:
        """A reader that is slow makes this wait in `write`, and gets the next state later."""
        holder = auth.holder_of(request)
        cursor, resumed = self._resumed(request)
        stream = Stream(self._board.view(holder), self._board.boot, cursor)
        stream.cursor.hour = self._services.enquiries.now() - HOUR
        await response.write(stream.hello(holder, resumed))
        while not self._closing.is_set():
            await response.write(stream.turn())
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self._closing.wait()

    def _resumed(self, request: web.Request) -> tuple[Cursor, bool]:
        text = request.headers.get("Last-Event-ID") or request.query.get("cursor", "")
        boot, *numbers = text.split(".")
        if boot != self._board.boot or len(numbers) != 2:
            return Cursor(), False
        try:
            return Cursor(int(numbers[0]), int(numbers[1])), True
        except ValueError:
            return Cursor(), False


_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # a proxy must not wait for more
}
