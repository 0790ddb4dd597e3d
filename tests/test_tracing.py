"""Spans as a collector gets them, and nothing at all when nobody asked."""

import gzip
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from support.node import CONFIG, MODEL, serving

from openrl.client import connect
from openrl.config import TracesConfig
from openrl.errors import UserError
from openrl.types import Datum

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is missing")


@asynccontextmanager
async def collector(spans: list) -> AsyncIterator[str]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    async def take(request: web.Request) -> web.Response:
        body = await request.read()
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                spans.extend(scope.spans)
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1/traces"
    finally:
        await runner.cleanup()


async def test_each_request_is_one_span_through_queue_and_pass(tmp_path: Path) -> None:
    spans: list = []
    began = time.time_ns()
    async with collector(spans) as endpoint:
        config = replace(CONFIG, traces=TracesConfig(endpoint))
        async with (
            serving(tmp_path, config) as node,
            connect(node.address, "tml-alice") as client,
        ):
            model = await client.create_model(MODEL, rank=8)
            good = {"target_tokens": np.array([1]), "weights": np.array([1.0])}
            datum = Datum(np.array([1], np.int32), good)
            await (await model.forward_backward([datum]))
            with pytest.raises(UserError):
                await (await model.forward_backward([], "no_such_loss"))
    names = [span.name for span in spans]
    assert sorted(names)[:3] == ["CreateModel", "ForwardBackward", "ForwardBackward"]
    good_span = next(s for s in spans if s.name == "ForwardBackward" and s.status.code != 2)
    (served,) = good_span.events
    assert served.name.startswith("pass ")
    inside = (good_span.start_time_unix_nano, served.time_unix_nano)
    assert began < inside[0] <= inside[1] <= good_span.end_time_unix_nano < time.time_ns()
    labels = {one.key for one in good_span.attributes}
    assert {"openrl.request_id", "openrl.queue_seconds", "openrl.kind"} <= labels
    assert [s.status.message for s in spans if s.status.code == 2] == ["UserError"]


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    script = "import sys, openrl.server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0
    assert "opentelemetry" not in {name.partition(".")[0] for name in done.stdout.split()}
