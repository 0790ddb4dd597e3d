"""What one node signs when it speaks to another: for whom it asks, and for what.

A JSON Web Token (RFC 7519, HS256) under the cluster's secret. It is good for one method and path,
at one node, for a short time; a request that carries one is never forwarded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jwt

from openrl.cluster.placement import Report
from openrl.errors import Unauthenticated
from openrl.keys import Holder
from openrl.types import OwnerId

HEADER = "X-OpenRL-Hop"
ANYONE = "*"
GOOD_SECONDS = 120.0
"""Clocks of two nodes may differ by this much less what the way takes."""

_ALGORITHM = "HS256"
_HOP, _REPORT = "openrl:hop", "openrl:report"


@dataclass(frozen=True, slots=True)
class Hop:
    """`caller` None: the node asks for itself."""

    sender: str
    receiver: str
    method: str
    path: str
    caller: Holder | None = None


class Hops:
    """Times are Unix seconds."""

    def __init__(self, secret: str) -> None:
        """What is signed with this key is good for nothing else that the secret signs."""
        self._secret = hashlib.sha256(f"openrl hops\n{secret}".encode()).digest()

    def sign(self, hop: Hop, now: float) -> str:
        return self._signed(_HOP, asdict(hop), now)

    def read(self, token: str, receiver: str, method: str, path: str, now: float) -> Hop:
        """Raises `Unauthenticated` for what is not signed, is too old, or is for something else."""
        claims = self._claims(_HOP, token, now)
        said = (claims["receiver"], claims["method"], claims["path"])
        if said not in ((receiver, method, path), (ANYONE, method, path)):
            raise Unauthenticated(f"{HEADER} was made for another node or another request")
        caller = claims["caller"]
        holder = caller and Holder(
            OwnerId(caller["owner"]), caller["key_id"], caller["admin"], unlisted=caller["unlisted"]
        )
        return Hop(claims["sender"], receiver, method, path, holder or None)

    def sign_report(self, report: Report, now: float) -> str:
        return self._signed(_REPORT, asdict(report), now)

    def read_report(self, token: str, now: float) -> Report:
        """Raises `Unauthenticated`."""
        claims = self._claims(_REPORT, token, now)
        given = {name: claims[name] for name in Report.__dataclass_fields__}
        return Report(**{**given, "bases": tuple(given["bases"]), "ready": tuple(given["ready"])})

    def _signed(self, audience: str, claims: Mapping[str, Any], now: float) -> str:
        stamped = {**claims, "aud": audience, "exp": int(now + GOOD_SECONDS)}
        return jwt.encode(stamped, self._secret, _ALGORITHM)

    def _claims(self, audience: str, token: str, now: float) -> dict[str, Any]:
        options: Any = {"require": ["exp", "aud"], "verify_exp": False}
        try:
            claims: dict[str, Any] = jwt.decode(
                token, self._secret, [_ALGORITHM], audience=audience, options=options
            )
        except jwt.InvalidTokenError as error:
            raise Unauthenticated(f"{HEADER} is not signed with this cluster's secret") from error
        if claims["exp"] <= now:
            raise Unauthenticated(f"{HEADER} is too old: do the nodes' clocks agree?")
        return claims
