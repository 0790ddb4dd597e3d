"""What this server signs: links that open without a key, and short-lived identities.

Both are JSON Web Tokens (RFC 7519, HS256) under one secret of the data directory, kept apart by
their audience.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from openrl.config import Config
from openrl.errors import Forbidden, Unauthenticated
from openrl.types import TinkerPath

_ALGORITHM = "HS256"
_LINK, _IDENTITY = "openrl:link", "openrl:identity"


@dataclass(frozen=True, slots=True)
class Link:
    """To one file of a checkpoint, or with `file` None to all of it. `version` is the
    checkpoint's own, so that a link never opens what took its name later."""

    path: TinkerPath
    version: str
    file: str | None = None


class Signer:
    """Times are Unix seconds."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @classmethod
    def of(cls, file: Path) -> Signer:
        """Reads the secret, or draws one and writes it for its owner's eyes alone."""
        if not file.exists():
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as out:
                out.write(secrets.token_bytes(32))
        return cls(file.read_bytes())

    def sign_link(self, link: Link, expires: float) -> str:
        claims = {"path": link.path, "version": link.version, "file": link.file}
        return self._sign(_LINK, claims, expires)

    def read_link(self, token: str, now: float) -> Link:
        """Raises `Forbidden` for a link that is not ours or is too old."""
        try:
            claims = self._read(_LINK, token, now)
        except jwt.InvalidTokenError as error:
            raise Forbidden("this link is not valid, or not any longer: ask for it anew") from error
        return Link(TinkerPath(claims["path"]), claims["version"], claims["file"])

    def sign_identity(self, key_id: str, claims: Mapping[str, str | int], expires: float) -> str:
        """Of whoever holds the key of that name, for as long as it is held."""
        return self._sign(_IDENTITY, {**claims, "key": key_id}, expires)

    def read_identity(self, token: str, now: float) -> str:
        """The name of its key. Raises `Unauthenticated`."""
        try:
            return str(self._read(_IDENTITY, token, now)["key"])
        except (jwt.InvalidTokenError, KeyError) as error:
            raise Unauthenticated("the token is not valid, or not any longer") from error

    def _sign(self, audience: str, claims: Mapping[str, Any], expires: float) -> str:
        return jwt.encode(
            {**claims, "aud": audience, "exp": int(expires)}, self._secret, _ALGORITHM
        )

    def _read(self, audience: str, token: str, now: float) -> dict[str, Any]:
        claims: dict[str, Any] = jwt.decode(
            token,
            self._secret,
            [_ALGORITHM],
            audience=audience,
            options={"require": ["exp", "aud"], "verify_exp": False, "verify_iat": False},
        )
        if claims["exp"] <= now:  # by the clock that is handed in, not by PyJWT's
            raise jwt.ExpiredSignatureError
        return claims


def signer_of(config: Config) -> Signer:
    """In a cluster all nodes sign alike: a link or an identity is good at any of them."""
    if config.cluster.secret:
        return Signer(hashlib.sha256(f"openrl\n{config.cluster.secret}".encode()).digest())
    return Signer.of(config.data / "signing.key")
