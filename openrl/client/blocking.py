"""The client without `async`: `with openrl.connect(url, key) as client: …`.

Nothing is written twice: each face stands before an object of the async client, and calls its
coroutines on an event loop in a thread of its own. `blocking.pyi` spells the methods out for type
checkers and editors; it is made from the async classes.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from openrl.client.model import Model
from openrl.client.pending import Pending
from openrl.client.sampler import Sampler

if TYPE_CHECKING:
    from openrl.client.client import Client

T = TypeVar("T")

_END = object()


class LoopThread:
    """An event loop that runs in a thread until it is closed."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="openrl", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result. Whoever is interrupted meanwhile, by Ctrl-C, cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncIterator[T]) -> Iterator[T]:
        try:
            while (item := self.run(_next(items))) is not _END:
                yield item
        finally:
            self.run(items.aclose())  # type: ignore[attr-defined]  # always a generator

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Face:
    """Before a client, a model or a sampler."""

    def __init__(self, inner: object, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return _without_await(getattr(self._inner, name), self._loop)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._inner) if not name.startswith("_")]

    def __repr__(self) -> str:
        return repr(self._inner)


class BlockingModel(Face):
    pass


class BlockingSampler(Face):
    pass


class BlockingPending(Face):
    """`result()` waits for the result, as often as you like."""

    def result(self) -> Any:
        return self._loop.run(_awaited(self._inner))  # type: ignore[arg-type]


class BlockingClient(Face):
    @classmethod
    def enter(cls, client: Client) -> BlockingClient:
        loop = LoopThread()
        try:
            loop.run(client.__aenter__())
        except BaseException:
            loop.close()
            raise
        return cls(client, loop)

    def leave(self, *raised: Any) -> None:
        try:
            self._loop.run(self._inner.__aexit__(*raised))  # type: ignore[attr-defined]
        finally:
            self._loop.close()


_FACES: dict[type, type[Face]] = {
    Model: BlockingModel,
    Sampler: BlockingSampler,
    Pending: BlockingPending,
}


def _without_await(value: Any, loop: LoopThread) -> Any:
    if inspect.iscoroutinefunction(value):
        return _blocking(value, loop)
    if inspect.isasyncgenfunction(value):
        return functools.wraps(value)(lambda *args, **named: loop.iterate(value(*args, **named)))
    return value


def _blocking(call: Callable[..., Coroutine[Any, Any, Any]], loop: LoopThread) -> Any:
    @functools.wraps(call)
    def blocking(*arguments: Any, **named: Any) -> Any:
        result = loop.run(call(*arguments, **named))
        face = _FACES.get(type(result))
        return result if face is None else face(result, loop)

    return blocking


async def _next(items: AsyncIterator[T]) -> Any:
    return await anext(items, _END)


async def _awaited(pending: Awaitable[T]) -> T:
    return await pending
