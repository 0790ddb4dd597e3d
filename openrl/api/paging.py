"""`limit` and `offset` of the lists."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web

from openrl.errors import UserError

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000

PART = web.RequestKey("part", bool)
"""The request of a node that puts the lists of several together: it needs each one's first items,
however many, and when they were made."""


def window(request: web.Request) -> tuple[int, int]:
    """Raises `UserError` for what is no number; a larger limit is cut to 1000."""
    limit = number(request, "limit", DEFAULT_LIMIT)
    most = limit if request.get(PART) else MAX_LIMIT
    return min(limit, most), number(request, "offset", 0)


def times(request: web.Request, made: Iterable[float]) -> dict[str, list[float]]:
    """What a part says besides."""
    return {"created": list(made)} if request.get(PART) else {}


def cursor(limit: int, offset: int, total: int) -> dict[str, Any]:
    return {"offset": offset, "limit": limit, "total_count": total}


def number(request: web.Request, name: str, default: int) -> int:
    """Raises `UserError` for what is no number."""
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UserError(f"{name} must be a whole number, not {text[:20]!r}")
    return int(text)
