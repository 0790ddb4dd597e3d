"""How long the head of a request may take: a connection that says nothing, or says it byte by byte,
is told so and closed. What is waited for inside a request is not this room's.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web

from openrl.api.middleware import Handler

_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Type: application/json\r\n"
    b"Content-Length: 56\r\n\r\n"
    b'{"detail": "the head of a request did not come in time"}'
)


class Connection(asyncio.Protocol):
    """Stands between the socket and aiohttp's protocol, and hands everything on."""

    def __init__(self, inner: asyncio.Protocol, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._inside = False  # a request is being handled

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._inner.connection_made(transport)
        self._start()

    def data_received(self, data: bytes) -> None:
        if not self._inside and self._timer is None:
            self._start()
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def entered(self) -> None:
        self._inside = True
        self._stop()

    def left(self) -> None:
        self._inside = False

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._seconds, self._give_up)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_TOO_SLOW)
            self._transport.close()


@web.middleware
async def timed(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The head is there: its clock stops while the request is handled."""
    connection = request.transport.get_protocol() if request.transport else None
    if not isinstance(connection, Connection):  # gone, or a runner of a test's own
        return await handler(request)
    connection.entered()
    try:
        return await handler(request)
    finally:
        connection.left()


class TimedRunner(web.AppRunner):
    """A runner whose sites time the heads of requests."""

    def __init__(self, app: web.Application, seconds: float, **how: Any) -> None:
        super().__init__(app, **how)
        self._seconds = seconds

    @property
    def server(self) -> web.Server | None:
        """What sites call for the protocol of each new connection."""
        made = super().server
        if made is None:
            return None
        return cast(web.Server, lambda: Connection(made(), self._seconds))
