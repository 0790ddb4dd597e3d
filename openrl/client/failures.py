"""Typed errors from what a server answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from openrl.errors import (
    Cancelled,
    Forbidden,
    Gone,
    NotFound,
    OpenRLError,
    Overloaded,
    PayloadTooLarge,
    ServerError,
    Unauthenticated,
    Unavailable,
    UserError,
)

_BY_STATUS: Mapping[int, Callable[[str], OpenRLError]] = {
    401: Unauthenticated,
    403: Forbidden,
    404: NotFound,
    410: Gone,
    413: PayloadTooLarge,
    429: Overloaded,
    499: Cancelled,
    503: Unavailable,
}


def from_status(status: int, answer: Any) -> OpenRLError:
    """The error of an HTTP answer outside 2xx."""
    make = _BY_STATUS.get(status, UserError if status < 500 else ServerError)
    return make(_message(answer) or f"HTTP {status}")


def from_future(answer: Mapping[str, Any]) -> OpenRLError:
    """The error of a request that was accepted and failed."""
    make = UserError if answer.get("category") == "user" else ServerError
    return make(str(answer["error"]))


def _message(answer: Any) -> str:
    if isinstance(answer, Mapping):
        answer = next((answer[key] for key in ("detail", "error", "message") if key in answer), "")
    return str(answer).strip()[:2000]
