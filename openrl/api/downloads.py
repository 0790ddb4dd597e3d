"""Files that leave the server: links that open without a key for an hour, and what they open."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path

from aiohttp import web

from openrl.api import auth, codec, shapes
from openrl.api.checkpoints import path_of
from openrl.api.services import Services
from openrl.catalogue import Checkpoint
from openrl.errors import NotFound
from openrl.signing import Link

PREFIX = "/api/v1/downloads/"
LINK_SECONDS = 3600.0

_RUN = "/api/v1/training_runs/{run}/checkpoints"
_NOT_IN_ARCHIVES = "optimizer.safetensors"
_COMPLETE = "checkpoint_complete"
"""An empty file that the SDK's command line looks for before it pushes an archive to the hub."""
_BITE = 1 << 20


class Downloads:
    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get(_RUN + "/{kind:weights|sampler_weights}/{name}/archive", self.archive),
            web.get(_RUN + "/{kind:external_weights}/{name}/external_weights_urls", self.urls),
            web.get(PREFIX + "{token}", self.open),
        ]

    async def archive(self, request: web.Request) -> web.Response:
        """A redirect for SDKs that ask for gzip (in a second `Accept`): they read `Location` and
        nothing else."""
        checkpoint = self._readable(request)
        expires = self._services.clock() + LINK_SECONDS
        url = self._link(request, checkpoint, None, expires)
        if "application/gzip" in ", ".join(request.headers.getall("Accept", [])):
            when = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
            return web.Response(status=302, headers={"Location": url, "Expires": when})
        return codec.answer(request, {"url": url, "expires": shapes.time(expires)})

    async def urls(self, request: web.Request) -> web.Response:
        checkpoint = self._readable(request)
        expires = self._services.clock() + LINK_SECONDS
        files = await self._files(checkpoint)
        urls = {file.name: self._link(request, checkpoint, file.name, expires) for file in files}
        return codec.answer(request, {"urls": urls, "expires": shapes.time(expires)})

    async def open(self, request: web.Request) -> web.StreamResponse:
        """Needs no key: the link is one. Raises `Forbidden`, `NotFound`."""
        link = self._services.signer.read_link(request.match_info["token"], self._services.clock())
        checkpoint = self._services.catalogue.find_checkpoint(link.path)
        if checkpoint is None or checkpoint.version != link.version:
            raise NotFound(f"checkpoint {link.path!r} was deleted or written anew")
        files = await self._files(checkpoint)
        if link.file is None:
            kept = [file for file in files if file.name != _NOT_IN_ARCHIVES]
            return await _tar(request, kept, checkpoint)
        for file in files:
            if file.name == link.file:
                return web.FileResponse(file, headers=_named(file.name))
        raise NotFound(f"checkpoint {link.path!r} holds no {link.file!r}")

    async def _files(self, checkpoint: Checkpoint) -> tuple[Path, ...]:
        """Brought here first, if they are elsewhere."""
        return tuple(sorted((await self._services.fetching.bring(checkpoint)).iterdir()))

    def _readable(self, request: web.Request) -> Checkpoint:
        checkpoint = self._services.readable(request, path_of(request))
        self._services.note_read(checkpoint, auth.owner_of(request), "download")
        return checkpoint

    def _link(
        self, request: web.Request, checkpoint: Checkpoint, file: str | None, expires: float
    ) -> str:
        token = self._services.signer.sign_link(
            Link(checkpoint.path, checkpoint.version, file), expires
        )
        return f"{self._base_url(request)}{PREFIX}{token}"

    def _base_url(self, request: web.Request) -> str:
        """As the caller reached us, unless the configuration says how others do."""
        return self._services.config.public_url or f"{request.scheme}://{request.host}"


async def _tar(
    request: web.Request, files: Sequence[Path], checkpoint: Checkpoint
) -> web.StreamResponse:
    heads = [_head(file.name, file.stat().st_size, checkpoint.created_at) for file in files]
    heads.append(_head(_COMPLETE, 0, checkpoint.created_at))
    response = web.StreamResponse(headers=_named(f"{checkpoint.name}.tar"))
    response.content_type = "application/x-tar"
    blocks = sum(_padded(head.size) + tarfile.BLOCKSIZE for head in heads)
    response.content_length = blocks + 2 * tarfile.BLOCKSIZE
    await response.prepare(request)
    if request.method != "HEAD":
        async for part in _parts(files, heads):
            await response.write(part)
    await response.write_eof()
    return response


async def _parts(files: Sequence[Path], heads: Sequence[tarfile.TarInfo]) -> AsyncIterator[bytes]:
    for file, head in zip(files, heads, strict=False):  # the last head has no file
        yield head.tobuf(tarfile.GNU_FORMAT)
        with file.open("rb") as source:
            while part := await asyncio.to_thread(source.read, _BITE):
                yield part
        yield bytes(_padded(head.size) - head.size)
    yield heads[-1].tobuf(tarfile.GNU_FORMAT) + bytes(2 * tarfile.BLOCKSIZE)


def _head(name: str, size: int, made: float) -> tarfile.TarInfo:
    head = tarfile.TarInfo(name)
    head.size, head.mtime, head.mode = size, int(made), 0o644
    return head


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _named(name: str) -> dict[str, str]:
    return {"Content-Disposition": f'attachment; filename="{name}"'}
