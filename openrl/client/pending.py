"""An accepted request whose result is still to come."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from openrl.client import codec

if TYPE_CHECKING:
    from openrl.client.transport import Transport

T = TypeVar("T")


class Pending(Generic[T]):
    """Await it for the result, as often as you like.

    The server works on it whether or not anybody waits. A failed request raises `UserError` or
    `ServerError` here.
    """

    def __init__(
        self, transport: Transport, request_id: str, reader: Callable[[codec.Body], T]
    ) -> None:
        self.request_id = request_id
        self._transport = transport
        self._reader = reader
        self._result: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._fetch().__await__()

    def __repr__(self) -> str:
        state = "pending" if self._result is None else "done"
        return f"<Pending {self.request_id} {state}>"

    async def _fetch(self) -> T:
        """Two awaits at once both poll: results can be fetched again, so nothing is shared."""
        if self._result is None:
            answer = await self._transport.result(self.request_id)
            self._result = codec.read(answer, self._reader)
        return self._result
