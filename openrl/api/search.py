"""Finding sessions by what is known of them, newest first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from aiohttp import web

from openrl.api import auth, codec, rest_schema, shapes
from openrl.api.rest_schema import SearchSessions, SearchStatus
from openrl.api.services import Services
from openrl.api.shapes import Plain
from openrl.catalogue import Session
from openrl.types import OwnerId

ACTIVE_SECONDS = 300.0
"""A session that said nothing for longer is not known to be running."""

NO_PROJECT = "none"


class Search:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/api/v1/sessions/search", self.search),
            web.put("/api/v1/sessions/{session_id}/project", self.set_project),
        ]

    async def search(self, request: web.Request) -> web.Response:
        """Each owner finds its own; `accessible` finds no more, since sessions are not shared."""
        body = await self._services.read(request, rest_schema.SearchSessions)
        owner = auth.owner_of(request)
        found = list(islice(self._found(body, owner), body.limit + 1))
        page, more = found[: body.limit], len(found) > body.limit
        answer: Plain = {"sessions": [self._summary(each) for each in page], "next_cursor": None}
        if more:
            last = page[-1]
            answer["next_cursor"] = {
                "last_created_at": shapes.time(last.created_at),
                "last_session_id": last.session_id,
            }
        return codec.answer(request, answer)

    def _found(self, body: SearchSessions, owner: OwnerId) -> Iterator[Session]:
        if body.owner.type == "user" and shapes.urn(owner) not in body.owner.owner_urns:
            return
        last = None if body.cursor is None else body.cursor.last_session_id
        for session in self._services.catalogue.sessions_after(owner, last):
            if self._fits(body, session):
                yield session

    def _fits(self, body: SearchSessions, session: Session) -> bool:
        metadata = session.user_metadata or {}
        return (
            _named(body, session)
            and (body.project_ids is None or (session.project_id or NO_PROJECT) in body.project_ids)
            and body.user_metadata.items() <= dict(metadata).items()
            and (body.statuses is None or any(self._is(each, session) for each in body.statuses))
        )

    def _is(self, wanted: SearchStatus, session: Session) -> bool:
        status = self._status(session)
        if status is None or status["type"] != wanted.type:
            return False
        return wanted.reasons is None or session.finished in wanted.reasons

    def _status(self, session: Session) -> Plain | None:
        if session.finished is not None:
            reason = {"type": session.finished}
            return {"type": "client_finished", "reason": reason, "detail": session.detail}
        heard = self._services.heard.get(session.session_id)
        if heard is None or heard < self._services.monotonic() - ACTIVE_SECONDS:
            return None
        return {"type": "active"}

    def _summary(self, session: Session) -> Plain:
        count, size = self._services.catalogue.stored(session.session_id)
        return {
            "session_id": session.session_id,
            "created_at": shapes.time(session.created_at),
            "owner": shapes.urn(session.owner),
            "project_id": session.project_id or NO_PROJECT,
            "status": self._status(session),
            "checkpoints_count": count,
            "checkpoint_storage_bytes": size,
            "display_name": session.display_name,
            "user_metadata": session.user_metadata,
        }

    async def set_project(self, request: web.Request) -> web.Response:
        """A project is a name of the owner's own choosing: it need not be made first."""
        body = await self._services.read(request, rest_schema.SetProject)
        session_id = self._services.check_id(request.match_info["session_id"])
        project, owner = self._services.check_id(body.project_id), auth.owner_of(request)
        self._services.catalogue.set_project(session_id, owner, project)
        self._services.note(
            owner, "project_session_assign", session_id=session_id, project_id=project
        )
        return codec.answer(request, {})


def _named(body: SearchSessions, session: Session) -> bool:
    """With both an id and a name, either will do; every word must be in the name."""
    wanted: list[bool] = []
    if body.session_id is not None:
        wanted.append(session.session_id == body.session_id)
    if body.display_name is not None:
        name = (session.display_name or "").lower()
        wanted.append(all(word in name for word in body.display_name.lower().split()))
    return any(wanted) if wanted else True
