"""`/metrics` for Prometheus: what the node counts anyway, read when it is asked for, and HTTP.

Labels are kinds, routes and states: sets that are known beforehand. Nothing here names an owner.
"""

from __future__ import annotations

import hmac
import time

from aiohttp import web
from aiohttp.typedefs import Handler
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder

from openrl.api import auth, visitors
from openrl.api.exposition import NodeCollector
from openrl.api.services import Services
from openrl.errors import Unauthenticated

PATH = "/metrics"
_BUCKETS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Traffic:
    """What the door answered. Streams and polls that are held count with all of their time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._answers = Counter(
            "openrl_http_requests",
            "Answered HTTP requests.",
            ["method", "route", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "openrl_http_request_duration_seconds",
            "From the head of a request to the end of its answer; polls are held on purpose.",
            ["route"],
            buckets=_BUCKETS,
            registry=registry,
        )

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        began, status = time.perf_counter(), 499  # when nobody is left to read the answer
        route = _route(request)
        try:
            response = await handler(request)
            status = response.status
            return response
        except web.HTTPException as error:
            status = error.status
            raise
        finally:
            method = request.method if route != "unknown" else "unknown"
            self._answers.labels(method, route, str(status)).inc()
            self._seconds.labels(route).observe(time.perf_counter() - began)


def _route(request: web.Request) -> str:
    """The pattern: names in paths have no end."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


class Metrics:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._registry = CollectorRegistry()

    def attach(self, app: web.Application) -> None:
        """Outermost, so that it counts the status that a client sees."""
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        self._registry.register(NodeCollector(self._services))
        app.middlewares.insert(0, Traffic(self._registry).middleware)

    def routes(self) -> list[web.RouteDef]:
        return [web.get(PATH, self.scrape)]

    async def scrape(self, request: web.Request) -> web.Response:
        """For Prometheus. On this machine without a key, elsewhere as `metrics.access` says."""
        self._check(request)
        encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": content_type})

    def _check(self, request: web.Request) -> None:
        """Raises `Unauthenticated`."""
        config = self._services.config.metrics
        if config.access == "everyone" or visitors.is_at_home(request):
            return
        key = auth.key_of(request)
        if config.key and hmac.compare_digest(key.encode(), config.key.encode()):
            return
        auth.admit(request, self._services.authenticator)
        if not auth.is_admin(request):
            raise Unauthenticated(
                "from elsewhere /metrics takes metrics.key or an administrator's key; see also "
                "metrics.access"
            )
