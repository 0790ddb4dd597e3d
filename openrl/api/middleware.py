"""What surrounds every handler: whose request it is, and what an error looks like."""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Awaitable, Callable
from math import ceil

from aiohttp import web
from aiohttp.typedefs import Middleware

from openrl import telemetry
from openrl.api import anthropic as anthropic_routes
from openrl.api import auth, codec, dashboard, downloads, metrics, oai, oai_answers
from openrl.catalogue import Flushing
from openrl.errors import OpenRLError, Overloaded, TooSlow, Unauthenticated, Unavailable

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_ROUTES = frozenset({"/healthz", "/readyz", "/api/v1/healthz", "/api/v1/readyz"})

CLIENT_GONE = 499

_LONG_POLLS = frozenset({"/api/v1/retrieve_future", "/api/v1/retrieve_futures"})
"""They change nothing, and much is changed by others while they wait."""

log = logging.getLogger("openrl.api")


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal is `{"detail": text}`; a traceback goes to the log and never to a client."""
    try:
        return await handler(request)
    except OpenRLError as error:
        return _refusal(request, error)
    except web.HTTPException as error:
        if error.status < web.HTTPBadRequest.status_code:
            raise
        return _refused(request, _http_text(request, error), error.status)
    except sqlite3.Error as error:
        log.error("%s %s: the catalogue: %s", request.method, request.path, error)
        return _refusal(request, Unavailable(f"the server's catalogue: {error}", retry_after=5.0))
    except ConnectionError:
        return web.Response(status=CLIENT_GONE)  # nobody reads it
    except Exception:  # noqa: BLE001 - the boundary of a request: the server goes on
        return _unexpected(request)


def _refused(request: web.Request, text: str, status: int) -> web.Response:
    """As the clients of each protocol read it."""
    if request.path.startswith(f"{oai.ROOT}/"):
        return codec.answer(request, oai_answers.failure(text, status), status)
    if request.path.startswith(f"{anthropic_routes.ROOT}/"):
        return codec.answer(request, anthropic_routes.failure(text, status), status)
    return codec.answer(request, {"detail": text}, status)


def _refusal(request: web.Request, error: OpenRLError) -> web.Response:
    response = _refused(request, codec.shortened(error.message), error.status)
    if isinstance(error, Unauthenticated):  # RFC 6750; the SDK then asks for a new token, once
        response.headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    if isinstance(error, TooSlow):  # what it goes on to send is no next request
        response.force_close()
    if isinstance(error, Overloaded | Unavailable):
        response.headers["Retry-After"] = str(max(1, ceil(error.retry_after)))
    return response


def _unexpected(request: web.Request) -> web.Response:
    request_id = telemetry.request_id.get() or secrets.token_hex(8)
    log.exception("%s %s failed (%s)", request.method, request.path, request_id)
    text = f"internal error; the server's log has it under {request_id}"
    return _refused(request, text, web.HTTPInternalServerError.status_code)


def _http_text(request: web.Request, error: web.HTTPException) -> str:
    match error:
        case web.HTTPNotFound():
            return _no_route(request)
        case web.HTTPMethodNotAllowed():
            methods = ", ".join(sorted(error.allowed_methods))
            return f"no route {request.method} {request.path}: it takes {methods}"
        case web.HTTPRequestEntityTooLarge():
            return "the body is larger than this server accepts"
        case _:
            return error.reason


def _no_route(request: web.Request) -> str:
    """Says more to a client whose base URL is wrong, or to a person with a browser."""
    text = f"no route {request.method} {request.path}"
    if request.path.startswith("/api/v1/") and "/api/v1/" not in request.path[1:]:
        return text
    root = request.url.origin()
    base = f"a client's base URL for it is {root} alone"
    return f"{text}: this is an OpenRL server, and {base}; its dashboard is at {root}/dashboard"


def authentication(authenticator: auth.Authenticator) -> Middleware:
    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        known = request.match_info.http_exception is None  # else the answer is what is wrong
        if known and auth.HOLDER not in request and not _open(request.path):
            auth.admit(request, authenticator)
        return await handler(request)

    return authenticate


def durably(rows: Flushing) -> Middleware:
    """A client is told of what it has changed when that outlives a power cut."""

    @web.middleware
    async def flush(request: web.Request, handler: Handler) -> web.StreamResponse:
        before = rows.changes
        response = await handler(request)
        if rows.changes != before and request.path not in _LONG_POLLS:
            await rows.flushed()
        return response

    return flush


def _open(path: str) -> bool:
    if path == metrics.PATH or path == dashboard.PATH or path.startswith(f"{dashboard.PATH}/"):
        return True  # the first looks for itself, the others hold nothing
    return path in OPEN_ROUTES or path.startswith(downloads.PREFIX)
