"""A proxy that loses answers: each request reaches the server, and the first answer to each kind
of request in turn is thrown away with its connection."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
from aiohttp import web

HOP_BY_HOP = {"host", "transfer-encoding", "connection", "content-length", "content-encoding"}


class Lossy:
    """`lost` counts by route whose answers were thrown away: every `one_in`-th."""

    def __init__(self, target: str, routes: tuple[str, ...], one_in: int = 2) -> None:
        self._target, self._routes, self._one_in = target, routes, one_in
        self._seen: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP}
        session: aiohttp.ClientSession = request.app["session"]
        async with session.request(
            request.method, f"{self._target}{request.path_qs}", data=body, headers=headers
        ) as answer:
            said = await answer.read()
            route = request.path.rpartition("/")[2]
            if answer.status == 200 and self._loses(route):
                assert request.transport is not None
                request.transport.abort()
            kept = {k: v for k, v in answer.headers.items() if k.lower() not in HOP_BY_HOP}
            return web.Response(status=answer.status, body=said, headers=kept)

    def _loses(self, route: str) -> bool:
        if route not in self._routes:
            return False
        self._seen[route] += 1
        loses = self._seen[route] % self._one_in == 1
        self.lost[route] += loses
        return loses


@contextmanager
def lossy(target: str, *routes: str, one_in: int = 2) -> Iterator[tuple[str, Lossy]]:
    """Gives the proxy's address and what counts its losses."""
    proxy = Lossy(target, routes, one_in)
    loop, up, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    address: list[str] = []

    async def main() -> None:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", proxy)
        async with aiohttp.ClientSession(auto_decompress=True) as session:
            app["session"] = session
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            address.append(f"http://{host}:{port}")
            up.set()
            await stop.wait()
            await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert up.wait(10)
    try:
        yield address[0], proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
