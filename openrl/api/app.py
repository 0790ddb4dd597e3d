"""The door as one aiohttp application."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from aiohttp import web

from openrl.api import heads, middleware, request_ids
from openrl.api.accounts import Accounts
from openrl.api.anthropic import Anthropic
from openrl.api.checkpoints import Checkpoints
from openrl.api.cluster.routing import Routing
from openrl.api.dashboard import Dashboard
from openrl.api.downloads import Downloads
from openrl.api.futures import Polls
from openrl.api.live import Live
from openrl.api.metrics import Metrics
from openrl.api.oai import OpenAI
from openrl.api.operations import Operations
from openrl.api.oversight import Oversight
from openrl.api.progress import Progress
from openrl.api.runs import Runs
from openrl.api.sampling import Sampling
from openrl.api.search import Search
from openrl.api.service import Service
from openrl.api.services import Services
from openrl.api.sessions import Sessions
from openrl.api.traces import Traces
from openrl.api.training import Training
from openrl.api.turnstile import Turnstile
from openrl.api.visitors import visitors

HEADER_SECONDS = web.AppKey("header_seconds", float)

KEEPALIVE_SECONDS = 60.0
"""How long a connection may be idle. aiohttp keeps one for an hour, and a client that forgets its
connections, as the SDK does with those of a session that is over, has all of the server's files
open by then. Clients let go of an idle one sooner (httpx after 5 s, aiohttp after 15), so that none
is closed as its next request sets out."""
SHUTDOWN_SECONDS = 5.0
"""For answers that are being written; whatever waited for work has been answered by then."""

LINGER_SECONDS = 2.0
"""For the rest of a body that was refused: a client that still sends reads no answer."""

GROUPS = (
    Service,
    Accounts,
    Search,
    Sessions,
    Training,
    Sampling,
    Polls,
    Runs,
    Checkpoints,
    Downloads,
    Traces,
    OpenAI,
    Anthropic,
    Operations,
    Progress,
    Oversight,
    Live,
    Metrics,
    Dashboard,
)

__all__ = ["Services", "build_app", "build_runner"]


@runtime_checkable
class Attached(Protocol):
    """A group that is more to the application than its routes."""

    def attach(self, app: web.Application) -> None: ...


def build_app(services: Services) -> web.Application:
    routing = Routing(services) if services.config.cluster.node else None
    app = web.Application(
        middlewares=[
            heads.timed,
            request_ids.named,
            middleware.errors,
            Turnstile().middleware,
            visitors(services.config),
            *([routing.recognised] if routing else []),
            middleware.authentication(services.authenticator),
            *([routing.routed] if routing else []),
            middleware.durably(services.catalogue.flushing),
        ],
        client_max_size=services.config.limits.body_bytes,
    )
    app[HEADER_SECONDS] = services.config.limits.header_seconds
    for make in GROUPS:
        group = make(services)
        app.add_routes(group.routes())
        if isinstance(group, Attached):
            group.attach(app)
    if routing:
        routing.attach(app)
    return app


def build_runner(app: web.Application) -> web.AppRunner:
    """Bodies are decompressed by `codec`: see there why aiohttp is not let."""
    return heads.TimedRunner(
        app,
        app[HEADER_SECONDS],
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=SHUTDOWN_SECONDS,
        keepalive_timeout=KEEPALIVE_SECONDS,
        lingering_time=LINGER_SECONDS,
    )
