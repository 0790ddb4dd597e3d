"""What has been trained: runs and their checkpoints, as the catalogue knows them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from openrl.api import auth, codec, paging, schema
from openrl.api.services import Services
from openrl.catalogue import Checkpoint, Run
from openrl.engines.validation import check_ttl
from openrl.errors import NotFound
from openrl.types import TinkerPath

_TYPES = {"weights": "training", "sampler_weights": "sampler"}
_ONE = "/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"


class Checkpoints:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/v1/training_runs", self.runs),
            web.get("/api/v1/training_runs/{run}", self.run),
            web.get("/api/v1/training_runs/{run}/checkpoints", self.of_run),
            web.get("/api/v1/checkpoints", self.all),
            web.delete(_ONE, self.delete),
            web.put(f"{_ONE}/ttl", self.set_ttl),
            web.post("/api/v1/weights_info", self.weights_info),
        ]

    async def runs(self, request: web.Request) -> web.Response:
        limit, offset = paging.window(request)
        page = self._services.catalogue.runs(auth.owner_of(request), limit, offset)
        answer = {
            "training_runs": [self._run(run) for run in page.items],
            "cursor": paging.cursor(limit, offset, page.total),
        }
        return codec.answer(request, answer)

    async def run(self, request: web.Request) -> web.Response:
        run_id = self._services.check_id(request.match_info["run"])
        run = self._services.catalogue.run(run_id, auth.owner_of(request))
        return codec.answer(request, self._run(run))

    async def of_run(self, request: web.Request) -> web.Response:
        run_id = self._services.check_id(request.match_info["run"])
        found = self._services.catalogue.checkpoints_of(run_id, auth.owner_of(request))
        answer = {"checkpoints": [_checkpoint(each) for each in found], "cursor": None}
        return codec.answer(request, answer)

    async def all(self, request: web.Request) -> web.Response:
        limit, offset = paging.window(request)
        page = self._services.catalogue.checkpoints(auth.owner_of(request), limit, offset)
        answer = {
            "checkpoints": [_checkpoint(each) for each in page.items],
            "cursor": paging.cursor(limit, offset, page.total),
        }
        return codec.answer(request, answer)

    async def delete(self, request: web.Request) -> web.Response:
        """The name is gone at once; the files follow off the event loop."""
        catalogue = self._services.catalogue
        gone = catalogue.delete_checkpoint(_path(request), auth.owner_of(request))
        await asyncio.to_thread(self._services.checkpoints.delete, gone.path, gone.created_at)
        return codec.answer(request, {})

    async def set_ttl(self, request: web.Request) -> web.Response:
        """Counted from now; null means never."""
        body = await self._services.read(request, schema.SetTtl)
        check_ttl(body.ttl_seconds)
        expires = None
        if body.ttl_seconds is not None:
            expires = self._services.clock() + body.ttl_seconds
        self._services.catalogue.set_expiry(_path(request), auth.owner_of(request), expires)
        return codec.answer(request, {})

    async def weights_info(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.WeightsInfo)
        checkpoint = self._services.catalogue.checkpoint(body.tinker_path, auth.owner_of(request))
        answer = {
            "base_model": checkpoint.base_model,
            "is_lora": True,
            "lora_rank": checkpoint.lora.rank,
            "train_unembed": checkpoint.lora.train_unembed,
            "train_mlp": checkpoint.lora.train_mlp,
            "train_attn": checkpoint.lora.train_attn,
        }
        return codec.answer(request, answer)

    def _run(self, run: Run) -> dict[str, Any]:
        saved = self._services.catalogue.checkpoints_of(run.model_id, run.owner)
        newest = {kind: next((c for c in saved if c.kind == kind), None) for kind in _TYPES}
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": run.owner,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": run.lora.rank,
            "last_request_time": _time(run.last_request_at),
            "last_checkpoint": _optional(newest["weights"]),
            "last_sampler_checkpoint": _optional(newest["sampler_weights"]),
            "user_metadata": run.user_metadata,
        }


def _path(request: web.Request) -> TinkerPath:
    run, kind, name = (request.match_info[part] for part in ("run", "kind", "name"))
    if kind not in _TYPES:
        raise NotFound(f"{kind!r} is no kind of checkpoint: {', '.join(_TYPES)}")
    return TinkerPath(f"tinker://{run}/{kind}/{name}")


def _optional(checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    return None if checkpoint is None else _checkpoint(checkpoint)


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    expires = checkpoint.expires_at
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": _time(checkpoint.created_at),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if expires is None else _time(expires),
    }


def _time(unix_seconds: float) -> str:
    """RFC 3339, in UTC."""
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat()
