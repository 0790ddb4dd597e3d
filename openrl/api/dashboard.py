"""The pages at `/dashboard`: a few files of this package, as they are.

They need no key, since they hold nothing: what they show comes from `live` and the other routes,
with the key that a person types. They load nothing from anywhere else, and hold no script inline.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from aiohttp import web

from openrl.api.services import Services
from openrl.errors import NotFound

PATH = "/dashboard"

TYPES: Mapping[str, str] = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asks each time, and is told 304
}


class Dashboard:
    def __init__(self, services: Services) -> None:
        pass

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(PATH, self.entrance),
            web.get(f"{PATH}/", self.page),
            web.get(PATH + r"/{file:[a-z_]+\.(?:html|js|css|svg)}", self.file),
        ]

    async def entrance(self, request: web.Request) -> web.Response:
        """To the page itself, whose links are relative to it."""
        raise web.HTTPPermanentRedirect(f"{PATH.rpartition('/')[2]}/")

    async def page(self, request: web.Request) -> web.Response:
        """The dashboard."""
        return _answer(request, "index.html")

    async def file(self, request: web.Request) -> web.Response:
        """A script, a style or a picture of the dashboard."""
        return _answer(request, request.match_info["file"])


def _answer(request: web.Request, name: str) -> web.Response:
    files = assets()
    if name not in files:
        raise NotFound(f"the dashboard has no {name!r}")
    body = files[name]
    etag = hashlib.sha256(body).hexdigest()[:16]
    headers = {**_HEADERS, "ETag": f'"{etag}"'}
    if any(tag.value == etag for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    kind = TYPES[name.rpartition(".")[2]]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)


@cache
def assets() -> Mapping[str, bytes]:
    """By name."""
    folder = resources.files("openrl.api") / "assets"
    return {file.name: file.read_bytes() for file in folder.iterdir()}
