"""One OpenTelemetry span for each accepted request, from acceptance to answer, over OTLP/HTTP.

A span is made when its request has been answered, from what the scheduler remembers of it: each
pass that served it is an event. Nothing is done, and nothing imported, unless `traces.endpoint`
says where spans go.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from openrl.errors import UserError
from openrl.scheduler.core.story import StoryLine
from openrl.scheduler.enquiries import Enquiries
from openrl.scheduler.metering import Meter
from openrl.scheduler.pending import kind_of
from openrl.types import Failed, Outcome, Work

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_NANO = 1_000_000_000


@asynccontextmanager
async def traced(
    endpoint: str, meter: Meter, enquiries: Enquiries, now: Callable[[], float]
) -> AsyncIterator[None]:
    """Spans while it lasts; `now` gives Unix seconds. Raises `UserError` when the packages of
    the extra `otel` are not there."""
    if not endpoint:
        yield
        return
    provider = _provider(endpoint)
    spans = Spans(provider, enquiries, now)
    meter.watchers.append(spans.answered)
    try:
        yield
    finally:
        meter.watchers.remove(spans.answered)
        await asyncio.to_thread(provider.shutdown)  # sends what it still has


def _provider(endpoint: str) -> TracerProvider:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise UserError(
            'traces.endpoint needs OpenTelemetry: pip install -e ".[server,otel]"'
        ) from error
    about = {"service.name": "openrl", "service.version": version("openrl-node")}
    provider = TracerProvider(resource=Resource.create(about))
    # Bounded: spans that come faster than they can be sent are dropped.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider


class Spans:
    def __init__(
        self, provider: TracerProvider, enquiries: Enquiries, now: Callable[[], float]
    ) -> None:
        self._tracer = provider.get_tracer("openrl")
        self._enquiries = enquiries
        self._now = now

    def answered(self, work: Work, outcome: Outcome) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        lines = self._enquiries.request_story(work.request_id)
        offset = self._now() - self._enquiries.now()  # from the scheduler's clock to Unix time
        end = lines[-1].at if lines else self._enquiries.now()
        span = self._tracer.start_span(
            type(work.operation).__name__,
            kind=SpanKind.SERVER,
            start_time=_nano(lines[0].at + offset if lines else end + offset),
            attributes={
                "openrl.request_id": work.request_id,
                "openrl.lane": work.lane,
                "openrl.session_id": work.session_id,
                "openrl.kind": kind_of(work.operation),
                "openrl.queue_seconds": _waited(lines),
            },
        )
        for line in lines[1:-1]:
            span.add_event(line.what, timestamp=_nano(line.at + offset))
        if isinstance(outcome, Failed):
            span.set_status(Status(StatusCode.ERROR, type(outcome.error).__name__))
        span.end(end_time=_nano(end + offset))


def _waited(lines: tuple[StoryLine, ...]) -> float:
    """From acceptance to the first pass; 0 for what was refused before any."""
    return lines[1].at - lines[0].at if len(lines) > 1 else 0.0


def _nano(seconds: float) -> int:
    return int(seconds * _NANO)
