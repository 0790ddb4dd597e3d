"""Lists of all nodes. Each says its own part, newest first, and one puts them together.

Of a node that is away nothing is listed: `X-OpenRL-Missing` names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from openrl.api import auth, codec, paging
from openrl.api.cluster.peers import Away, Peers

MISSING = "X-OpenRL-Missing"
_PART_SECONDS = 10.0

Part = dict[str, Any]


class Merging:
    def __init__(self, peers: Peers, clock: Callable[[], float]) -> None:
        """`clock` gives seconds that never go back."""
        self._peers = peers
        self._clock = clock

    async def merged(self, request: web.Request, handler: Handler) -> web.Response:
        """The list of a route in `LISTS`. Raises what this node's own part raises."""
        limit, offset = paging.window(request)
        rel_url = request.rel_url.update_query(limit=str(limit + offset), offset="0")
        headers = request.headers.copy()
        headers["Accept"] = "application/json"
        own = request.clone(rel_url=rel_url, headers=headers)
        own[paging.PART] = True
        own[auth.HOLDER] = auth.holder_of(request)
        mine = await handler(own)
        assert isinstance(mine, web.Response)
        assert isinstance(mine.body, bytes)
        others = self._peers.members.others(self._clock())
        path = str(rel_url)
        parts = await asyncio.gather(*(self._part(node, path, request) for node in others))
        told = [msgspec.json.decode(mine.body), *(part for part in parts if part is not None)]
        answer = codec.answer(request, put_together(request.path, told, limit, offset))
        silent = {node for node, part in zip(others, parts, strict=True) if part is None}
        if missing := silent | self._peers.members.away(self._clock()):
            answer.headers[MISSING] = ", ".join(sorted(missing))
        return answer

    async def with_parts(
        self, request: web.Request, mine: web.StreamResponse, nodes: Iterable[str]
    ) -> web.StreamResponse:
        """A session's answer at its home, with what of it is at other nodes."""
        if not isinstance(mine, web.Response) or not isinstance(mine.body, bytes):
            return mine
        parts = await asyncio.gather(*(self._part(n, request.raw_path, request) for n in nodes))
        encoding = codec.answer_encoding(request)
        decode = msgspec.msgpack.decode if encoding is codec.Encoding.MSGPACK else _from_json
        whole = decode(mine.body)
        for part in parts:
            for field in ("training_run_ids", "sampler_ids"):
                whole[field] += part[field] if part is not None else []
        return codec.answer(request, whole, mine.status)

    async def _part(self, node: str, path: str, request: web.Request) -> Part | None:
        headers = {
            name: request.headers[name]
            for name in ("X-Stainless-Package-Version",)
            if name in request.headers
        }
        caller = request.get(auth.HOLDER)
        try:
            async with (
                self._peers.call(node, "GET", path, _PART_SECONDS, caller, headers) as answer,
                asyncio.timeout(_PART_SECONDS),
            ):
                if answer.status >= web.HTTPBadRequest.status_code:
                    return None
                return _from_json(await answer.read())
        except (Away, TimeoutError):
            return None


def _from_json(body: bytes) -> Part:
    part: Part = msgspec.json.decode(body)
    return part


# --- pure -----------------------------------------------------------------------------------

LISTS: Mapping[str, tuple[str, str]] = {
    "/api/v1/sessions": ("sessions", ""),
    "/api/v1/training_runs": ("training_runs", "training_run_id"),
    "/api/v1/checkpoints": ("checkpoints", "tinker_path"),
    "/api/v1/get_server_capabilities": ("supported_models", "model_name"),
    "/oai/api/v1/models": ("data", "id"),
}
"""The list's field, and what tells its items apart: one that several nodes know is named once."""
_PAGED = frozenset({"/api/v1/sessions", "/api/v1/training_runs", "/api/v1/checkpoints"})


def put_together(route: str, parts: Iterable[Part], limit: int, offset: int) -> Part:
    """Parts with times (`created`) are merged by those; others are laid end to end."""
    field, name = LISTS[route]
    whole: Part = {}
    found: dict[Any, tuple[float, Any]] = {}
    total = 0
    for part in parts:
        whole = whole or part
        times = part.pop("created", [0.0] * len(part[field]))
        for item, time in zip(part[field], times, strict=True):
            found.setdefault(item[name] if name else item, (time, item))
        total += ((part.get("cursor") or {}).get("total_count")) or 0
    items = [item for _, item in sorted(found.values(), key=lambda each: -each[0])]
    if whole.get("cursor"):
        whole["cursor"] = paging.cursor(limit, offset, total)
    whole[field] = items[offset : offset + limit] if route in _PAGED else items
    return whole
