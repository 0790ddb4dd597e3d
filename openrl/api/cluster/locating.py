"""Which node a request belongs to."""

from __future__ import annotations

from urllib.parse import quote

import msgspec

from openrl.api.cluster.addressing import Address
from openrl.api.cluster.peers import ROOT, Peers
from openrl.api.services import Services
from openrl.catalogue.records import Session, decode
from openrl.cluster import names
from openrl.keys import Holder

REMEMBERED = 65536
"""Places of models whose home is elsewhere, some hundred bytes each."""


class Placing(msgspec.Struct, frozen=True):
    """A home is asked where what is new shall go."""

    name: str
    base: str | None = None
    path: str | None = None


class Locator:
    def __init__(self, services: Services, peers: Peers) -> None:
        self._services = services
        self._peers = peers
        self._known: dict[str, str] = {}

    async def node_for(self, address: Address, caller: Holder) -> str:
        """Raises `Away` when only a node that is away knows, and what that node raises."""
        if address.new and address.name is not None:
            return await self._placed(Placing(address.name, address.base, address.path), caller)
        if address.name is not None:
            return await self.serving(address.name)
        if address.path is not None and (run := names.run_of(address.path)):
            return await self.serving(run)
        if address.base is None or address.base in self._services.models.bases:
            return self._peers.node
        now = self._services.monotonic()
        return self._peers.members.place(address.base, caller.owner, now)

    async def serving(self, name: str) -> str:
        """Of a session, its home. What is too long for an id is refused here."""
        if len(name) > self._services.config.limits.id_chars:
            return self._peers.node
        if (node := names.node_of(name)) is not None:
            return self._own_if_kept(node, name)
        home = names.home_of(name)
        if home is None or self._services.catalogue.find_run(name) is not None:
            return self._peers.node
        if home == self._peers.node:
            return self._services.catalogue.placements.node(name) or home
        if name not in self._known:
            answer = await self._peers.ask(home, "GET", f"{ROOT}/where/{quote(name, safe='')}")
            self._remember(name, answer["node"])
        return self._known[name]

    async def place(self, placing: Placing, caller: Holder) -> str:
        """At the home. Raises `NotFound` for a session that is not the caller's."""
        session = self._services.live_session(names.session_of(placing.name), caller.owner)
        placements, now = self._services.catalogue.placements, self._services.monotonic()
        if standing := placements.node(placing.name):
            return standing
        if self._services.catalogue.find_run(placing.name) is not None:
            return self._peers.node
        if placing.path is not None and (run := names.run_of(placing.path)):
            node = await self.serving(run)
        elif placing.base is not None:
            favourite = self._peers.node if names.is_sample(placing.name) else None
            node = self._peers.members.place(placing.base, placing.name, now, favourite)
        else:
            node = self._peers.node
        return placements.put(placing.name, session.session_id, node)

    async def introduce(self, name: str) -> None:
        """A session that has its home elsewhere is known here before its work arrives."""
        session_id = names.session_of(name)
        home = names.home_of(session_id)
        if home in (None, self._peers.node) or self._services.catalogue.find_session(session_id):
            return
        assert home is not None
        path = f"{ROOT}/sessions/{quote(session_id, safe='')}"
        answer = await self._peers.ask(home, "GET", path)
        self._services.catalogue.add_session(decode(Session, answer["session"]))

    async def _placed(self, placing: Placing, caller: Holder) -> str:
        home = names.home_of(placing.name)
        if home in (None, self._peers.node):
            return await self.place(placing, caller)
        assert home is not None
        data = msgspec.json.encode(placing)
        node = str((await self._peers.ask(home, "POST", f"{ROOT}/place", caller, data))["node"])
        if not names.is_sample(placing.name):
            self._remember(placing.name, node)
        return node

    def _own_if_kept(self, node: str, name: str) -> str:
        """A home that nobody bears any longer, because the node has another name now."""
        now = self._services.monotonic()
        if self._peers.members.last_heard(node, now) is not None:
            return node
        kept = self._services.catalogue.find_session(names.session_of(name))
        return self._peers.node if kept is not None and "@" not in name else node

    def _remember(self, name: str, node: str) -> None:
        self._known[name] = node
        if len(self._known) > REMEMBERED:
            del self._known[next(iter(self._known))]
