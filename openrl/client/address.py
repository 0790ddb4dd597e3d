"""What is wrong with an address or a key, said before anything is sent."""

from __future__ import annotations

from urllib.parse import urlsplit

from openrl.errors import Unauthenticated, UserError

EXAMPLE = "http://127.0.0.1:8000"


def server_root(url: str) -> str:
    """Without its last slash. Raises `UserError` for what cannot be a server's address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url!r} is no address of a server: write it like {EXAMPLE}")
    root = url.rstrip("/")
    if root.endswith("/api/v1"):
        raise UserError(
            f"{url!r}: leave /api/v1 out, routes are added to {root[: -len('/api/v1')]}"
        )
    return root


def check_key(key: str) -> None:
    """Raises `Unauthenticated`; the key is not repeated."""
    if not key.startswith(("tml-", "eyJ")):
        raise Unauthenticated("an API key begins with 'tml-': on your own machine 'tml-local' does")
