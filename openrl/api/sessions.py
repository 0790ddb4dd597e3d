"""Sessions: made, kept alive, finished, listed."""

from __future__ import annotations

import uuid

from aiohttp import web

from openrl.api import auth, codec, paging, runs, schema, versions
from openrl.api.services import Services
from openrl.catalogue import Session
from openrl.errors import PayloadTooLarge
from openrl.types import SessionId


class Sessions:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/create_session", self.create),
            web.post("/api/v1/session_heartbeat", self.heartbeat),
            web.post("/api/v1/sessions/{session_id}/finish", self.finish),
            web.get("/api/v1/sessions", self.list),
            web.get("/api/v1/sessions/{session_id}", self.get),
        ]

    async def create(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.CreateSession)
        versions.check(versions.sdk_version(request))
        limit = self._services.config.limits.metadata_bytes
        texts = [*body.tags, body.sdk_version, body.project_id or "", body.display_name or ""]
        if sum(map(len, texts)) > limit:
            raise PayloadTooLarge(f"tags and names have more than {limit} characters")
        session = Session(
            session_id=SessionId(f"{self._services.config.home}-{uuid.uuid4()}"),
            owner=auth.owner_of(request),
            created_at=self._services.clock(),
            tags=tuple(body.tags),
            user_metadata=self._services.metadata(body.user_metadata),
            sdk_version=body.sdk_version,
            project_id=body.project_id,
            display_name=body.display_name,
        )
        self._services.catalogue.add_session(session)
        self._services.heard[session.session_id] = self._services.monotonic()
        return codec.answer(request, {"type": "create_session", "session_id": session.session_id})

    async def heartbeat(self, request: web.Request) -> web.Response:
        """410 ends the SDK's loop: right for a finished session."""
        body = await self._services.read(request, schema.SessionHeartbeat)
        session = self._services.live_session(body.session_id, auth.owner_of(request))
        self._services.heartbeats[session.session_id] = self._services.monotonic()
        return codec.answer(request, {"type": "session_heartbeat"})

    async def finish(self, request: web.Request) -> web.Response:
        body = await self._services.read(request, schema.FinishSession)
        session_id = self._services.check_id(request.match_info["session_id"])
        reason = body.reason.type[: self._services.config.limits.id_chars]
        self._services.catalogue.finish_session(
            session_id, auth.owner_of(request), reason, body.detail and codec.shortened(body.detail)
        )
        self._services.admission.end_session(SessionId(session_id))
        return codec.answer(request, {})

    async def list(self, request: web.Request) -> web.Response:
        runs.accessible(request)  # one's own either way: sessions are not shared
        limit, offset = paging.window(request)
        page = self._services.catalogue.sessions(auth.owner_of(request), limit, offset)
        answer = {
            "sessions": [each.session_id for each in page.items],
            **paging.times(request, (each.created_at for each in page.items)),
        }
        return codec.answer(request, answer)

    async def get(self, request: web.Request) -> web.Response:
        owner = auth.owner_of(request)
        session = self._services.session(request.match_info["session_id"], owner)
        catalogue = self._services.catalogue
        answer = {
            "training_run_ids": [
                run.model_id for run in catalogue.runs_of(session.session_id, owner)
            ],
            "sampler_ids": [
                sampler.sampling_session_id
                for sampler in catalogue.samplers_of(session.session_id, owner)
            ],
            "user_metadata": session.user_metadata,
            "display_name": session.display_name,
        }
        return codec.answer(request, answer)
