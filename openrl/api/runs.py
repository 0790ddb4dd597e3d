"""What has been trained: lists of runs and their checkpoints.

`access_scope=accessible` adds to one's own what other owners have published.
"""

from __future__ import annotations

from aiohttp import web

from openrl.api import auth, codec, paging, shapes, versions
from openrl.api.services import Services
from openrl.catalogue import Checkpoint, Run
from openrl.errors import NotFound, UserError


class Runs:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/api/v1/training_runs", self.list),
            web.get("/api/v1/training_runs/{run}", self.get),
            web.get("/api/v1/training_runs/{run}/checkpoints", self.checkpoints_of),
            web.get("/api/v1/checkpoints", self.checkpoints),
        ]

    async def list(self, request: web.Request) -> web.Response:
        limit, offset = paging.window(request)
        page = self._services.catalogue.runs(
            auth.owner_of(request),
            limit,
            offset,
            project_id=request.query.get("project_id"),
            readable=accessible(request),
        )
        answer = {
            "training_runs": [shapes.run(each, self._saved(request, each)) for each in page.items],
            "cursor": paging.cursor(limit, offset, page.total),
            **paging.times(request, (each.created_at for each in page.items)),
        }
        return codec.answer(request, answer)

    async def get(self, request: web.Request) -> web.Response:
        run = self._run(request)
        if run.owner != auth.owner_of(request) and not accessible(request):
            raise NotFound(f"no model {run.model_id!r}")
        return codec.answer(request, shapes.run(run, self._saved(request, run)))

    async def checkpoints_of(self, request: web.Request) -> web.Response:
        found = shapes.visible(
            self._saved(request, self._run(request)), versions.sdk_version(request)
        )
        answer = {"checkpoints": [shapes.checkpoint(each) for each in found], "cursor": None}
        return codec.answer(request, answer)

    async def checkpoints(self, request: web.Request) -> web.Response:
        """Of a page, an old SDK sees what it can read; the count is that of all."""
        limit, offset = paging.window(request)
        page = self._services.catalogue.checkpoints(auth.owner_of(request), limit, offset)
        found = shapes.visible(page.items, versions.sdk_version(request))
        answer = {
            "checkpoints": [shapes.checkpoint(each) for each in found],
            "cursor": paging.cursor(limit, offset, page.total),
            **paging.times(request, (each.created_at for each in found)),
        }
        return codec.answer(request, answer)

    def _run(self, request: web.Request) -> Run:
        """One's own, or one of which something is published."""
        run_id = self._services.check_id(request.match_info["run"])
        catalogue, owner = self._services.catalogue, auth.owner_of(request)
        run = catalogue.find_run(run_id)
        if run is None or run.owner == owner:
            return catalogue.run(run_id, owner)
        catalogue.published_of(run_id)
        return run

    def _saved(self, request: web.Request, run: Run) -> tuple[Checkpoint, ...]:
        if run.owner == auth.owner_of(request):
            return self._services.catalogue.checkpoints_of(run.model_id, run.owner)
        return self._services.catalogue.published_of(run.model_id)


def accessible(request: web.Request) -> bool:
    """Raises `UserError` for a scope that is none."""
    scope = request.query.get("access_scope", "owned")
    if scope not in ("owned", "accessible"):
        raise UserError(f"access_scope must be owned or accessible, not {scope[:20]!r}")
    return scope == "accessible"
