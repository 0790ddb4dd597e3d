"""The one thread that writes. It takes whatever is there, writes it, makes it durable, and says
so on the event loop: the more come at once, the more share one sync.

Nothing is lost when writing fails. What is not durable stays in memory; the segment is given up
after its last durable byte; and the same records are written to a new one, again and again, until
that succeeds. `trouble` says why, meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from openrl.journal.files import FileOperations
from openrl.journal.lanes import Entry
from openrl.journal.records import Buffer, Header, Kind, frame
from openrl.journal.segments import Opening, SegmentName, durable_record, opening_record

T = TypeVar("T")

log = logging.getLogger("openrl")

_TOGETHER = 1 << 20  # bytes up to which small pieces are joined for one write


@dataclass(frozen=True, slots=True)
class Item:
    """A record to be written. `entry` is told where it came to be."""

    header: bytes
    body: bytes
    entry: Entry


@dataclass(frozen=True, slots=True)
class Written:
    """`items` begin at `offsets` of a segment that has `size` bytes now. It took `seconds`."""

    segment: SegmentName
    size: int
    items: Sequence[Item]
    offsets: Sequence[int]
    seconds: float


@dataclass(slots=True)
class _Open:
    """The segment that is written to: `size` bytes, of which those up to `durable` are. Up to
    `good` all are records; what is beyond is left of an attempt that failed."""

    name: SegmentName
    file: int
    durable: int = 0
    good: int = 0
    size: int = 0
    batches: int = 0


class Writer:
    """`last`: the number and size of the segment that was written before. `lsn`: the next new
    record's; `census`: how many records each living lane has on disk. Called on the loop are
    `on_written`, in the order of writing, and `on_failed`, when nothing more will be written.
    `pauses`: the first and the longest between attempts."""

    def __init__(
        self,
        directory: Path,
        files: FileOperations,
        segment_bytes: int,
        last: tuple[int, int],
        lsn: int,
        census: Mapping[str, int],
        on_written: Callable[[Written], None],
        on_failed: Callable[[Exception], None],
        pauses: tuple[float, float] = (0.05, 5.0),
    ) -> None:
        self.trouble: str | None = None
        self._directory = directory
        self._files = files
        self._segment_bytes = segment_bytes
        self._last, self._last_size = last
        self._number = self._last
        self._lsn = lsn
        self._census = dict(census)
        self._pauses = pauses
        self._on_written = on_written
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Item] = deque()
        self._wake = threading.Condition()
        self._again = threading.Event()
        self._closing = False
        self._roll = False
        self._open: _Open | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    # --- on the loop ---

    def append(self, items: Sequence[Item]) -> None:
        with self._wake:
            self._queue.extend(items)
            self._wake.notify()

    def roll(self) -> None:
        """What comes next goes to a new segment."""
        with self._wake:
            self._roll = True

    async def close(self) -> None:
        """Writes what is left, at the first attempt or not at all."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._again.set()
        await asyncio.to_thread(self._thread.join)

    # --- on the thread ---

    def _run(self) -> None:
        try:
            while batch := self._next_batch():
                if not self._persist(batch):
                    log.error("%d records of the journal were not durable at the end", len(batch))
                    break
            if self._open is not None:
                self._give_up(self._open)
        except Exception as error:  # a defect of ours, or of the machine
            log.exception("the journal's writer failed")
            self._on_loop(self._on_failed, error)

    def _next_batch(self) -> list[Item]:
        """Empty at the end alone."""
        with self._wake:
            while not self._queue and not self._closing:
                self._wake.wait()
            batch = list(self._queue)
            self._queue.clear()
        return batch

    def _persist(self, batch: list[Item]) -> bool:
        """Until it is durable; False when that cannot be waited for."""
        pause, longest = self._pauses
        while True:
            try:
                written = self._write(batch)
            except OSError as error:
                self._in_trouble(error)
            else:
                self._out_of_trouble()
                self._on_loop(self._on_written, written)
                return True
            if self._closing:
                return False
            self._again.wait(pause)
            self._again.clear()
            pause = min(2 * pause, longest)

    def _write(self, batch: list[Item]) -> Written:
        began = time.monotonic()
        segment = self._segment(sum(len(item.header) + len(item.body) for item in batch))
        pieces, offsets, at = [], [], segment.size
        for item in batch:
            head = frame(segment.name.salt, item.header, item.body) + item.header
            pieces += [head, item.body]
            offsets.append(at)
            at += len(head) + len(item.body)
        self._write_all(segment, pieces)
        self._files.sync(segment.file)
        segment.durable = segment.good = segment.size
        self._mark_durable(segment, self._count(item.entry.header for item in batch))
        return Written(segment.name, segment.size, batch, offsets, time.monotonic() - began)

    def _segment(self, coming: int) -> _Open:
        segment = self._open
        if segment is not None:
            if not self._roll and segment.size + coming <= self._segment_bytes:
                return segment
            self._give_up(segment)
        self._roll = False
        self._number += 1
        name = SegmentName.draw(self._number)
        segment = self._open = _Open(name, self._files.create(self._directory / str(name)))
        opening = Opening(self._last, self._last_size, self._lsn, self._census)
        self._write_all(segment, [opening_record(name.salt, opening)])
        return segment

    def _write_all(self, segment: _Open, pieces: Sequence[bytes]) -> None:
        for piece in _joined(pieces):
            view = memoryview(piece)
            while view:
                count = self._files.write(segment.file, view)
                segment.size += count
                view = view[count:]

    def _mark_durable(self, segment: _Open, counts: Mapping[str, int]) -> None:
        """What is before the mark was acknowledged: damage there is no torn end. The mark itself
        needs no sync: a process that is killed leaves it, and after a power cut an unproven end
        that is intact counts all the same."""
        segment.batches += 1
        try:
            self._write_all(segment, [durable_record(segment.name.salt, segment.batches, counts)])
        except OSError as error:
            log.warning("the journal could not write a mark: %s", error)
            self._give_up(segment)
        else:
            segment.good = segment.size

    def _give_up(self, segment: _Open) -> None:
        """Nothing is written to it any more, and only what is durable counts."""
        self._open = None
        path = self._directory / str(segment.name)
        try:
            if segment.size > segment.good:
                self._files.truncate(segment.file, segment.good)
        except OSError as error:
            log.warning("the journal could not cut %s: %s", path.name, error)
        try:
            self._files.close(segment.file)
        except OSError as error:
            log.warning("the journal could not close %s: %s", path.name, error)
        if segment.durable:
            self._last, self._last_size = segment.name.number, segment.durable
            return
        try:
            self._files.unlink(path)
        except OSError as error:
            log.warning("the journal could not remove %s: %s", path.name, error)

    def _count(self, headers: Iterable[Header]) -> Mapping[str, int]:
        """The new records among them; copies are in the census already."""
        counts: dict[str, int] = {}
        for header in headers:
            if header.lsn < self._lsn:
                continue
            self._lsn = header.lsn + 1
            if header.kind == Kind.ENDED:
                self._census.pop(header.lane, None)
            elif header.count:
                self._census[header.lane] = counts[header.lane] = header.count
        return counts

    def _in_trouble(self, error: OSError) -> None:
        trouble = f"the journal cannot write: {error.strerror or error}"
        if trouble != self.trouble:
            log.error("%s; what it was told stays in memory until it can", trouble)
        self.trouble = trouble
        if self._open is not None:
            self._give_up(self._open)

    def _out_of_trouble(self) -> None:
        if self.trouble is not None:
            log.info("the journal writes again")
        self.trouble = None

    def _on_loop(self, callback: Callable[[T], None], what: T) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, what)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("the journal's loop is closed")


def _joined(pieces: Sequence[bytes]) -> Iterator[Buffer]:
    """Small pieces together, large ones as they are."""
    small: list[bytes] = []
    size = 0
    for piece in pieces:
        if size + len(piece) > _TOGETHER and small:
            yield b"".join(small)
            small, size = [], 0
        small.append(piece)
        size += len(piece)
    if small:
        yield small[0] if len(small) == 1 else b"".join(small)
