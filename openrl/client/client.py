"""A session with a server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from openrl.client import codec
from openrl.client.address import check_key, server_root
from openrl.client.compression import Compress
from openrl.client.model import Model
from openrl.client.pending import Pending
from openrl.client.sampler import Sampler
from openrl.client.waiting import Wait
from openrl.errors import NotFound, OpenRLError, UserError

if TYPE_CHECKING:
    from openrl.client.blocking import BlockingClient
    from openrl.client.transport import Transport

T = TypeVar("T")

log = logging.getLogger("openrl.client")

HEARTBEAT_SECONDS = 10.0
FINISH_SECONDS = 5.0


def connect(
    url: str,
    api_key: str,
    *,
    patience: float = 300.0,
    on_wait: Callable[[Wait], None] | None = None,
    compress: Compress = "auto",
    tags: Sequence[str] = (),
    user_metadata: Mapping[str, str] | None = None,
) -> Client:
    """`async with openrl.connect("http://127.0.0.1:8000", "tml-local") as client: …`, or `with`
    alone for a client whose calls block.

    `patience`: seconds for which a server that is away, restarting or failing is tried again
    before `Unavailable` is raised. `on_wait` is called whenever something is still being waited
    for, with the reason. `compress` "auto" sends large bodies in zstd to a server on another
    machine, if the package zstandard is there. Raises `UserError` for an address or a key that
    cannot be right.
    """
    return Client(
        url,
        api_key,
        patience=patience,
        on_wait=on_wait,
        compress=compress,
        tags=tags,
        user_metadata=user_metadata,
    )


class Client:
    """Made by `connect`. Its models and samplers live while it does; checkpoints stay."""

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        patience: float = 300.0,
        on_wait: Callable[[Wait], None] | None = None,
        compress: Compress = "auto",
        tags: Sequence[str] = (),
        user_metadata: Mapping[str, str] | None = None,
    ) -> None:
        check_key(api_key)
        self.url = server_root(url)
        self.session_id = ""
        self._api_key = api_key
        self._patience = patience
        self._on_wait = on_wait
        self._compress: Compress = compress
        self._about = {"tags": list(tags), "user_metadata": user_metadata and dict(user_metadata)}
        self._transport: Transport | None = None
        self._blocking: BlockingClient | None = None
        self._heartbeats: asyncio.Task[None] | None = None
        self._model_seq = itertools.count()
        self._sampling_seq = itertools.count()

    async def __aenter__(self) -> Client:
        # Here, since it brings in aiohttp: see the module.
        from openrl.client.transport import Transport

        self._transport = Transport(
            self.url,
            self._api_key,
            self._patience,
            on_wait=self._on_wait,
            compress=self._compress,
        )
        try:
            body = {**self._about, "sdk_version": "openrl"}
            self.session_id = await self._ask("create_session", body, _session_id)
        except NotFound as error:
            await self._transport.close()
            raise NotFound(self._transport.elsewhere(error.message)) from error
        except BaseException:
            await self._transport.close()
            raise
        loop = asyncio.get_running_loop()
        self._heartbeats = loop.create_task(self._beat(), name="openrl heartbeats")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(_reason(error))

    def __enter__(self) -> BlockingClient:
        from openrl.client.blocking import BlockingClient

        self._blocking = BlockingClient.enter(self)
        return self._blocking

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._blocking is not None
        self._blocking.leave(kind, error, traceback)

    async def close(self, reason: str = "success") -> None:
        """Ends the session: `success`, `errored` or `interrupted`."""
        if self._heartbeats is not None:
            self._heartbeats.cancel()
            self._heartbeats = None
            body = {"reason": {"type": reason}, "detail": None}
            with contextlib.suppress(OpenRLError):
                route = f"sessions/{self.session_id}/finish"
                await self.transport.once(route, body, FINISH_SECONDS)
        if self._transport is not None:
            await self._transport.close()
            self._transport = None

    async def create_model(
        self,
        base_model: str,
        *,
        full: bool = False,
        rank: int = 32,
        alpha: float = 32.0,
        seed: int | None = None,
        train_attn: bool = True,
        train_mlp: bool = True,
        train_unembed: bool = True,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Model:
        """A fresh LoRA adapter, equal to the base until its first step. Its products are scaled
        by `alpha / rank`; without a `seed` the server draws one. With `full` all parameters train
        instead, from a copy of the base, and what else is said of the adapter means nothing."""
        lora = {
            "rank": rank,
            "alpha": alpha,
            "seed": seed,
            "train_attn": train_attn,
            "train_mlp": train_mlp,
            "train_unembed": train_unembed,
        }
        body = {
            "base_model": base_model,
            "lora_config": None if full else lora,
            "user_metadata": user_metadata and dict(user_metadata),
        }
        return await self._model("create_model", body)

    async def create_model_from_checkpoint(
        self,
        path: str,
        *,
        optimizer: bool = False,
        user_metadata: Mapping[str, str] | None = None,
    ) -> Model:
        """A new model that starts from a saved state; rank and coverage are the checkpoint's.
        `optimizer` goes on with its optimizer state too."""
        body = {
            "path": path,
            "optimizer": optimizer,
            "user_metadata": user_metadata and dict(user_metadata),
        }
        return await self._model("load_weights", body)

    async def sampler(self, *, base_model: str | None = None, path: str | None = None) -> Sampler:
        """A sampler of a plain base model, or of a checkpoint made by `save_sampler`."""
        if (base_model is None) == (path is None):
            raise UserError("a sampler is of a base model or of a path: name one of the two")
        body = {
            "session_id": self.session_id,
            "sampling_session_seq_id": self.next_sampling_seq(),
            "base_model": base_model,
            "model_path": path,
        }
        made = await self._ask("create_sampling_session", body, _sampling_session_id)
        return Sampler(self.transport, made)

    # --- for models and samplers ------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            raise UserError("the client is not connected: use `async with openrl.connect(…)`")
        return self._transport

    def next_sampling_seq(self) -> int:
        return next(self._sampling_seq)

    async def submit(
        self,
        route: str,
        body: codec.Body,
        reader: Callable[[codec.Body], T],
        deadline_seconds: float | None = None,
    ) -> Pending[T]:
        answer = await self.transport.submit(route, body, deadline_seconds)
        return Pending(self.transport, codec.read(answer, _request_id), reader)

    async def _model(self, route: str, body: Mapping[str, Any]) -> Model:
        named = {"session_id": self.session_id, "model_seq_id": next(self._model_seq), **body}
        model_id = await (await self.submit(route, named, _model_id))
        info = {"model_id": model_id}
        return Model(self, model_id, await self._ask("get_info", info, _base_model))

    async def _ask(self, route: str, body: codec.Body, reader: Callable[[codec.Body], T]) -> T:
        return codec.read(await self.transport.submit(route, body), reader)

    async def _beat(self) -> None:
        """A missed beat is harmless: the server counts any request as a sign of life."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            body = {"session_id": self.session_id}
            try:
                await self.transport.once("session_heartbeat", body, HEARTBEAT_SECONDS)
            except OpenRLError as problem:
                log.info("heartbeat: %s", problem)


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "success"
    stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
    return "interrupted" if stopped else "errored"


def _session_id(answer: codec.Body) -> str:
    return str(answer["session_id"])


def _request_id(answer: codec.Body) -> str:
    return str(answer["request_id"])


def _model_id(answer: codec.Body) -> str:
    return str(answer["model_id"])


def _base_model(answer: codec.Body) -> str:
    return str(answer["model_data"]["model_name"])


def _sampling_session_id(answer: codec.Body) -> str:
    return str(answer["sampling_session_id"])
