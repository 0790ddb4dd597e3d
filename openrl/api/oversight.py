"""Checkpoints as a dashboard lists and changes them: one's own, or for administrators all.

What is done to one is done by the routes of `checkpoints` and `downloads`, in its owner's name.
"""

from __future__ import annotations

from dataclasses import replace

from aiohttp import web
from aiohttp.typedefs import Handler

from openrl.api import auth, codec, shapes
from openrl.api.checkpoints import Checkpoints, path_of
from openrl.api.downloads import Downloads
from openrl.api.services import Services
from openrl.catalogue import Checkpoint
from openrl.errors import NotFound

ALL = "/api/v1/openrl/checkpoints"
ONE = ALL + "/{run}/{kind:weights|sampler_weights|external_weights}/{name}"
MOST = 500


class Oversight:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        checkpoints, downloads = Checkpoints(self._services), Downloads(self._services)
        return [
            web.get(ALL, self.checkpoints),
            web.delete(ONE, self._for_owner(checkpoints.delete)),
            web.put(f"{ONE}/ttl", self._for_owner(checkpoints.set_ttl)),
            web.post(f"{ONE}/publish", self._for_owner(checkpoints.publish)),
            web.delete(f"{ONE}/publish", self._for_owner(checkpoints.unpublish)),
            web.get(f"{ONE}/archive", self._for_owner(downloads.archive)),
        ]

    async def checkpoints(self, request: web.Request) -> web.Response:
        """The newest checkpoints, with their owners: an administrator's list holds everybody's."""
        catalogue = self._services.catalogue
        if auth.is_admin(request):
            page = catalogue.all_checkpoints(MOST)
        else:
            page = catalogue.checkpoints(auth.owner_of(request), MOST)
        listed = [
            shapes.checkpoint(each) | {"run": each.model_id, "owner": each.owner}
            for each in page.items
        ]
        return codec.answer(request, {"checkpoints": listed, "total": page.total})

    def _for_owner(self, handler: Handler) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            checkpoint = self._found(request)
            request[auth.HOLDER] = replace(auth.holder_of(request), owner=checkpoint.owner)
            return await handler(request)

        handle.__doc__ = f"For a dashboard: as the route of the same name. {handler.__doc__ or ''}"
        return handle

    def _found(self, request: web.Request) -> Checkpoint:
        """Raises `NotFound` for another owner's, unless an administrator asks."""
        path = path_of(request)
        found = self._services.catalogue.find_checkpoint(path)
        if found is None or not (found.owner == auth.owner_of(request) or auth.is_admin(request)):
            raise NotFound(f"no checkpoint {path!r}")
        return found
