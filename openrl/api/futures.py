"""Polls: hold them until the result is there, and say why it is not."""

from __future__ import annotations

import logging

from aiohttp import web

from openrl.api import auth, codec, results, schema
from openrl.api.services import Services
from openrl.cluster import names
from openrl.errors import Gone, NotFound, OpenRLError, ServerError
from openrl.futures import Entry
from openrl.types import Failed, Outcome, OwnerId, RequestId, Sample

log = logging.getLogger("openrl.api")

METADATA_FIRST_BYTES = 1 << 20
"""From here on a client that can is told the size before it takes the result, so that it can
make room."""


class Polls:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/retrieve_future", self.retrieve),
            web.post("/api/v1/retrieve_futures", self.retrieve_many),
            web.post("/api/v1/cancel_future", self.cancel),
        ]

    async def retrieve(self, request: web.Request) -> web.Response:
        """408 while it waits or runs. 410 for an id that is not known (any longer): the SDK then
        repeats a sample by itself, while 404 would end its client."""
        body = await self._services.read(request, schema.RetrieveFuture)
        owner, config = auth.owner_of(request), self._services.config
        entry = self._find(body.request_id, owner)
        with self._services.polls.holding(owner, 1, config.limits.open_polls):
            outcome = await self._services.futures.wait(entry, config.poll_seconds)
        if outcome is None:
            return self._pending(request, entry, body.request_id)
        return _result(request, entry, outcome, body.allow_metadata_only)

    async def retrieve_many(self, request: web.Request) -> web.Response:
        """Which samples of one client have their outcome: see `feeds`. Answered as soon as there
        is one, with none when a poll's time is over."""
        body = await self._services.read(request, schema.RetrieveFutures)
        sampler_id = self._services.check_id(body.target.sampling_session_id)
        sampler = self._services.catalogue.sampler(sampler_id, auth.owner_of(request))
        held = self._services.config.poll_seconds
        most = self._services.config.limits.open_polls
        with self._services.polls.holding(sampler.owner, 1, most):
            told, cursor = await self._services.feeds.read(
                sampler.sampling_session_id,
                body.target.cloned_sampler_id,
                body.prev_cursor,
                body.retrieved_request_ids,
                held if body.timeout is None else min(body.timeout, held),
            )
        completions = [
            {"state": "failed" if each.failed else "finished", "request_id": each.request_id}
            for each in told
        ]
        return codec.answer(request, {"completions": completions, "cursor": cursor})

    async def cancel(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.CancelFuture)
        request_id = RequestId(names.plain(self._services.check_id(body.request_id)))
        self._services.admission.cancel(request_id, auth.owner_of(request))
        return web.Response(status=web.HTTPNoContent.status_code)

    def _find(self, request_id: str, owner: OwnerId) -> Entry:
        try:
            known = RequestId(names.plain(self._services.check_id(request_id)))
            return self._services.futures.find(known, owner)
        except NotFound as error:
            raise Gone(error.message) from error

    def _pending(self, request: web.Request, entry: Entry, asked: str) -> web.Response:
        answer = {
            "type": "try_again",
            "request_id": asked,
            "queue_state": self._services.admission.queue_state(entry.request_id),
            "queue_state_reason": self._services.admission.why_waiting(entry.request_id),
        }
        return codec.answer(request, answer, web.HTTPRequestTimeout.status_code)


def _result(
    request: web.Request, entry: Entry, outcome: Outcome, allow_metadata_only: bool
) -> web.Response:
    if isinstance(outcome, Failed):
        return _failure(request, entry, outcome.error)
    encoding = results.available(outcome, codec.result_encoding(request))
    try:
        body = entry.encoded.pop(encoding.value, None) or results.encode(outcome, encoding)
    except OpenRLError as error:
        return codec.answer(request, results.failure(error))
    except Exception as error:  # the SDK polls again after a 500, at once and forever
        log.exception("the result of %s cannot be encoded", entry.request_id)
        broken = ServerError(f"the result cannot be encoded: {type(error).__name__}")
        return codec.answer(request, results.failure(broken))
    if allow_metadata_only and len(body) >= METADATA_FIRST_BYTES:
        entry.encoded[encoding.value] = body
        size = {"status": "complete_metadata", "response_payload_size": len(body)}
        return codec.answer(request, size)
    return codec.raw_answer(body, encoding)


def _failure(request: web.Request, entry: Entry, error: OpenRLError) -> web.Response:
    """A failed future is final for the SDK, whatever its category. A sample that a server could
    not finish before it stopped is better sent again, to the next one: 410 brings that about."""
    if entry.kind == Sample.__name__ and error.retryable:
        raise Gone(error.message)
    return codec.answer(request, results.failure(error))
