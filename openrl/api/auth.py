"""Whose request it is."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from openrl.errors import Unauthenticated
from openrl.signing import Signer
from openrl.types import OwnerId

_KEY = re.compile(r"(tml-|eyJ)[!-~]{1,8192}")

_IDENTITY = "eyJ"  # how the text of every JSON Web Token begins

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


class WithIdentities:
    """Identities that this server has signed, and otherwise keys."""

    def __init__(self, keys: Authenticator, signer: Signer, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._keys = keys
        self._signer = signer
        self._clock = clock

    def owner(self, key: str) -> OwnerId:
        if is_identity(key):
            return self._signer.read_identity(key, self._clock())
        return self._keys.owner(key)


def is_identity(key: str) -> bool:
    return key.startswith(_IDENTITY)


def key_of(request: web.Request) -> str:
    """From `X-API-Key`, or `Authorization: Bearer`. Raises `Unauthenticated` without either."""
    key = request.headers.get("X-API-Key")
    if key is None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthenticated("X-API-Key is missing: 'tml-' and more, say tml-local")
    return key.strip()


def owner_of(request: web.Request) -> OwnerId:
    """Set by the middleware on every route but the open ones."""
    return OwnerId(request[OWNER])
