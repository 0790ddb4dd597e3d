"""What runs, for whom, and how busy the engine is; and what an administrator may change.

Administrators (see `auth`) see everything. Everybody else sees what is their own, and of others'
work how much of the engine it took.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any

from aiohttp import web

from openrl.api import auth, codec, paging, schema
from openrl.api.services import Services
from openrl.errors import Forbidden, NotFound
from openrl.scheduler.core.events import LanePaused, LaneResumed, WeightChanged
from openrl.scheduler.core.story import Account, PassRecord
from openrl.types import OwnerId
from openrl.values import OwnerQuota

ROOT = "/api/v1/openrl"


class Operations:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(f"{ROOT}/statistics", self.statistics),
            web.get(f"{ROOT}/models/{{model_id}}/story", self.story),
            web.post(f"{ROOT}/models/{{model_id}}/pause", self.pause),
            web.post(f"{ROOT}/models/{{model_id}}/resume", self.resume),
            web.put(f"{ROOT}/owners/{{owner}}/weight", self.set_weight),
            web.get(f"{ROOT}/owners/{{owner}}/quota", self.quota),
            web.put(f"{ROOT}/owners/{{owner}}/quota", self.set_quota),
        ]

    # --- looking ---

    async def statistics(self, request: web.Request) -> web.Response:
        """Counters, accounts, and the last passes of the engine: how busy it is, and with what.
        With `after`, the number of a pass, those that came next, up to `limit`."""
        enquiries = self._services.enquiries
        counters = enquiries.statistics()
        limit, _ = paging.window(request)
        after = paging.number(request, "after", -1)
        sees = self._sight_of(request)
        answer = {
            "owner": auth.owner_of(request),
            "clock": enquiries.now(),
            "engine": {
                "ready": counters.engine_ready,
                "seconds": counters.engine_seconds,
                "idle_runnable_seconds": counters.idle_runnable_seconds,
            },
            "lanes": counters.lanes,
            "requests": {
                "waiting": counters.requests_waiting,
                "running": counters.requests_running,
            },
            "rows": {"running": counters.rows_running, "preempted": counters.rows_preempted},
            "passes": dict(counters.passes),
            "accounts": _by_level(counters.accounts, sees),
            "timeline": [_record(each, sees) for each in _part(enquiries.timeline(), after, limit)],
        }
        return codec.answer(request, answer)

    async def story(self, request: web.Request) -> web.Response:
        """What happened to a model's requests, oldest first."""
        model_id = self._model(request)
        lines = [asdict(line) for line in self._services.enquiries.story(model_id)]
        return codec.answer(request, {"clock": self._services.enquiries.now(), "lines": lines})

    # --- changing ---

    async def pause(self, request: web.Request) -> web.Response:
        """Nothing more of the model starts until it is resumed. Its owner or an administrator."""
        self._services.post(LanePaused(self._model(request)))
        return codec.answer(request, {"paused": True})

    async def resume(self, request: web.Request) -> web.Response:
        """The model goes on."""
        self._services.post(LaneResumed(self._model(request)))
        return codec.answer(request, {"paused": False})

    async def set_weight(self, request: web.Request) -> web.Response:
        """An owner's share of the engine beside the others', until the next start. Administrators
        alone."""
        if not auth.is_admin(request):
            raise Forbidden("only an administrator changes weights")
        body = await self._services.read(request, schema.OwnerWeight)
        owner = self._owner(request)
        self._change(owner, OwnerQuota(weight=body.weight))
        return codec.answer(request, {"owner": owner, "weight": body.weight})

    async def quota(self, request: web.Request) -> web.Response:
        """What an owner may have. The owner itself, or an administrator."""
        owner = self._owner(request)
        if owner != auth.owner_of(request) and not auth.is_admin(request):
            raise NotFound(f"no owner {owner!r}")
        return self._quota_of(request, owner)

    async def set_quota(self, request: web.Request) -> web.Response:
        """What an owner may have, for what comes from now on, until the next start; what is not
        named stays. Administrators alone."""
        if not auth.is_admin(request):
            raise Forbidden("only an administrator changes quotas")
        body = await self._services.read(request, OwnerQuota)
        owner = self._owner(request)
        self._change(owner, body)
        return self._quota_of(request, owner)

    def _change(self, owner: OwnerId, given: OwnerQuota) -> None:
        quota = self._services.entitlements.change(owner, given)
        self._services.post(WeightChanged(owner, quota.weight))

    def _quota_of(self, request: web.Request, owner: OwnerId) -> web.Response:
        quota = asdict(self._services.entitlements.of(owner))
        return codec.answer(request, {"owner": owner, **quota})

    def _owner(self, request: web.Request) -> OwnerId:
        return OwnerId(self._services.check_id(request.match_info["owner"]))

    # --- who sees what ---

    def _model(self, request: web.Request) -> str:
        """Raises `NotFound` for another owner's model."""
        model_id = self._services.check_id(request.match_info["model_id"])
        model = self._services.models.find(model_id)
        if model is None or not (model.owner == auth.owner_of(request) or auth.is_admin(request)):
            raise NotFound(f"no model {model_id!r}")
        return model_id

    def _sight_of(self, request: web.Request) -> Callable[[str, str], bool]:
        """Whether the caller may see the name of that level."""
        if auth.is_admin(request):
            return lambda level, name: True
        owner = auth.owner_of(request)

        def sees(level: str, name: str) -> bool:
            if level == "owner":
                return name == owner
            return owns(name.partition(":")[0])  # lanes are named after their session

        @cache
        def owns(session_id: str) -> bool:
            with suppress(NotFound):
                return bool(self._services.catalogue.session(session_id, owner))
            return False

        return sees


def _by_level(
    accounts: Mapping[tuple[str, str], Account], sees: Callable[[str, str], bool]
) -> dict[str, dict[str, Any]]:
    levels: dict[str, dict[str, Any]] = {"owner": {}, "session": {}, "lane": {}}
    for (level, name), account in accounts.items():
        if sees(level, name):
            levels[level][name] = asdict(account)
    return levels


def _part(timeline: Sequence[PassRecord], after: int, limit: int) -> Sequence[PassRecord]:
    """The last `limit` passes; or the first ones of those after the pass `after`."""
    if after < 0:
        return timeline[-limit:]
    return timeline[bisect_right(timeline, after, key=_pass_id) :][:limit]


def _pass_id(record: PassRecord) -> int:
    return record.pass_id


def _record(record: PassRecord, sees: Callable[[str, str], bool]) -> dict[str, Any]:
    def seen(level: str, names: Iterable[str]) -> list[str]:
        return [name for name in names if sees(level, name)]

    return {
        "pass_id": record.pass_id,
        "kind": record.kind,
        "start": record.start,
        "end": record.end,
        "seconds": record.seconds,
        "tokens": record.tokens,
        "requests": record.requests,
        "prefilled": record.prefilled,
        "rows": record.rows,
        "waits": record.waits,
        "owners": len(record.who),
        "who": seen("owner", record.who),
        "lanes": seen("lane", record.lanes),
    }
