"""One error tree.

    OpenRLError                 anything that OpenRL itself reports
      UserError                 the caller can mend it                 400 user
        InvalidDatum            one datum of a request is at fault     400 user
        Diverged                a step that is not finite              400 user
        Unauthenticated         no key, or a key nobody holds          401 user
        Forbidden               the key may not do this                403 user
        NotFound                no such id, or another owner's         404 user
        Gone                    an id that once existed                410 user
        TooSlow               the body did not come in time         408 user
        PayloadTooLarge         body, datum or id over its limit       413 user
        Cancelled               the caller took the request back       499 user
      Overloaded                too much queued: try again             429 server, retryable
      Unavailable               not now: loading, draining, away       503 server, retryable
      ServerError               our fault                              500 server
        OutOfMemory             an atom that does not fit alone        500 server
        EngineDied              the engine cannot go on: restart       500 server

Each class knows its HTTP status, the category that a failed future carries on the wire
(`user` or `server`), and whether the same request may succeed later. Raise the narrowest one;
its message names the cause and what to do.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Category = Literal["user", "server"]


class OpenRLError(Exception):
    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"
    retryable: ClassVar[bool] = False

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class UserError(OpenRLError):
    status = 400
    category = "user"


class InvalidDatum(UserError):
    """A datum that cannot be trained on. `index` counts from 0 within the request."""

    def __init__(self, index: int, field: str, problem: str) -> None:
        super().__init__(f"datum {index}: {field}: {problem}")
        self.index = index
        self.field = field
        self.problem = problem


class Diverged(UserError):
    """A step that would not have ended in finite numbers. The accumulated gradient is dropped,
    lest every later step fail too: of all failures this one alone changes the model."""


class Unauthenticated(UserError):
    status = 401


class Forbidden(UserError):
    status = 403


class NotFound(UserError):
    status = 404


class Gone(UserError):
    status = 410


class TooSlow(UserError):
    status = 408


class PayloadTooLarge(UserError):
    status = 413


class Cancelled(UserError):
    status = 499


class Overloaded(OpenRLError):
    """Too much is queued already. `retry_after` is in seconds."""

    status = 429
    retryable = True

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(OpenRLError):
    """Not now. `retry_after` is in seconds."""

    status = 503
    retryable = True

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServerError(OpenRLError):
    pass


class OutOfMemory(ServerError):
    pass


class EngineDied(ServerError):
    """Raised by an engine that will not run anything any more."""


def without_frames(error: OpenRLError) -> OpenRLError:
    """The same error, for keeping. A traceback holds its frames, and those hold all that was at
    hand when it was raised: a request's data, an engine's tensors."""
    error.__traceback__ = error.__cause__ = error.__context__ = None
    return error


def copied(error: OpenRLError) -> OpenRLError:
    """The same error, for raising: the frames that it goes through are not those of a kept one."""
    fresh = type(error).__new__(type(error), *error.args)
    fresh.__dict__.update(error.__dict__)
    return fresh


def in_words(error: BaseException) -> str:
    """Ours speak for themselves."""
    return str(error) if isinstance(error, OpenRLError) else f"{type(error).__name__}: {error}"


def blamed_on_engine(error: Exception) -> OpenRLError:
    """What to tell the callers whose work an engine was at when it raised `error`."""
    match error:
        case OpenRLError():
            return error
        case MemoryError():
            return OutOfMemory("the engine ran out of memory: send smaller requests")
        case _:
            return ServerError(f"the engine failed: {in_words(error)}")
