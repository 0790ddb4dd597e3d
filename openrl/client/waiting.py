"""What a client waits for, told to whoever wants to show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """`what` is the route, `request_id` the request whose result is waited for, if it is one;
    `why` is in the server's words, or says what went wrong; `seconds` have passed so far."""

    what: str
    request_id: str | None
    why: str
    seconds: float
