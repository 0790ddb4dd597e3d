"""What nodes ask each other."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from openrl.api import auth
from openrl.api.cluster.locating import Locator, Placing
from openrl.api.cluster.peers import REPORT, ROOT, Peers
from openrl.api.services import Services
from openrl.catalogue.records import encode
from openrl.cluster.placement import Report
from openrl.errors import NotFound, UserError


class Consultation:
    """Routes for requests that carry a hop alone."""

    def __init__(self, services: Services, peers: Peers, locator: Locator) -> None:
        self._services = services
        self._peers = peers
        self._locator = locator
        self._report = reporter(services)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(REPORT, self.report),
            web.post(f"{ROOT}/place", self.place),
            web.get(f"{ROOT}/where/{{name}}", self.where),
            web.get(f"{ROOT}/sessions/{{session_id}}", self.session),
        ]

    async def report(self, request: web.Request) -> web.Response:
        """Signed, since it says where requests shall be sent."""
        token = self._peers.hops.sign_report(self._report(), self._services.clock())
        return web.json_response({"report": token})

    async def place(self, request: web.Request) -> web.Response:
        placing = msgspec.json.decode(await request.read(), type=Placing)
        node = await self._locator.place(placing, auth.holder_of(request))
        return web.json_response({"node": node})

    async def where(self, request: web.Request) -> web.Response:
        return web.json_response({"node": await self._locator.serving(request.match_info["name"])})

    async def session(self, request: web.Request) -> web.Response:
        session = self._services.catalogue.find_session(request.match_info["session_id"])
        if session is None:
            raise NotFound(f"no session {request.match_info['session_id']!r}")
        return web.json_response({"session": encode(session)})


def reporter(services: Services) -> Callable[[], Report]:
    config = services.config.cluster

    def report() -> Report:
        return Report(
            node=config.node,
            address=config.address,
            bases=tuple(services.models.bases),
            ready=tuple(each.name for each in services.status() if each.state == "ready"),
            models=len(services.models.all_alive()),
            draining=services.admission.draining,
        )

    return report


def check(services: Services) -> None:
    """Raises `UserError` for a node that could not take part."""
    config = services.config.cluster
    for key, value in (("address", config.address), ("secret", config.secret)):
        if not value:
            raise UserError(f"cluster.{key} is missing: a node of a cluster needs it")
    if config.node.endswith(("-direct", "-copy")):
        raise UserError("cluster.node ends in -direct or -copy: sessions have such names")
