"""Asks the other nodes how they are, and knows whom to reach where."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from openrl.cluster.hops import ANYONE, HEADER, Hop, Hops
from openrl.cluster.members import Members
from openrl.cluster.placement import Report
from openrl.config import ClusterConfig
from openrl.errors import OpenRLError, Unavailable
from openrl.keys import Holder

log = logging.getLogger("openrl")

ROOT = "/cluster/v1"
REPORT = f"{ROOT}/report"


class Away(Unavailable):
    """The node that this belongs to does not answer."""


class Peers:
    """`report` says how this node is; `now` gives Unix seconds, `clock` those that never go
    back."""

    def __init__(
        self,
        config: ClusterConfig,
        report: Callable[[], Report],
        now: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.node = config.node
        self.members = Members(config.node, config.away_seconds, clock())
        self.hops = Hops(config.secret)
        self.now = now
        self._config = config
        self._report = report
        self._clock = clock
        self._waits: defaultdict[str, set[asyncio.Timeout]] = defaultdict(set)
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            yield

    async def watch(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                await self.round()
            except Exception:  # a defect of ours: without further rounds all peers would seem away
                log.exception("the other nodes could not be asked")
            await asyncio.sleep(self._config.refresh_seconds)

    async def round(self) -> None:
        """One: every address of every peer is asked who it is."""
        self.members.heard(self._report(), self._clock())
        urls = [url for peer in self._config.peers.split(",") for url in await _addresses(peer)]
        await asyncio.gather(*map(self._ask_report, urls))
        for node in list(self._waits):
            if self.members.address(node, self._clock()) is None:
                self._cut(node)

    def address(self, node: str) -> str:
        """Raises `Away`."""
        address = self.members.address(node, self._clock())
        if address is None:
            raise Away(self.why_away(node), retry_after=5.0)
        return address

    def why_away(self, node: str) -> str:
        seconds = self.members.last_heard(node, self._clock())
        since = "" if seconds is None else f" and was last heard {seconds:.0f} s ago"
        return f"node {node!r} is away{since}: what it holds goes on when it is back"

    # --- speaking to one ---

    @asynccontextmanager
    async def call(
        self,
        node: str,
        method: str,
        path: str,
        seconds: float,
        caller: Holder | None = None,
        headers: Mapping[str, str] | None = None,
        data: bytes | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of an answer has come. Raises `Away` when none comes within `seconds`, or the
        node falls silent meanwhile."""
        address = self.address(node)
        hop = self.hops.sign(Hop(self.node, node, method, path, caller), self.now())
        try:
            async with asyncio.timeout(seconds) as patience:
                self._waits[node].add(patience)
                try:
                    response = await self._http.request(
                        method,
                        URL(address.rstrip("/") + path, encoded=True),
                        headers=[*(headers or {}).items(), (HEADER, hop)],
                        data=data,
                        allow_redirects=False,
                        timeout=aiohttp.ClientTimeout(None, sock_connect=2.0, sock_read=seconds),
                    )
                finally:
                    self._waits[node].discard(patience)
        except aiohttp.ClientConnectorError as error:
            self.members.lost(node)
            self._cut(node)
            raise Away(self.why_away(node), retry_after=5.0) from error
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Away(self.why_away(node), retry_after=5.0) from error
        async with response:
            yield response

    async def ask(
        self, node: str, method: str, path: str, caller: Holder | None = None, data: bytes = b""
    ) -> Any:
        """A short question; the answer is JSON. Raises `Away`, and what the other node raised."""
        seconds = self._config.away_seconds
        async with self.call(node, method, path, seconds, caller, data=data or None) as response:
            try:
                async with asyncio.timeout(seconds):
                    answer = await response.json(content_type=None)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                raise Away(self.why_away(node), retry_after=5.0) from error
        if response.status < 400:
            return answer
        raise _error(response.status, str(answer.get("detail", answer)))

    def _cut(self, node: str) -> None:
        """Nobody waits any longer for one that is away."""
        for patience in self._waits.pop(node, ()):
            patience.reschedule(asyncio.get_running_loop().time())

    async def _ask_report(self, url: URL) -> None:
        hop = self.hops.sign(Hop(self.node, ANYONE, "GET", REPORT), self.now())
        timeout = aiohttp.ClientTimeout(total=max(0.1, self._config.refresh_seconds))
        try:
            async with self._http.get(
                url.join(URL(REPORT)), headers={HEADER: hop}, timeout=timeout
            ) as answer:
                report = self.hops.read_report((await answer.json())["report"], self.now())
        except (
            aiohttp.ClientError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            OpenRLError,
        ) as error:
            log.debug("%s does not say how it is: %s", url, error)
            return
        if report.node != self.node:
            self.members.heard(report, self._clock())

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise Away("this node does not speak to others yet")
        return self._session


async def _addresses(peer: str) -> list[URL]:
    """All that its host stands for: a headless Service names every pod. A name with a certificate
    stays a name."""
    url = URL(peer.strip())
    if not url.host or url.scheme == "https":
        return [url] if url.host else []
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            url.host, url.port, type=socket.SOCK_STREAM
        )
    except OSError as error:
        log.debug("%s cannot be resolved: %s", url.host, error)
        return []
    return [url.with_host(str(host)) for host in sorted({each[4][0] for each in found})]


def _error(status: int, text: str) -> OpenRLError:
    """What the other node raised, as far as its status tells."""
    kinds: list[type[OpenRLError]] = [OpenRLError]
    while kinds:
        kind = kinds.pop()
        if kind.status == status and kind not in (OpenRLError, Away):
            return kind(text)
        kinds += reversed(kind.__subclasses__())
    return Unavailable(text)
