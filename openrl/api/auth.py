"""Whose request it is, and who may see everybody's.

An administrator holds a key that is listed as one, or, on the server's own machine alone, the
`server.admin_key` of the configuration.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from ipaddress import ip_address
from typing import Protocol

from aiohttp import web

from openrl.config import Config
from openrl.errors import Unauthenticated
from openrl.key_files import KeyRing
from openrl.keys import (
    Holder,
    checks_keys,
    digest_of,
    file_of,
    from_settings,
    unlisted_owner,
)
from openrl.signing import Signer
from openrl.types import OwnerId

_KEY = re.compile(r"(tml-|eyJ)[!-~]{1,8192}")

_IDENTITY = "eyJ"  # how the text of every JSON Web Token begins

_FORWARDED = ("Forwarded", "X-Forwarded-For")

HOLDER = web.RequestKey("holder", Holder)


class Authenticator(Protocol):
    def holder(self, key: str) -> Holder:
        """Raises `Unauthenticated` for a key that nobody holds."""
        ...

    def named(self, key_id: str) -> Holder:
        """Of a key that was let in before. Raises `Unauthenticated` when it no longer is."""
        ...


class AnyKey:
    """Every well-formed key is an owner of its own: right for one machine behind loopback."""

    def __init__(self, anywhere: bool = False) -> None:
        """`anywhere`: somebody said so, and not just that nobody else can connect."""
        self._anywhere = anywhere

    def holder(self, key: str) -> Holder:
        return self.named(unlisted_owner(_well_formed(key)))

    def named(self, key_id: str) -> Holder:
        return Holder(OwnerId(key_id), key_id, unlisted=not self._anywhere)


class ListedKeys:
    def __init__(self, ring: KeyRing) -> None:
        self._ring = ring

    def holder(self, key: str) -> Holder:
        return _known(self._ring.find(_well_formed(key)))

    def named(self, key_id: str) -> Holder:
        return _known(self._ring.named(key_id))


def _known(found: Holder | None) -> Holder:
    if found is None:
        raise Unauthenticated(
            "this key is not known here, or not any longer: whoever runs the server makes one with "
            "`openrl keys add`"
        )
    return found


class WithAdministrator:
    """The configured administrator's key, and otherwise what `keys` says."""

    def __init__(self, keys: Authenticator, admin_key: str) -> None:
        self._keys = keys
        self._digest = digest_of(admin_key)
        owner = unlisted_owner(admin_key)
        self._holder = Holder(owner, owner, admin=True, near=True)

    def holder(self, key: str) -> Holder:
        if hmac.compare_digest(digest_of(key), self._digest):
            return self._holder
        return self._keys.holder(key)

    def named(self, key_id: str) -> Holder:
        return self._holder if key_id == self._holder.key_id else self._keys.named(key_id)


class WithIdentities:
    """Identities that this server has signed, and otherwise keys. An identity is good for as long
    as the key that it was given for."""

    def __init__(self, keys: Authenticator, signer: Signer, clock: Callable[[], float]) -> None:
        """`clock` gives Unix seconds."""
        self._keys = keys
        self._signer = signer
        self._clock = clock

    def holder(self, key: str) -> Holder:
        if is_identity(key):
            return self._keys.named(self._signer.read_identity(key, self._clock()))
        return self._keys.holder(key)

    def named(self, key_id: str) -> Holder:
        return self._keys.named(key_id)


def authenticator_of(
    config: Config, signer: Signer, now: Callable[[], float], clock: Callable[[], float]
) -> Authenticator:
    """`now` gives Unix seconds, `clock` those of a clock that never goes back. Raises `UserError`
    for keys that cannot be read, and where nobody has said whose keys are let in."""
    keys: Authenticator = AnyKey(anywhere=config.auth.mode == "any-key")
    if checks_keys(config):
        keys = ListedKeys(KeyRing(file_of(config), from_settings(config.auth.keys), clock))
    if config.admin_key:
        keys = WithAdministrator(keys, config.admin_key)
    return WithIdentities(keys, signer, now) if config.issue_jwts else keys


# --- of a request ---------------------------------------------------------------------------


def _well_formed(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise Unauthenticated("X-API-Key is ill-formed: it is 'tml-' and more, without spaces")
    return key


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


def admit(request: web.Request, authenticator: Authenticator) -> None:
    """Notes on the request whose it is. Raises `Unauthenticated`."""
    holder = authenticator.holder(key_of(request))
    if holder.near and not is_neighbour(request):
        raise Unauthenticated("this key is good on the server's own machine alone")
    if holder.unlisted and not has_own_name(request):
        raise Unauthenticated(
            f"this server is localhost and lets any key in, so it takes nothing that is meant for "
            f"{request.host[:80]!r}: make keys with `openrl keys add`, or set auth.mode = any-key"
        )
    request[HOLDER] = holder


def holder_of(request: web.Request) -> Holder:
    """Set by the middleware on every route but the open ones."""
    return request[HOLDER]


def owner_of(request: web.Request) -> OwnerId:
    return holder_of(request).owner


def is_admin(request: web.Request) -> bool:
    """Who may see and change what is everybody's."""
    return holder_of(request).admin


def has_own_name(request: web.Request) -> bool:
    """Whether the caller reached this machine by a name that only leads to the caller's own. A page
    on the internet can have a name of its own lead here, and then ask in the browser's name."""
    host = request.url.host
    if host is None or host == "localhost":
        return host is not None
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_neighbour(request: web.Request) -> bool:
    """Whether the caller is on this machine. A proxy on it is, and whoever is behind that is not.
    A tunnel cannot be told from a neighbour."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    try:
        return ip_address(request.remote or "").is_loopback
    except ValueError:
        return False
