"""Bad content of a training request is no refusal: it fails through the request's future, since
the client may have sent already what comes after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from openrl.errors import UserError
from openrl.types import Malformed

T = TypeVar("T")


def or_malformed(operation: Callable[[], T]) -> T | Malformed:
    try:
        return operation()
    except UserError as error:
        return Malformed(error)
