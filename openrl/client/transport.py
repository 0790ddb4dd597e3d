"""HTTP: one request may be sent many times, and always under the same identity.

The server knows a request by the ids in its body, so repeating a POST whose answer was lost is
safe. Connection errors, 408, 429 and 5xx are repeated; any other refusal is final. Until a first
answer has come, what can only be a wrong address is final too. aiohttp takes longer to import than
the rest of the client together, so this room is entered on `connect`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

import aiohttp

from openrl.client import codec, failures
from openrl.client.compression import CODING, LEAST, Compress, compressor
from openrl.client.waiting import Wait
from openrl.errors import NotFound, OpenRLError, Unavailable, UserError

log = logging.getLogger("openrl.client")

DEADLINE = "X-OpenRL-Deadline-Seconds"
SUBMIT_SECONDS = 60.0
POLL_SECONDS = 45.0  # the server holds a poll for 30
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 15.0
LONGEST_RETRY_AFTER = 60.0

# Each request in flight is a socket: these keep a wide loop under the usual limit of 1,024 open
# files. Polls and submits wait in separate queues, and heartbeats in none.
MOST_SUBMITS = 128
MOST_POLLS = 512


@dataclass(frozen=True, slots=True)
class Answer:
    """`seconds` is how long the server took; `retry_after` is None when it named no time."""

    status: int
    body: Any
    content_type: str
    seconds: float
    retry_after: float | None

    @property
    def good(self) -> bool:
        return self.status < HTTPStatus.MULTIPLE_CHOICES

    @property
    def worth_repeating(self) -> bool:
        repeatable = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        return self.status in repeatable or self.status >= HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def foreign(self) -> bool:
        """What no node says, nor a proxy whose node is away for a while."""
        final = not self.worth_repeating or self.status == HTTPStatus.NOT_IMPLEMENTED
        return final and not isinstance(self.body, Mapping)

    @property
    def says_wait(self) -> bool:
        """A server that answers 408 or 429 is well: waiting for it is not an outage."""
        return self.worth_repeating and self.status < HTTPStatus.INTERNAL_SERVER_ERROR

    @property
    def held(self) -> bool:
        """A long poll that ran its time: poll again at once. One that came straight back,
        from a proxy or a node that drains, is paused like any other."""
        return self.status == HTTPStatus.REQUEST_TIMEOUT and self.seconds >= 1.0


class Transport:
    """`patience`: how many seconds a server may be away or failing before the caller hears of
    it. Waiting in a queue of a server that is well has no limit here; use `asyncio.timeout`."""

    def __init__(
        self,
        url: str,
        api_key: str,
        patience: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        on_wait: Callable[[Wait], None] | None = None,
        compress: Compress = "auto",
    ) -> None:
        self._compress = compressor(compress, url)
        self._url = url.rstrip("/")
        self._known = False  # to be the server that it should be
        self._patience = patience
        self._on_wait = on_wait
        self._sleep = sleep
        self._clock = clock
        self._submits = asyncio.Semaphore(MOST_SUBMITS)
        self._polls = asyncio.Semaphore(MOST_POLLS)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={
                "X-API-Key": api_key,
                "Content-Type": codec.CONTENT_TYPE,
                "Accept": codec.CONTENT_TYPE,
            },
        )

    async def close(self) -> None:
        await self._http.close()

    async def submit(
        self, route: str, body: codec.Body, deadline_seconds: float | None = None
    ) -> Mapping[str, Any]:
        """POST until it is accepted. Raises the server's refusal, or `Unavailable`."""
        headers = {} if deadline_seconds is None else {DEADLINE: str(deadline_seconds)}
        async with self._submits:
            payload = codec.pack(body)
            if self._compress is not None and len(payload) >= LEAST:
                payload, headers["Content-Encoding"] = self._compress(payload), CODING
            return await self._until_good(route, payload, SUBMIT_SECONDS, headers=headers)

    async def result(self, request_id: str) -> Mapping[str, Any]:
        """Long polls until the request has ended. Raises what it failed with."""
        body = codec.pack({"request_id": request_id, "allow_metadata_only": False})
        async with self._polls:
            answer = await self._until_good("retrieve_future", body, POLL_SECONDS, request_id)
        if "error" in answer:
            raise failures.from_future(answer)
        return answer

    async def once(self, route: str, body: codec.Body, seconds: float) -> Mapping[str, Any]:
        """A single attempt, for what is repeated anyway or may be lost."""
        answer = await self._try(route, codec.pack(body), seconds)
        if isinstance(answer, Exception):
            raise Unavailable(_describe(answer))
        if not answer.good:
            raise failures.from_status(answer.status, answer.body)
        return _mapping(answer.body)

    async def _until_good(
        self,
        route: str,
        payload: bytes,
        seconds: float,
        request_id: str | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Mapping[str, Any]:
        began = well = self._clock()
        pauses = 0
        while True:
            answer = await self._try(route, payload, seconds, headers)
            self._check_place(answer)
            if isinstance(answer, Answer):
                if answer.good:
                    self._known = True
                    return _mapping(answer.body)
                if not answer.worth_repeating:
                    raise failures.from_status(answer.status, answer.body)
                if answer.says_wait:
                    well = self._clock()
                if answer.held:
                    why = _why_waiting(answer.body)
                    self._tell(Wait(route, request_id, why, self._clock() - began))
                    pauses = 0
                    continue
            if self._clock() - well > self._patience:
                raise self._gave_up(answer)
            pauses += 1
            self._tell(Wait(route, request_id, _describe(answer), self._clock() - began))
            await self._pause(route, answer, pauses)

    def _tell(self, wait: Wait) -> None:
        log.info("%s: %s", wait.what, wait.why)
        if self._on_wait is not None:
            self._on_wait(wait)

    async def _try(
        self,
        route: str,
        payload: bytes,
        seconds: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> Answer | Exception:
        try:
            return await self._attempt(route, payload, seconds, headers)
        except (aiohttp.ClientError, TimeoutError) as problem:
            return problem

    async def _attempt(
        self, route: str, payload: bytes, seconds: float, headers: Mapping[str, str]
    ) -> Answer:
        started = self._clock()
        async with self._http.post(
            f"{self._url}/api/v1/{route}",
            data=payload,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=seconds),
        ) as response:
            body = _decode(response.content_type, await response.read())
            held = self._clock() - started
            retry_after = _retry_after(response.headers)
            return Answer(response.status, body, response.content_type, held, retry_after)

    async def _pause(self, route: str, answer: Answer | Exception, pauses: int) -> None:
        asked = answer.retry_after if isinstance(answer, Answer) else None
        seconds = _backoff(pauses) if asked is None else min(asked, LONGEST_RETRY_AFTER)
        if pauses == 1 and not self._known:
            log.warning("%s: %s. Is the server running?", self._url, _describe(answer))
        log.info("%s: again in %.1f s", route, seconds)
        await self._sleep(seconds)

    def _check_place(self, answer: Answer | Exception) -> None:
        """Raises what no waiting mends, before the first good answer: a proxy in front of a server
        that is known may answer in its own words."""
        if self._known:
            return
        if isinstance(answer, aiohttp.ClientSSLError):
            raise UserError(
                f"{self._url}: {answer}. Without a proxy that does TLS in front of it, a server is "
                "reached by http://"
            ) from answer
        if isinstance(answer, Answer) and answer.foreign:
            raise NotFound(self.elsewhere(f"HTTP {answer.status}, {answer.content_type}"))

    def elsewhere(self, answered: str) -> str:
        return (
            f"{self._url} answers, but not as an OpenRL server ({answered}): is it the address "
            "that `openrl serve` printed, with nothing after the port?"
        )

    def _gave_up(self, answer: Answer | Exception) -> OpenRLError:
        return Unavailable(
            f"{self._url} has not served this for {self._patience:.0f} s: {_describe(answer)}. "
            "Is the server running, and is this its address?"
        )


def _why_waiting(body: Any) -> str:
    return str(_mapping(body).get("queue_state_reason") or "still waiting")


def _backoff(pauses: int) -> float:
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(pauses - 1, 16))
    return longest * random.uniform(0.5, 1.0)


def _describe(answer: Answer | Exception) -> str:
    if isinstance(answer, Answer):
        return f"HTTP {answer.status}: {failures.from_status(answer.status, answer.body)}"
    return f"{type(answer).__name__}: {answer}"


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds; the header's date form is not used by this server."""
    try:
        return max(0.0, float(headers["Retry-After"]))
    except (KeyError, ValueError):
        return None


def _decode(content_type: str, data: bytes) -> Any:
    """What a proxy answers may be anything: text is kept for the error's message."""
    try:
        if content_type == codec.CONTENT_TYPE:
            return codec.unpack(data)
        if content_type.endswith("json"):
            return json.loads(data)
    except ValueError:
        pass
    return data.decode(errors="replace")


def _mapping(body: Any) -> Mapping[str, Any]:
    return body if isinstance(body, Mapping) else {}
