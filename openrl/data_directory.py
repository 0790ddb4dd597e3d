"""One node at a time owns a data directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrl.errors import UserError


@contextmanager
def claim(data: Path) -> Iterator[None]:
    """Makes the directory, for its owner alone, and holds its lock. The system drops the lock
    when the process ends, however it ends. Raises `UserError` when another node holds it."""
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = os.open(data / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UserError(
            f"data directory {data} is in use by another server: stop it, or choose another "
            "with --data"
        ) from None
    try:
        yield
    finally:
        os.close(lock)
