"""A whole server in a process of its own, for tests that kill it.

`python -m support.held PORT DATA`. Its fake engine samples nothing until there is a file `DATA/go`.
"""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

from support.node import CONFIG, MODEL

from openrl import server
from openrl.engines.base import DecodePass, Executed, Pass
from openrl.engines.fake import FakeEngine


class Held(FakeEngine):
    def __init__(self, go: Path) -> None:
        super().__init__([MODEL])
        self._go = go

    def execute(self, work: Pass) -> Executed:
        while isinstance(work, DecodePass) and not self._go.exists():
            time.sleep(0.01)
        return super().execute(work)


async def serve(port: int, data: Path) -> None:
    config = replace(CONFIG, port=port, data=data)
    async with server.node(config, engine=Held(data / "go")) as running:
        print(running.address, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
