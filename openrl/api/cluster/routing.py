"""Where requests enter a node that is one of many.

A request that carries a hop is for this node and goes no further, so that there are no loops. Any
other is answered here, handed on to the node that it belongs to, or put together from all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler

from openrl.actors import Tasks
from openrl.api import auth, codec, downloads, paging
from openrl.api.cluster import addressing, consultation
from openrl.api.cluster.addressing import Address
from openrl.api.cluster.forwarding import Forwarding
from openrl.api.cluster.locating import Locator
from openrl.api.cluster.merging import LISTS, Merging
from openrl.api.cluster.peers import ROOT, Peers
from openrl.api.services import Services
from openrl.cluster import names
from openrl.cluster.hops import HEADER, Hop
from openrl.errors import OpenRLError, Unauthenticated
from openrl.keys import Holder
from openrl.types import OwnerId

log = logging.getLogger("openrl.api")

HOP = web.RequestKey("hop", Hop)
BEAT = "/api/v1/session_heartbeat"
_BEAT_SECONDS = 5.0
_NODE = Holder(OwnerId("-"), "node")
"""One that asks for itself: no owner has this name."""


class Routing:
    def __init__(self, services: Services) -> None:
        """Raises `UserError` for a configuration that is not whole."""
        consultation.check(services)
        self._services = services
        report = consultation.reporter(services)
        config = services.config.cluster
        self._peers = Peers(config, report, services.clock, services.monotonic)
        self._locator = Locator(services, self._peers)
        self._forwarding = Forwarding(services, self._peers)
        self._merging = Merging(self._peers, services.monotonic)
        self._consultation = consultation.Consultation(services, self._peers, self._locator)
        self._tasks = Tasks(lambda name, error: None)

    def attach(self, app: web.Application) -> None:
        app.add_routes(self._consultation.routes())
        app.cleanup_ctx.append(self._running)

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        async with self._peers.open():
            await self._peers.round()
            self._tasks.spawn(self._peers.watch(), "watch the other nodes")
            yield
            await self._tasks.close()

    # --- who it is ---

    @web.middleware
    async def recognised(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Before authentication, which leaves alone whom another node has let in."""
        if (token := request.headers.get(HEADER)) is not None:
            hop = self._peers.hops.read(
                token, self._peers.node, request.method, request.raw_path, self._services.clock()
            )
            request[HOP] = hop
            request[auth.HOLDER] = hop.caller or _NODE
        elif request.path.startswith(f"{ROOT}/"):
            raise Unauthenticated(f"{ROOT} is for the nodes of this cluster")
        return await handler(request)

    # --- where it goes ---

    @web.middleware
    async def routed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.match_info.http_exception is not None or request.path.startswith(f"{ROOT}/"):
            return await handler(request)
        if HOP in request:
            return await self._arrived(request, handler)
        if request.method == "GET" and request.path in LISTS:
            return await self._merging.merged(request, handler)
        address = await self._address(request)
        if address is None:
            return await handler(request)
        if request.body_exists:
            request[codec.BODY] = await self._services.body(request)
        node = await self._node(request, address)
        if node != self._peers.node:
            return await self._forwarding.hand_on(request, node, request.get(codec.BODY))
        return await self._here(request, handler, address)

    async def _node(self, request: web.Request, address: Address) -> str:
        holder = request.get(auth.HOLDER)
        if holder is None:  # a link: it is its own key, and names a checkpoint
            return await self._locator.serving(address.name or "")
        return await self._locator.node_for(address, holder)

    async def _arrived(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method == "GET" and request.path in LISTS:
            request[paging.PART] = True
            return await handler(request)
        address = await self._address(request)
        if address is None:
            return await handler(request)
        if request.body_exists:
            request[codec.BODY] = await self._services.body(request)
        return await self._here(request, handler, address)

    async def _address(self, request: web.Request) -> Address | None:
        """Raises `UserError` for a body that cannot be read."""
        if request.path in addressing.BODIES:
            body = await self._services.body(request)
            request[codec.BODY] = body
            return addressing.in_body(request.path, body, codec.encoding_of(request))
        if request.path.startswith(downloads.PREFIX):
            token = request.match_info["token"]
            link = self._services.signer.read_link(token, self._services.clock())
            return Address(names.run_of(link.path) or link.path)  # a trace's is its session
        return addressing.in_path(request.match_info)

    # --- sessions whose work is elsewhere too ---

    async def _here(
        self, request: web.Request, handler: Handler, address: Address
    ) -> web.StreamResponse:
        name = address.name
        if name is not None:
            await self._locator.introduce(name)
        response = await handler(request)
        # A home tells those that serve its session, and these have nobody to tell: no loop.
        if name is None or response.status >= web.HTTPBadRequest.status_code:
            return response
        nodes = self._services.catalogue.placements.nodes_of(name) - {self._peers.node}
        if not nodes:
            return response
        if request.path == BEAT or request.path.endswith("/finish"):
            await asyncio.gather(*(self._told(node, request) for node in nodes))
        elif request.method == "GET" and request.path == f"/api/v1/sessions/{name}":
            return await self._merging.with_parts(request, response, nodes)
        return response

    async def _told(self, node: str, request: web.Request) -> None:
        """One that is away finds out by the silence."""
        body = request.get(codec.BODY)
        headers = {"Content-Type": request.content_type}
        caller = auth.holder_of(request)
        try:
            async with self._peers.call(
                node, request.method, request.raw_path, _BEAT_SECONDS, caller, headers, body
            ):
                pass
        except OpenRLError as error:
            log.warning("%s of a session was not told to %s: %s", request.path, node, error.message)
