"""Each HTTP request has an id: the client's `X-Request-ID` or a new one. Every line that is logged
on its behalf has it, and so has the answer."""

from __future__ import annotations

import logging
import re
import secrets

from aiohttp import web
from aiohttp.typedefs import Handler

from openrl import telemetry

HEADER = "X-Request-ID"
_GOOD = re.compile(r"[A-Za-z0-9._:-]{1,64}")

log = logging.getLogger("openrl.api")


@web.middleware
async def named(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(HEADER, "")
    name = given if _GOOD.fullmatch(given) else secrets.token_hex(8)
    token = telemetry.request_id.set(name)
    try:
        response = await handler(request)
        if not response.prepared:
            response.headers[HEADER] = name
        log.debug("%s %s: %d", request.method, request.path, response.status)
        return response
    finally:
        telemetry.request_id.reset(token)
