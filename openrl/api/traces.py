"""A session's timeline as a file for Perfetto: what became of each of its requests, and when.

Trace events in JSON, which ui.perfetto.dev opens as it opens its own format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. One track for
each model and each sampler, one span for each request, a mark for each thing that happened to it.
The scheduler's story is where all that comes from, so a trace goes back as far as the story does:
its last lines, and never before the start of this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from aiohttp import web

from openrl.api import auth, codec, downloads
from openrl.api.services import Services
from openrl.api.shapes import Plain
from openrl.errors import NotFound
from openrl.scheduler.core.story import StoryLine
from openrl.signing import Link
from openrl.types import RequestId, TinkerPath

PREFIX = f"{downloads.PREFIX}traces/"
_TRACE = "trace"
_ENDINGS = ("done", "refused")
"""How the last line of every request begins."""


class Traces:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/v1/sessions/{session_id}/trace_export", self.export),
            web.get(PREFIX + "{token}", self.open),
        ]

    async def export(self, request: web.Request) -> web.Response:
        """Ready at once: the file is written when the link is opened. That there is nothing is said
        in the answer and not by a status: the SDK shows this text to people."""
        owner = auth.owner_of(request)
        session = self._services.session(request.match_info["session_id"], owner)
        if not self._lines(session.session_id):
            reason = "nothing of this session is remembered: only the latest requests are, and "
            reason += "none from before this server was started"
            return codec.answer(request, {"status": "failed", "error": reason})
        expires = self._services.clock() + downloads.LINK_SECONDS
        link = Link(TinkerPath(session.session_id), _TRACE)
        token = self._services.signer.sign_link(link, expires)
        base = self._services.config.public_url or f"{request.scheme}://{request.host}"
        return codec.answer(request, {"status": "ready", "url": f"{base}{PREFIX}{token}"})

    async def open(self, request: web.Request) -> web.Response:
        """Needs no key: the link is one. Raises `Forbidden`, `NotFound`."""
        link = self._services.signer.read_link(request.match_info["token"], self._services.clock())
        if link.version != _TRACE:
            raise NotFound("this link opens a checkpoint, not a trace")
        core_now, now = self._services.enquiries.now(), self._services.clock()
        trace = trace_of(self._lines(link.path), now - core_now, now)
        name = f'attachment; filename="{link.path}.pftrace"'
        return web.Response(
            text=json.dumps(trace),
            content_type="application/json",
            headers={"Content-Disposition": name},
        )

    def _lines(self, session_id: str) -> tuple[StoryLine, ...]:
        return self._services.enquiries.stories(f"{session_id}:")


def trace_of(lines: Sequence[StoryLine], offset: float, now: float) -> Plain:
    """`offset`: what makes Unix seconds of the core's. A request that is not answered yet lasts
    until `now`, in Unix seconds."""
    tracks = {lane: number for number, lane in enumerate(dict.fromkeys(ln.lane for ln in lines))}
    events = [_named(lane, number) for lane, number in tracks.items()]
    requests: dict[RequestId, list[StoryLine]] = {}
    for line in lines:
        if line.request_id is not None:
            requests.setdefault(line.request_id, []).append(line)
    for history in requests.values():
        events += _span(history, tracks[history[0].lane], offset, now)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(lane: str, track: int) -> Plain:
    return {"ph": "M", "name": "process_name", "pid": track, "args": {"name": lane}}


def _span(history: list[StoryLine], track: int, offset: float, now: float) -> Iterator[Plain]:
    first, last = history[0], history[-1]
    shared = {"cat": "request", "id": str(first.request_id), "pid": track, "tid": 0}
    name = str(first.request_id).removeprefix(f"{first.lane}:")
    end = last.at + offset if last.what.startswith(_ENDINGS) else now
    yield {**shared, "ph": "b", "name": name, "ts": _micros(first.at + offset)}
    for line in history:
        yield {**shared, "ph": "n", "name": line.what, "ts": _micros(line.at + offset)}
    yield {**shared, "ph": "e", "name": name, "ts": _micros(end)}


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)
