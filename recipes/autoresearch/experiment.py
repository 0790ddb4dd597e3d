"""One experiment, in a process and a copy of the recipes of its own.

Reads a line of JSON (`Order`), and writes one for each rung: the path of the weights to judge. It
says nothing about how good they are: it would not be believed.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Order:
    """`model` may be NAME=DIRECTORY, for the tokenizer. `settings` are the file's."""

    module: str
    url: str
    key: str
    model: str
    seed: int
    rungs: int
    settings: dict[str, Any]

    def line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"


async def run(order: Order) -> None:
    import tinker

    from recipes.kit.running import Model

    model = Model.parse(order.model)
    service = tinker.ServiceClient(base_url=order.url, api_key=order.key)
    research = importlib.import_module(order.module).research
    settings = {**order.settings, "model": model.name, "seed": order.seed, "rungs": order.rungs}
    async for path in research(service, model.tokenizer, settings):
        print(json.dumps({"path": path}), flush=True)
    await service.close("success")


if __name__ == "__main__":
    asyncio.run(run(Order(**json.loads(sys.stdin.readline()))))
