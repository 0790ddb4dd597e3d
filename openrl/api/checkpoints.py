"""What is done to a checkpoint that stands: published, kept for a time, copied, deleted."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from typing import Any

from aiohttp import web

from openrl.api import auth, codec, rest_schema
from openrl.api.services import Services
from openrl.catalogue import Checkpoint, Run, Session
from openrl.engines.validation import check_ttl
from openrl.errors import Unavailable, UserError
from openrl.paths import ParsedPath
from openrl.types import ModelId, OwnerId, SessionId, TinkerPath

ONE = (
    "/api/v1/training_runs/{run}/checkpoints/{kind:weights|sampler_weights|external_weights}/{name}"
)


class Checkpoints:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.delete(ONE, self.delete),
            web.put(f"{ONE}/ttl", self.set_ttl),
            web.post(f"{ONE}/publish", self.publish),
            web.delete(f"{ONE}/publish", self.unpublish),
            web.post("/api/v1/weights_info", self.weights_info),
            web.post("/api/v1/copy_weights", self.copy),
        ]

    async def delete(self, request: web.Request) -> web.Response:
        """Files go first: they make the room that a full disk needs to forget their row."""
        catalogue, owner = self._services.catalogue, auth.owner_of(request)
        gone = catalogue.checkpoint(path_of(request), owner)
        try:
            await asyncio.to_thread(self._services.checkpoints.delete, gone.path, gone.created_at)
        except OSError as error:
            raise Unavailable(f"where {gone.path!r} is kept cannot be reached: {error}") from error
        catalogue.delete_checkpoint(gone)
        self._note(request, "checkpoint_delete", gone.path)
        return codec.answer(request, {})

    async def set_ttl(self, request: web.Request) -> web.Response:
        """Counted from now; null means never."""
        body = await self._services.read(request, rest_schema.SetTtl)
        path, expires = path_of(request), self._expiry(body.ttl_seconds)
        self._services.catalogue.set_expiry(path, auth.owner_of(request), expires)
        self._note(request, "checkpoint_set_ttl", path, ttl_seconds=str(body.ttl_seconds))
        return codec.answer(request, {})

    async def publish(self, request: web.Request) -> web.Response:
        return self._set_public(request, True, "checkpoint_publish")

    async def unpublish(self, request: web.Request) -> web.Response:
        return self._set_public(request, False, "checkpoint_unpublish")

    def _set_public(self, request: web.Request, public: bool, event: str) -> web.Response:
        """A repeat is no conflict: the SDK repeats a call whose answer was lost, and a 409 for
        five minutes."""
        path, owner = path_of(request), auth.owner_of(request)
        if self._services.catalogue.checkpoint(path, owner).public != public:
            self._services.catalogue.publish(path, owner, public)
            self._note(request, event, path)
        return codec.answer(request, {})

    async def weights_info(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, rest_schema.WeightsInfo)
        owner = auth.owner_of(request)
        checkpoint = self._services.catalogue.readable_checkpoint(body.tinker_path, owner)
        answer = {
            "base_model": checkpoint.base_model,
            "is_lora": not checkpoint.lora.full,
            "lora_rank": checkpoint.lora.shown_rank,
            "train_unembed": checkpoint.lora.train_unembed,
            "train_mlp": checkpoint.lora.train_mlp,
            "train_attn": checkpoint.lora.train_attn,
        }
        return codec.answer(request, answer)

    # --- copies ---

    async def copy(self, request: web.Request) -> web.Response:
        """A run of its own that holds the copy alone: it can be sampled from and loaded, not
        trained. The files are shared until the last of both is deleted. A repeat with the same
        `X-Idempotency-Key`, or into the same place, answers with the copy that stands."""
        body = await self._services.read(request, rest_schema.CopyWeights)
        check_ttl(body.ttl_seconds)
        owner = auth.owner_of(request)
        token = request.headers.get("X-Tinker-Weights-Access-Token", body.weights_access_token)
        source = self._services.readable(request, body.source_path, token)
        model_id, session = self._destination(request, body, owner)
        path = ParsedPath(model_id, source.kind, source.name).path
        if standing := self._services.catalogue.find_run(model_id):
            if standing.owner != owner or standing.copied_from != source.path:
                raise UserError(f"model {model_id!r} exists already: choose another model_seq_id")
            return codec.answer(request, {"tinker_path": path})
        await self._copy(source, session, model_id, path, body.ttl_seconds)
        self._services.note_read(source, owner, "copy")
        self._note(request, "checkpoint_create", path, copied_from=source.path)
        return codec.answer(request, {"tinker_path": path})

    def _destination(
        self, request: web.Request, body: rest_schema.CopyWeights, owner: OwnerId
    ) -> tuple[ModelId, Session]:
        if (body.session_id is None) != (body.model_seq_id is None):
            raise UserError("copy_weights takes session_id and model_seq_id together")
        if body.session_id is not None:
            session = self._services.live_session(body.session_id, owner)
            return ModelId(f"{session.session_id}:train:{body.model_seq_id}"), session
        if not body.destination_project_id:
            raise UserError(
                "copy_weights takes destination_project_id, or session_id and model_seq_id"
            )
        key = request.headers.get("X-Idempotency-Key", "")
        text = f"{owner}\n{body.source_path}\n{key or self._services.clock()}"
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        session = Session(
            SessionId(f"{self._services.config.home}-copy-{name}"),
            owner,
            self._services.clock(),
            tags=("copy",),
            project_id=self._services.check_id(body.destination_project_id),
        )
        return ModelId(f"{session.session_id}:train:0"), session

    async def _copy(
        self,
        source: Checkpoint,
        session: Session,
        model_id: ModelId,
        path: TinkerPath,
        ttl_seconds: int | None,
    ) -> None:
        now, store = self._services.clock(), self._services.checkpoints
        store.check_room(*self._services.catalogue.kept(session.owner))
        await self._services.fetching.bring(source)
        size = await asyncio.to_thread(store.copy, source.path, source.created_at, path, now)
        run = Run(
            model_id, session.session_id, session.owner, source.base_model, source.lora, now, now
        )
        catalogue = self._services.catalogue
        catalogue.add_session(session)
        catalogue.add_run(replace(run, copied_from=source.path))
        catalogue.add_checkpoint(
            replace(
                source,
                path=path,
                model_id=model_id,
                owner=session.owner,
                created_at=now,
                size_bytes=size,
                expires_at=self._expiry(ttl_seconds),
                public=False,
            )
        )

    # --- all of them ---

    def _expiry(self, ttl_seconds: int | None) -> float | None:
        """Raises `UserError`."""
        check_ttl(ttl_seconds)
        return None if ttl_seconds is None else self._services.clock() + ttl_seconds

    def _note(self, request: web.Request, event: str, path: str, **details: Any) -> None:
        self._services.note(auth.owner_of(request), event, tinker_path=path, **details)


def path_of(request: web.Request) -> TinkerPath:
    run, kind, name = (request.match_info[part] for part in ("run", "kind", "name"))
    return TinkerPath(f"tinker://{run}/{kind}/{name}")
