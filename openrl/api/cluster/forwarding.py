"""Hands a request on to the node that it belongs to, and streams the answer back."""

from __future__ import annotations

import asyncio

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from openrl.api import auth, codec, schema
from openrl.api.cluster.peers import Away, Peers
from openrl.api.services import Services
from openrl.cluster import names
from openrl.errors import Gone

POLL = "/api/v1/retrieve_future"
FEED = "/api/v1/retrieve_futures"

FORWARD_SECONDS = 58.0
"""Within which the answer to anything but a poll begins: the SDK waits for 60 s, and a submit may
be held for 50."""
POLL_GRACE = 10.0
RETURN_SECONDS = 0.5
"""How often somebody who is held looks whether the node is back."""

_OF_THE_LINE = {"connection", "keep-alive", "transfer-encoding", "content-length"}
_NOT_HANDED_ON = frozenset(
    _OF_THE_LINE
    | {"te", "trailer", "upgrade", "proxy-authenticate", "proxy-authorization"}
    | {"content-encoding", "authorization", "x-api-key", "x-openrl-hop", "x-forwarded-for"}
)
"""`content-encoding`: a body is unpacked once. The key: the hop says whose the request is."""
_NOT_HANDED_BACK = frozenset(_OF_THE_LINE | {"date"})


class Forwarding:
    def __init__(self, services: Services, peers: Peers) -> None:
        self._services = services
        self._peers = peers

    async def hand_on(
        self, request: web.Request, node: str, body: bytes | None
    ) -> web.StreamResponse:
        """Raises `Away` when the node does not answer. A poll is held meanwhile."""
        if request.path in (POLL, FEED) and body is not None:
            return await self._poll(request, node, body)
        return await self._relay(request, node, body, FORWARD_SECONDS)

    async def _relay(
        self, request: web.Request, node: str, body: bytes | None, seconds: float
    ) -> web.StreamResponse:
        """What of an answer has begun cannot be taken back: a node that is lost later breaks the
        connection, and the client asks again."""
        caller = request.get(auth.HOLDER)
        path = request.raw_path
        async with self._peers.call(
            node, request.method, path, seconds, caller, _onward(request), body
        ) as answer:
            response = web.StreamResponse(status=answer.status, headers=_back(answer))
            if answer.content_length is not None:
                response.content_length = answer.content_length
            await response.prepare(request)
            try:
                async for part in answer.content.iter_any():
                    await response.write(part)
            except aiohttp.ClientError as error:
                if request.transport is not None:  # whatever is written now would look like more
                    request.transport.abort()
                raise ConnectionResetError(f"node {node!r} broke off") from error
            await response.write_eof()
            return response

    # --- polls ---

    async def _poll(self, request: web.Request, node: str, body: bytes) -> web.StreamResponse:
        loop, held = asyncio.get_running_loop(), self._services.config.poll_seconds
        over = loop.time() + held
        owner, most = auth.owner_of(request), self._services.config.limits.open_polls
        with self._services.polls.holding(owner, 1, most):
            while True:
                try:
                    left = max(over - loop.time(), 0.0)
                    return await self._relay(request, node, body, left + POLL_GRACE)
                except Away as away:
                    if loop.time() >= over or self._is_lost(request, body):
                        return self._pending(request, body, away)
                await asyncio.sleep(min(RETURN_SECONDS, max(over - loop.time(), 0.0)))

    def _is_lost(self, request: web.Request, body: bytes) -> bool:
        """A sample is better sent again than waited for."""
        if request.path == FEED:
            return False
        return names.is_sample(self._asked(request, body).request_id)

    def _pending(self, request: web.Request, body: bytes, away: Away) -> web.Response:
        if request.path == FEED:
            feed = codec.parse(body, codec.encoding_of(request), schema.RetrieveFutures)
            return codec.answer(request, {"completions": [], "cursor": feed.prev_cursor})
        asked = self._asked(request, body)
        if names.is_sample(asked.request_id):
            raise Gone(away.message)
        answer = {
            "type": "try_again",
            "request_id": asked.request_id,
            "queue_state": "paused_capacity",
            "queue_state_reason": away.message,
        }
        return codec.answer(request, answer, web.HTTPRequestTimeout.status_code)

    def _asked(self, request: web.Request, body: bytes) -> schema.RetrieveFuture:
        return codec.parse(body, codec.encoding_of(request), schema.RetrieveFuture)


def _onward(request: web.Request) -> CIMultiDict[str]:
    """The caller's own headers, but its key: the hop says who it is. Its host stays, so that links
    lead where it came from."""
    headers = CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if name.lower() not in _NOT_HANDED_ON
    )
    headers["X-Forwarded-For"] = request.headers.get("X-Forwarded-For", request.remote or "unknown")
    return headers


def _back(answer: aiohttp.ClientResponse) -> CIMultiDict[str]:
    return CIMultiDict(
        (name, value)
        for name, value in answer.headers.items()
        if name.lower() not in _NOT_HANDED_BACK
    )
