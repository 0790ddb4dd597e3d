"""Bodies to values and values to bodies, in the encoding that each request asks for.

Three encodings carry the same routes. JSON and protobuf are what the `tinker` SDK speaks.
`application/msgpack` is OpenRL's own: the JSON schema field by field, except that numbers in
bulk are binary:

* a tensor is `{"dtype": "float32"|"int64"|"int32", "shape": [int], "data": bin}`, where `data` is
  little-endian in C order. Requests may add `sparse_crow_indices` and `sparse_col_indices` (bin,
  int64) as in JSON;
* the `tokens` of a text chunk are bin (int32) or a tensor;
* in results, `tokens`, `logprobs` and `prompt_logprobs` of samples are tensors (int32 [T], float32
  [T], float32 [P] with NaN where nothing is scored), and `topk_prompt_logprobs` is
  `{"token_ids": tensor [P, k], "logprobs": tensor [P, k]}`, empty cells being 0 and -99999.0.

An answer is msgpack when `Accept` names it, or names nothing and the request was msgpack; a sample
or forward_backward result is protobuf when `Accept` names that; everything else is JSON.
"""

from __future__ import annotations

import asyncio
import zlib
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import msgspec
import zstandard
from aiohttp import web

from openrl.config import Limits
from openrl.errors import PayloadTooLarge, TooSlow, UserError

T = TypeVar("T", bound=msgspec.Struct)

BODY = web.RequestKey("body", bytes)
"""Of a request whose body was read before its handler's turn."""

MAX_TEXT = 4000

_ZSTD_BITE = 2048
"""zstandard cannot be told how much to unpack at most; this much packed holds under 64 MiB."""


class Encoding(Enum):
    JSON = "application/json"
    MSGPACK = "application/msgpack"
    PROTOBUF = "application/x-protobuf"


def encoding_of(request: web.Request) -> Encoding:
    """What the body is in; anything unknown is read as JSON, and fails as such."""
    if request.content_type == Encoding.MSGPACK.value:
        return Encoding.MSGPACK
    if request.content_type == Encoding.PROTOBUF.value:
        return Encoding.PROTOBUF
    return Encoding.JSON


def answer_encoding(request: web.Request) -> Encoding:
    """For everything but results: msgpack or JSON."""
    accept = request.headers.get("Accept", "*/*")
    if Encoding.MSGPACK.value in accept:
        return Encoding.MSGPACK
    if accept == "*/*" and encoding_of(request) is Encoding.MSGPACK:
        return Encoding.MSGPACK
    return Encoding.JSON


def result_encoding(request: web.Request) -> Encoding:
    """For results of samples and of forward_backward."""
    if Encoding.PROTOBUF.value in request.headers.get("Accept", ""):
        return Encoding.PROTOBUF
    return answer_encoding(request)


async def read_body(request: web.Request, limits: Limits) -> bytes:
    """The decompressed body. Raises `PayloadTooLarge` when either form is over its limit, and
    `TooSlow`."""
    limit = limits.body_bytes
    if (request.content_length or 0) > limit:
        raise PayloadTooLarge(f"the body has {request.content_length} bytes; {limit} are allowed")
    body = await _received(request, limits)
    return decompress(body, request.headers.get("Content-Encoding", ""), limit)


async def _received(request: web.Request, limits: Limits) -> bytes:
    """By its average pace and not by its pauses: a byte now and then would pass that."""
    body = bytearray()
    started = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(limits.body_seconds) as patience:
            async for part in request.content.iter_any():
                body += part
                if len(body) > limits.body_bytes:
                    raise PayloadTooLarge(f"the body has more than {limits.body_bytes} bytes")
                earned = len(body) / limits.body_bytes_per_second
                patience.reschedule(started + limits.body_seconds + earned)
    except TimeoutError:
        raise TooSlow(
            f"{len(body)} bytes of the body came in time: after {limits.body_seconds:g} s it must "
            f"come at {limits.body_bytes_per_second} bytes per second"
        ) from None
    return bytes(body)


def decompress(body: bytes, coding: str, limit: int) -> bytes:
    """aiohttp is told not to do this: it answers 400 to zstd unless an optional package is there,
    and has no bound on what comes out."""
    match coding.strip().lower():
        case "" | "identity":
            plain = body
        case "zstd":
            plain = _unzstd(body, limit)
        case "gzip" | "deflate":
            plain = _inflate(body, limit)
        case _:
            raise UserError(f"Content-Encoding {coding!r} is not known: zstd, gzip or deflate")
    if len(plain) > limit:
        raise PayloadTooLarge(f"the body decompresses to more than {limit} bytes")
    return plain


def _unzstd(body: bytes, limit: int) -> bytes:
    unpacker = zstandard.ZstdDecompressor().decompressobj()
    plain = bytearray()
    try:
        for start in range(0, len(body), _ZSTD_BITE):
            plain += unpacker.decompress(body[start : start + _ZSTD_BITE])
            if unpacker.eof or len(plain) > limit:
                break
    except zstandard.ZstdError as error:
        raise UserError(f"the body is not zstd: {error}") from error
    if len(plain) <= limit and not unpacker.eof:
        raise UserError("the compressed body is cut short")
    return bytes(plain)


def _inflate(body: bytes, limit: int) -> bytes:
    either_header = zlib.MAX_WBITS | 32  # gzip's or zlib's
    inflater = zlib.decompressobj(wbits=either_header)
    try:
        plain = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise UserError(f"the body is neither gzip nor deflate: {error}") from error
    if len(plain) <= limit and not inflater.eof:
        raise UserError("the compressed body is cut short")
    return plain


def parse(body: bytes, encoding: Encoding, kind: type[T]) -> T:
    if encoding is Encoding.PROTOBUF:
        raise UserError("this route takes JSON or msgpack, not protobuf")
    try:
        value: T = _decoder(encoding, kind).decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UserError(f"malformed {encoding.name.lower()} body: {error}") from error
    return value


@cache
def _decoder(encoding: Encoding, kind: type[T]) -> Any:
    if encoding is Encoding.MSGPACK:
        return msgspec.msgpack.Decoder(kind)
    return msgspec.json.Decoder(kind)


def encode(value: object, encoding: Encoding) -> bytes:
    """JSON never holds NaN or infinity: msgspec writes them as null."""
    if encoding is Encoding.MSGPACK:
        return msgspec.msgpack.encode(value)
    return msgspec.json.encode(value)


def answer(request: web.Request, value: object, status: int = 200) -> web.Response:
    encoding = answer_encoding(request)
    return raw_answer(encode(value, encoding), encoding, status)


def shortened(text: str) -> str:
    """Error texts repeat what the caller sent, which may be megabytes."""
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + " …"


def raw_answer(body: bytes, encoding: Encoding, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type=encoding.value)
