"""What SQLite has written becomes durable without the event loop waiting for the disk.

With `synchronous = NORMAL` a commit is in the write-ahead log, but not synced; a sync of that file
from another thread is all that is missing. Whoever asks meanwhile shares the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from pathlib import Path

log = logging.getLogger("openrl")


class Flushing:
    def __init__(self, sql: sqlite3.Connection, file: Path | None) -> None:
        """Of a database in `file`; None is one in memory."""
        self._sql = sql
        self._log = None if file is None else file.with_name(f"{file.name}-wal")
        self._durable = 0
        self._turn = asyncio.Lock()

    @property
    def changes(self) -> int:
        """Rows changed so far, a clock of writes."""
        return self._sql.total_changes

    @property
    def behind(self) -> bool:
        """Something is written that a power cut would take."""
        return self._log is not None and self._durable < self.changes

    async def flushed(self) -> None:
        """Returns when every row that is written now outlives a power cut."""
        wanted = self.changes
        async with self._turn:
            if self._log is None or self._durable >= wanted:
                return
            covered = self.changes
            try:
                await asyncio.to_thread(_sync, self._log)
            except OSError as error:
                # The rows outlive the process all the same, and a later sync has them too.
                log.error("the catalogue could not be flushed: %s", error)
            else:
                self._durable = covered


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
