"""Clients on the server's own machine, who see the same files."""

from __future__ import annotations

from ipaddress import ip_address
from pathlib import Path

from aiohttp import web

from openrl.engines.base import BaseModelInfo

_FORWARDED = ("Forwarded", "X-Forwarded-For")


def tokenizer_id(request: web.Request, info: BaseModelInfo) -> str:
    """By what the caller can load the tokenizer. A directory is told to neighbours alone: others
    cannot read it, and have no business with it."""
    if Path(info.tokenizer_id).is_absolute() and not _is_neighbour(request):
        return info.name
    return info.tokenizer_id


def _is_neighbour(request: web.Request) -> bool:
    """A proxy on this machine is one, and whoever is behind it is not. A tunnel cannot be told
    from a neighbour: its caller gets a directory that is not there."""
    if any(name in request.headers for name in _FORWARDED):
        return False
    try:
        return ip_address(request.remote or "").is_loopback
    except ValueError:
        return False
