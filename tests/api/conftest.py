from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
from support.node import MODEL, serving

from openrl.server import Node

KEY = "tml-alice"


@dataclass
class Http:
    """A raw client: no help, no retries."""

    url: str
    session: aiohttp.ClientSession
    headers: dict[str, str] = field(default_factory=lambda: {"X-API-Key": KEY})

    def as_other(self, key: str = "tml-bob") -> "Http":
        return Http(self.url, self.session, {"X-API-Key": key})

    async def ask(
        self, method: str, route: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """JSON unless `body` is bytes; msgpack answers are unpacked."""
        status, _, answer = await self.ask_with_headers(method, route, body, headers)
        return status, answer

    async def ask_with_headers(
        self, method: str, route: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, Any]:
        content = {"data": body} if isinstance(body, bytes) else {"json": body}
        url = f"{self.url}/api/v1/{route}"
        async with self.session.request(
            method, url, headers=self.headers | (headers or {}), **content
        ) as response:
            raw = await response.read()
            match response.content_type:
                case "application/json":
                    answer = await response.json()
                case "application/msgpack":
                    answer = msgpack.unpackb(raw)
                case _:
                    answer = raw
            return response.status, response.headers, answer

    async def post(self, route: str, body: Any, **headers: str) -> tuple[int, Any]:
        return await self.ask("POST", route, body, headers or None)

    async def good(self, route: str, body: Any) -> Any:
        status, answer = await self.post(route, body)
        assert status == 200, answer
        return answer

    async def result(self, promise: dict[str, Any], **headers: str) -> Any:
        """Polls until there is one."""
        while True:
            body = {"request_id": promise["request_id"], "allow_metadata_only": False}
            status, answer = await self.post("retrieve_future", body, **headers)
            if status != 408:
                assert status == 200, answer
                return answer

    async def done(self, route: str, body: Any) -> Any:
        return await self.result(await self.good(route, body))

    async def new_session(self) -> str:
        session_id: str = (await self.good("create_session", {"sdk_version": "0"}))["session_id"]
        return session_id

    async def new_model(self, session_id: str | None = None, seq: int = 0) -> str:
        session_id = session_id or await self.new_session()
        body = {
            "session_id": session_id,
            "model_seq_id": seq,
            "base_model": MODEL,
            "lora_config": {"rank": 8},
        }
        model_id: str = (await self.done("create_model", body))["model_id"]
        return model_id


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with serving(tmp_path) as running:
        yield running


@pytest.fixture
async def http(node: Node) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession() as session:
        yield Http(node.address, session)
