"""Whose request it is."""

from __future__ import annotations

import hashlib
import re
from typing import Protocol

from aiohttp import web

from openrl.errors import Unauthenticated
from openrl.types import OwnerId

_KEY = re.compile(r"(tml-|eyJ)[!-~]{1,8192}")

OWNER = web.RequestKey("owner", str)


class Authenticator(Protocol):
    def owner(self, key: str) -> OwnerId:
        """Raises `Unauthenticated` for a key that nobody holds."""
        ...


class AnyKey:
    """Every well-formed key is an owner of its own: right for one machine behind loopback."""

    def owner(self, key: str) -> OwnerId:
        if not _KEY.fullmatch(key):
            raise Unauthenticated("X-API-Key is ill-formed: it is 'tml-' and more, without spaces")
        # A name, not a secret: the hash keeps keys out of the catalogue and the logs.
        return OwnerId(hashlib.sha256(key.encode()).hexdigest()[:32])


def key_of(request: web.Request) -> str:
    """From `X-API-Key`, or `Authorization: Bearer`. Raises `Unauthenticated` without either."""
    key = request.headers.get("X-API-Key")
    if key is None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("X-API-Key is missing")
    return key.strip()


def owner_of(request: web.Request) -> OwnerId:
    """Set by the middleware on every route but the open ones."""
    return OwnerId(request[OWNER])
