"""What one client may cost: slow, large and many."""

import asyncio
import json
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import trustme
import zstandard
from support.node import CONFIG, MODEL, serving

from openrl.api import app
from openrl.config import Config, Limits
from openrl.engines.base import TrainPass
from openrl.engines.fake import FakeEngine
from openrl.errors import UserError
from openrl.tls import server_context

from .conftest import Http
from .test_polls import Gate, forward_backward

SLOW = Limits(header_seconds=0.3, body_seconds=0.3, body_bytes_per_second=1 << 20)


@asynccontextmanager
async def limited(tmp_path: Path, limits: Limits, **more: object) -> AsyncIterator[Http]:
    config = replace(CONFIG, limits=limits, **more)
    async with serving(tmp_path, config) as node, aiohttp.ClientSession() as session:
        yield Http(node.address, session)


@asynccontextmanager
async def socket_to(
    address: str,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not there():  # noqa: ASYNC110 - what it waits for has no event
            await asyncio.sleep(0.01)


HEAD = b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-a\r\n"


async def answer_to_dribble(address: str, start: bytes, drop: bytes) -> bytes:
    """Sends `drop` every 20 ms until the server closes."""
    async with socket_to(address) as (reader, writer):
        writer.write(start)

        async def dribble() -> None:
            while True:
                writer.write(drop)
                await asyncio.sleep(0.02)

        dribbling = asyncio.get_running_loop().create_task(dribble())
        answer = b""
        try:
            async with asyncio.timeout(20):
                while part := await reader.read(4096):
                    answer += part
        except ConnectionResetError:
            pass  # what was sent after the answer is nobody's
        finally:
            dribbling.cancel()
        return answer


@pytest.mark.parametrize("start", [b"", b"POST /api/v1/create_session HTTP/1.1\r\n"])
async def test_a_head_that_dribbles_is_cut(start: bytes, tmp_path: Path) -> None:
    async with limited(tmp_path, SLOW) as http:
        answer = await answer_to_dribble(
            http.url, start or b"GET /", b"A: b\r\n" if start else b"x"
        )
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["detail"].startswith("the head")


async def test_a_connection_that_says_nothing_is_cut(tmp_path: Path) -> None:
    async with limited(tmp_path, SLOW) as http, socket_to(http.url) as (reader, _):
        async with asyncio.timeout(20):
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("length", [b"Content-Length: 100000\r\n\r\n", None])
async def test_a_body_that_dribbles_is_cut(length: bytes | None, tmp_path: Path) -> None:
    chunked = b"Transfer-Encoding: chunked\r\n\r\n"
    drop = b" " if length else b"1\r\n \r\n"
    async with limited(tmp_path, SLOW) as http:
        answer = await answer_to_dribble(http.url, HEAD + (length or chunked), drop)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"of the body came in time" in answer
    assert b"connection: close" in answer.lower()


async def test_a_long_poll_and_a_kept_connection_are_not_cut(tmp_path: Path) -> None:
    """The poll takes several times what a head or a body may."""
    gate = Gate(TrainPass)
    engine = FakeEngine([MODEL], before=gate)
    config = replace(CONFIG, limits=SLOW, poll_seconds=1.2)
    async with serving(tmp_path, config, engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        try:
            model_id = await http.new_model()
            promise = await http.good("forward_backward", forward_backward(model_id, 1))
            loop = asyncio.get_running_loop()
            started = loop.time()
            assert (await http.post("retrieve_future", promise))[0] == 408
            assert loop.time() - started > 1.1
        finally:
            gate.open()
        assert "loss:sum" in (await http.result(promise))["metrics"]


async def test_a_connection_that_is_forgotten_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "KEEPALIVE_SECONDS", 0.1)
    async with serving(tmp_path) as node:
        host, port = node.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" not in answer.lower()


async def test_a_body_at_its_pace_is_not_cut(tmp_path: Path) -> None:
    body = json.dumps({"sdk_version": "0", "tags": ["x" * 2000]}).encode()
    limits = replace(SLOW, body_bytes_per_second=1000)

    async def parts() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 250):
            yield body[start : start + 250]
            await asyncio.sleep(0.07)

    async with limited(tmp_path, limits) as http:
        url = f"{http.url}/api/v1/create_session"
        async with http.session.post(url, data=parts(), headers=http.headers) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", ""])
async def test_a_bomb_is_refused_by_what_comes_out(coding: str, tmp_path: Path) -> None:
    plain = b" " * (8 << 20)
    packed = {
        "gzip": lambda: zlib.compress(plain, wbits=31),
        "deflate": lambda: zlib.compress(plain),
        "zstd": lambda: zstandard.compress(plain),
        "": lambda: plain,
    }[coding]()
    async with limited(tmp_path, Limits(body_bytes=1 << 20)) as http:
        headers = {"Content-Encoding": coding} if coding else {}
        status, answer = await http.post("create_session", packed, **headers)
        assert status == 413
        assert "1048576" in answer["detail"]


async def test_polls_and_bodies_are_bounded_for_each_owner(tmp_path: Path) -> None:
    gate = Gate(TrainPass)
    engine = FakeEngine([MODEL], before=gate)
    limits = Limits(open_polls=2, open_bodies_bytes=4096)
    config = replace(CONFIG, limits=limits, poll_seconds=20.0)
    async with serving(tmp_path, config, engine) as node, aiohttp.ClientSession() as session:
        http = Http(node.address, session)
        model_id = await http.new_model()
        promise = await http.good("forward_backward", forward_backward(model_id, 1))
        polls = [asyncio.ensure_future(http.result(promise)) for _ in range(2)]
        services = node.services
        await until(lambda: sum(services.polls.held().values()) == 2)
        status, headers, answer = await http.ask_with_headers("POST", "retrieve_future", promise)
        assert (status, headers["Retry-After"]) == (429, "1")
        assert "2 polls open, at most 2" in answer["detail"]
        gate.open()
        for poll in polls:
            assert "metrics" in await poll

        head = HEAD + b"Content-Length: 4000\r\n\r\n"
        async with socket_to(http.url) as (_, writer):
            writer.write(head.replace(b"tml-a", b"tml-alice"))
            await until(lambda: bool(services.bodies.held()))
            assert (await http.post("create_session", b" " * 200))[0] == 429
            other = http.as_other()
            assert (await other.post("create_session", {"sdk_version": "0"}))[0] == 200
        await until(lambda: not services.bodies.held())
        await http.new_session()


async def test_tokens_of_a_request_are_counted(tmp_path: Path) -> None:
    async with limited(tmp_path, Limits(request_tokens=5)) as http:
        model_id = await http.new_model()
        body = forward_backward(model_id, 1)
        datum = body["forward_backward_input"]["data"][0]
        body["forward_backward_input"]["data"] = [datum] * 6
        failed = await http.done("forward_backward", body)
        assert "6 tokens; one request may hold 5" in failed["error"]


# --- TLS --------------------------------------------------------------------------------------


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def secure(authority: trustme.CA, tmp_path: Path) -> Config:
    made = authority.issue_cert("127.0.0.1")
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    made.cert_chain_pems[0].write_to_path(cert)
    made.private_key_pem.write_to_path(key)
    return replace(CONFIG, tls_cert=cert, tls_key=key)


async def test_https(secure: Config, authority: trustme.CA, tmp_path: Path) -> None:
    trusts = ssl.create_default_context()
    authority.configure_trust(trusts)
    async with serving(tmp_path / "data", secure) as node:
        assert node.address.startswith("https://")
        connector = aiohttp.TCPConnector(ssl=trusts)
        async with aiohttp.ClientSession(connector=connector) as session:
            http = Http(node.address, session)
            assert await http.new_model()
        async with aiohttp.ClientSession() as stranger:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await Http(node.address, stranger).new_session()
        old = ssl.create_default_context()
        authority.configure_trust(old)
        old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
        old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=old)) as session:
            with pytest.raises(aiohttp.ClientConnectorError):
                await Http(node.address, session).new_session()


def test_certificates_that_will_not_do_are_named(secure: Config, tmp_path: Path) -> None:
    other = tmp_path / "other.key"
    trustme.CA().issue_cert("a.example").private_key_pem.write_to_path(other)
    for wrong, problem in (
        ({"tls_key": other}, "do not work together"),
        ({"tls_key": None}, "do not work together"),
        ({"tls_cert": tmp_path / "nope"}, "No such file"),
        ({"tls_cert": None}, "needs server.tls_cert"),
    ):
        with pytest.raises(UserError, match=problem):
            server_context(replace(secure, **wrong))
