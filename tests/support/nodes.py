"""Several nodes of one cluster, each a real server on an address of its own."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
from support.node import CONFIG

from openrl.config import ClusterConfig, Config, ModelSource
from openrl.server import Node, node

SECRET = "tml-secret-of-the-cluster"


def free_ports(count: int) -> list[int]:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in taken]
    for each in taken:
        each.close()
    return ports


def configs(
    data: Path, models: Mapping[str, tuple[str, ...]], config: Config = CONFIG
) -> dict[str, Config]:
    """For each node what it serves; they listen at 127.0.0.1, 127.0.0.2 and so on."""
    ports = free_ports(len(models))
    urls = [f"http://127.0.0.{i}:{port}" for i, port in enumerate(ports, 1)]
    made = {}
    for i, (name, served) in enumerate(models.items()):
        cluster = ClusterConfig(
            node=name,
            address=urls[i],
            peers=",".join(urls),
            secret=SECRET,
            refresh_seconds=0.2,
            away_seconds=1.0,
        )
        made[name] = replace(
            config,
            models=tuple(map(ModelSource, served)),
            host=f"127.0.0.{i + 1}",
            port=ports[i],
            data=data / name,
            cluster=cluster,
        )
    return made


@asynccontextmanager
async def together(made: Mapping[str, Config]) -> AsyncIterator[dict[str, Node]]:
    """They have heard of each other."""
    async with AsyncExitStack() as stack:
        nodes = {name: await stack.enter_async_context(node(each)) for name, each in made.items()}
        await acquainted(nodes)
        yield nodes


async def acquainted(nodes: Mapping[str, Node]) -> None:
    """Returns when each of them lists what all of them serve."""
    bases = {base.name for each in nodes.values() for base in each.bases}
    async with aiohttp.ClientSession(headers={"X-API-Key": "tml-nobody"}) as http:
        for each in nodes.values():
            seen: set[str] = set()
            while not bases <= seen:
                url = f"{each.address}/api/v1/get_server_capabilities"
                async with http.get(url) as answer:
                    models = (await answer.json())["supported_models"]
                seen = {model["model_name"] for model in models}
