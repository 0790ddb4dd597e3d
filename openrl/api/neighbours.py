"""Clients on the server's own machine, who see the same files."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from openrl.api.auth import is_neighbour
from openrl.engines.base import BaseModelInfo


def tokenizer_id(request: web.Request, info: BaseModelInfo) -> str:
    """By what the caller can load the tokenizer. A directory is told to neighbours alone: others
    cannot read it, and have no business with it; who comes through a tunnel is told one that is not
    there."""
    if Path(info.tokenizer_id).is_absolute() and not is_neighbour(request):
        return info.name
    return info.tokenizer_id
