"""A burst goes in a few at a time, and a heartbeat passes it."""

import asyncio

import aiohttp
from aiohttp import web

from openrl.api.turnstile import Turnstile


async def test_each_turn_of_the_loop_lets_a_few_in_and_in_order() -> None:
    turnstile = Turnstile(3)
    inside: list[int] = []

    async def caller(number: int) -> None:
        await turnstile.enter()
        inside.append(number)

    callers = [asyncio.get_running_loop().create_task(caller(number)) for number in range(10)]
    seen = []
    while not all(each.done() for each in callers):
        await asyncio.sleep(0)
        seen.append(len(inside))
    steps = [after - before for before, after in zip([0, *seen], seen, strict=False)]
    assert max(steps) <= 3
    assert inside == list(range(10))


async def test_who_gives_up_takes_nobodys_place() -> None:
    turnstile = Turnstile(1)
    loop = asyncio.get_running_loop()
    callers = [loop.create_task(turnstile.enter()) for _ in range(5)]
    await asyncio.sleep(0)
    for each in callers[1:4]:
        each.cancel()
    async with asyncio.timeout(5):
        await callers[4]
        await turnstile.enter()  # and it opens again after a quiet time


async def test_a_heartbeat_passes_those_who_wait() -> None:
    order: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        order.append(request.path)
        return web.Response()

    app = web.Application(middlewares=[Turnstile(1).middleware])
    app.add_routes([web.post("/{path:.*}", handle)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession(f"http://{host}:{port}") as http:

        async def post(path: str) -> None:
            async with http.post(path) as response:
                assert response.status == 200

        polls = [post("/api/v1/retrieve_future") for _ in range(60)]
        await asyncio.gather(*polls, post("/api/v1/session_heartbeat"))
    await runner.cleanup()
    assert len(order) == 61
    assert order[-1] != "/api/v1/session_heartbeat"
