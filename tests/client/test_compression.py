"""Which bodies travel compressed, seen on the wire; and that the server reads them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.node import MODEL, serving

import openrl
from openrl.client import codec
from openrl.client.compression import LEAST, compressor
from openrl.client.transport import Transport
from openrl.errors import UserError

KEY = "tml-zip"
FAR, NEAR = "https://rl.example", "http://127.0.0.1:8000"


@pytest.mark.parametrize(
    ("wanted", "url", "compresses"),
    [
        ("auto", FAR, True),
        ("auto", NEAR, False),
        ("auto", "http://localhost:8000", False),
        ("auto", "http://[::1]:8000", False),
        ("auto", "http://10.0.0.7:8000", True),
        ("never", FAR, False),
        ("always", NEAR, True),
    ],
)
def test_the_rule(wanted, url, compresses) -> None:  # type: ignore[no-untyped-def]
    assert (compressor(wanted, url) is not None) == compresses


def test_without_the_package_auto_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert compressor("auto", FAR) is None
    with pytest.raises(UserError, match="pip install zstandard"):
        compressor("always", FAR)


def test_another_word_is_refused() -> None:
    with pytest.raises(UserError, match="'auto', 'never' or 'always'"):
        compressor("zip", FAR)  # type: ignore[arg-type]


async def test_large_bodies_are_compressed_and_small_ones_are_not() -> None:
    seen: list[tuple[str | None, int]] = []

    async def look(request: web.Request) -> web.Response:
        body = await request.content.read()
        seen.append((request.headers.get("Content-Encoding"), len(body)))
        return web.Response(body=codec.pack({"ok": True}), content_type=codec.CONTENT_TYPE)

    app = web.Application(handler_args={"auto_decompress": False})
    app.add_routes([web.post("/api/v1/any", look)])
    async with TestServer(app) as server:
        transport = Transport(str(server.make_url("/")), KEY, 5.0, compress="always")
        await transport.submit("any", {"tokens": np.zeros(LEAST, np.int32)})
        await transport.submit("any", {"tokens": np.zeros(8, np.int32)})
        await transport.close()
    (large, size), (small, _) = seen
    assert (large, small) == ("zstd", None)
    assert size < LEAST


async def test_the_server_reads_them(tmp_path: Path) -> None:
    n = 4_000
    inputs = {"target_tokens": np.ones(n, np.int64), "weights": np.ones(n)}
    datum = openrl.Datum(np.ones(n, np.int32), inputs)
    results = []
    async with serving(tmp_path) as node:
        for compress in ("never", "always"):
            async with openrl.connect(node.address, KEY, compress=compress) as client:
                model = await client.create_model(MODEL, rank=8, seed=3)
                results.append(await (await model.forward_backward([datum] * 4)))
    plain, compressed = results
    assert plain.metrics == compressed.metrics
    np.testing.assert_array_equal(plain.outputs[0]["logprobs"], compressed.outputs[0]["logprobs"])
