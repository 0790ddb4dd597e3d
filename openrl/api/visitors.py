"""Who may look without a key: whoever sits at the server's own machine, as long as the server
checks no keys. Such a visitor is an administrator of what lies under `/api/v1/openrl/`, and of
nothing else.

A page of another site that is open in the same browser is no visitor: it cannot send a request
without an `Origin` that gives it away, or under a name of its own that leads here.
"""

from __future__ import annotations

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from openrl.api import auth
from openrl.config import Config
from openrl.keys import Holder, checks_keys
from openrl.types import OwnerId

ROOT = "/api/v1/openrl/"

VISITOR = Holder(OwnerId("visitor"), "visitor", admin=True, near=True)


def visitors(config: Config) -> Middleware:
    """Comes before authentication, which leaves alone whom this has let in."""
    open_house = not checks_keys(config)

    @web.middleware
    async def welcome(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.path.startswith(ROOT) and _brings_nothing(request)
        if open_house and asks and is_at_home(request):
            request[auth.HOLDER] = VISITOR
        return await handler(request)

    return welcome


def _brings_nothing(request: web.Request) -> bool:
    return "X-API-Key" not in request.headers and "Authorization" not in request.headers


def is_at_home(request: web.Request) -> bool:
    """On this machine, under one of its own names, and not from another site's page."""
    origin = request.headers.get("Origin")
    own = origin is None or origin == f"{request.scheme}://{request.host}"
    return own and auth.is_neighbour(request) and auth.has_own_name(request)
