"""Room: what is needed of an old segment is copied to the newest, and its file goes.

Which ones: those of which nothing is needed, or little; those that hold something of a model that
has ended; and, when all together are larger than they may be, the oldest with anything to gain.
A segment goes only when all that made its records needless is durable.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from openrl.journal.files import FileOperations
from openrl.journal.index import Index
from openrl.journal.lanes import Entry, Segment
from openrl.journal.recovery import Payloads
from openrl.journal.segments import SegmentName
from openrl.journal.writer import Item

log = logging.getLogger("openrl")

_STEP = 4 << 20  # bytes that are copied at a time
_MOSTLY_DEAD = 0.25  # of a segment is needed at most
_WORTH_IT = 0.9  # the same when there is no room


@dataclass(frozen=True, slots=True)
class Cleaner:
    """`copy` appends records as they are; `flushed` waits until all is durable; `durable_lsn` is
    the first lsn that may not be."""

    directory: Path
    files: FileOperations
    index: Index
    payloads: Payloads
    max_bytes: int
    copy: Callable[[Sequence[Item]], None]
    flushed: Callable[[], Awaitable[None]]
    durable_lsn: Callable[[], int]

    async def clean(self, sealed: Sequence[Segment]) -> None:
        self.index.forget_ended()
        for segment in sorted(sealed, key=lambda each: each.number):
            if self._is_worth_it(segment):
                await self._rewrite(segment)

    def _is_worth_it(self, segment: Segment) -> bool:
        if segment.unreadable and segment.entries:
            return False
        full = sum(each.size for each in self.index.segments.values()) > self.max_bytes
        most = _WORTH_IT if full else _MOSTLY_DEAD
        return segment.erase or segment.live <= most * segment.size

    async def _rewrite(self, segment: Segment) -> None:
        for entries in _steps(sorted(segment.entries, key=lambda entry: entry.offset)):
            items = await asyncio.to_thread(self._read, segment, entries)
            if len(items) < len(entries):
                segment.unreadable = True
                log.error("segment %d of the journal is damaged and stays", segment.number)
                return
            self.copy([item for item in items if item.entry.holds])
            await self.flushed()
        if segment.changed > self.durable_lsn():
            await self.flushed()
        await self._unlink(segment)

    def _read(self, segment: Segment, entries: Sequence[Entry]) -> list[Item]:
        """Those that can be read."""
        items = []
        for entry in entries:
            try:
                record = self.payloads.record(entry)
            except OSError as error:
                log.error("segment %d of the journal: %s", segment.number, error)
                record = None
            if record is not None:
                items.append(Item(*record, entry))
        return items

    async def _unlink(self, segment: Segment) -> None:
        if segment.entries:  # more of it is needed than was copied: the next cleaning's
            return
        path = self.directory / str(SegmentName(segment.number, segment.salt))
        try:
            await asyncio.to_thread(self.files.unlink, path)
        except OSError as error:
            log.warning("the journal could not remove %s: %s", path, error)
        else:
            self.index.drop(segment)


def _steps(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    step: list[Entry] = []
    size = 0
    for entry in entries:
        step.append(entry)
        size += entry.size
        if size >= _STEP:
            yield step
            step, size = [], 0
    if step:
        yield step
