"""The journal on a local disk."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NoReturn

from openrl.actors import Tasks
from openrl.errors import ServerError, Unavailable
from openrl.journal.cleaning import Cleaner
from openrl.journal.encoding import pack
from openrl.journal.files import FileOperations, LocalFiles
from openrl.journal.index import Index
from openrl.journal.lanes import Entry, Segment
from openrl.journal.protocol import JournalStatistics
from openrl.journal.reading import Contents, read_directory
from openrl.journal.records import FRAME, Header, Kind, pack_header
from openrl.journal.recovered import Recovered
from openrl.journal.recovery import Payloads, recover
from openrl.journal.writer import Item, Writer, Written
from openrl.types import Failed, ModelId, Outcome, RequestId, Sample, Work

log = logging.getLogger("openrl")

SEGMENT_BYTES = 64 << 20
MAX_BYTES = 8 << 30


class DiskJournal:
    """Open it with `DiskJournal.open`; all of it is used on the event loop that it is opened on.

    Appending encodes and returns; a thread writes. `max_bytes` is how much should be on disk:
    cleaning keeps it below as long as less than that is needed, and above it there is `trouble`
    until snapshots have made room.
    """

    def __init__(
        self,
        directory: Path,
        files: FileOperations,
        index: Index,
        contents: Contents,
        segment_bytes: int,
        max_bytes: int,
        pauses: tuple[float, float],
    ) -> None:
        self._index = index
        self._max_bytes = max_bytes
        self._active: int | None = None
        self._told = self._durable = self._unflushed = self._fsyncs = 0
        self._last_fsync_seconds = 0.0
        self._durable_lsn = index.next_lsn
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failure: ServerError | None = None
        self._failed = asyncio.Event()
        self._cleaning = asyncio.Lock()
        self._tasks = Tasks(lambda name, error: None)
        last = max(contents.files, key=lambda file: file.name.number, default=None)
        self._writer = Writer(
            directory,
            files,
            segment_bytes,
            (last.name.number, last.size) if last else (0, 0),
            index.next_lsn,
            {n: lane.count for n, lane in index.lanes.items() if not lane.end and lane.count},
            self._on_written,
            self._fail,
            pauses,
        )
        self._cleaner = Cleaner(
            directory,
            files,
            index,
            Payloads(directory, files, index),
            max_bytes,
            self._write,
            self.flushed,
            lambda: self._durable_lsn,
        )

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        max_bytes: int = MAX_BYTES,
        files: FileOperations | None = None,
        pauses: tuple[float, float] = (0.05, 5.0),
    ) -> tuple[DiskJournal, Recovered]:
        """`pauses`: seconds between attempts to write, the first and the longest. Raises
        `UserError` when the directory cannot be read or written."""
        files = files or LocalFiles()
        contents = await asyncio.to_thread(read_directory, directory, files)
        index, recovered = await asyncio.to_thread(recover, directory, files, contents)
        journal = cls(directory, files, index, contents, segment_bytes, max_bytes, pauses)
        for lane in [each for each in index.lanes.values() if each.failed]:
            journal.ended(lane.model_id)
        for model in recovered.models:
            if model.damage is not None and index.lanes[model.model_id].damage is None:
                header = Header(Kind.DAMAGED, index.next_lsn, model.model_id, name=model.damage)
                journal._append(header)
        return journal, recovered

    async def aclose(self) -> None:
        """Makes durable what can be made durable at once."""
        await self._tasks.close()
        await self._writer.close()
        await asyncio.sleep(0)  # what the writer said last
        for _, waiter in self._waiters:
            waiter.cancel()

    # --- what is told ---

    @property
    def trouble(self) -> str | None:
        if self._failure is not None:
            return self._failure.message
        if self._writer.trouble is not None:
            return self._writer.trouble
        if self._index.live > self._max_bytes:
            return (
                f"the journal is full: {self._index.live >> 20} MiB are needed until the next "
                f"snapshots, and {self._max_bytes >> 20} MiB are allowed (journal.max_bytes)"
            )
        return None

    def accepted(self, work: Work, atom_tokens: int | None = None) -> None:
        """The first of a lane is the creation of its model."""
        if isinstance(work.operation, Sample):
            return
        first = self._index.lane(work.lane).count == 0
        self._append(self._of(Kind.ACCEPTED, work, creates=first, atom_tokens=atom_tokens), work)

    def started(self, work: Work) -> None:
        if not isinstance(work.operation, Sample):
            self._append(self._of(Kind.STARTED, work))

    def redoing(self, model_id: ModelId, request_id: RequestId | None) -> None:
        at = self._index.next_lsn
        self._append(Header(Kind.REDOING, at, model_id, request_id=request_id or ""))

    def committed(self, work: Work, outcome: Outcome) -> None:
        if isinstance(work.operation, Sample):
            return
        creation = self._index.lane(work.lane).creation
        creates = creation is not None and creation.header.request_id == work.request_id
        failed = isinstance(outcome, Failed)
        self._append(self._of(Kind.COMMITTED, work, creates=creates, failed=failed), outcome)
        if creates and failed:
            self.ended(ModelId(work.lane))

    def snapshot(self, model_id: ModelId, position: RequestId, name: str) -> None:
        """Raises `ValueError` for a position that has no outcome, or is before a snapshot."""
        self._append(self._index.snapshot_header(model_id, position, name, self._index.next_lsn))

    def ended(self, model_id: ModelId) -> None:
        lane = self._index.lanes.get(model_id)
        if lane is not None and lane.end is None:
            self._append(Header(Kind.ENDED, self._index.next_lsn, model_id))

    def forgotten(self, request_ids: Collection[RequestId]) -> None:
        self._index.forget(request_ids)

    # --- what is asked ---

    async def flushed(self) -> None:
        if self._durable >= self._told:
            return
        if self._failure is not None:
            raise _not_durable(self._failure)
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((self._told, waiter))
        await waiter

    async def lost(self) -> NoReturn:
        await self._failed.wait()
        assert self._failure is not None
        raise self._failure

    def size_of(self, model_id: ModelId) -> int:
        lane = self._index.lanes.get(model_id)
        return lane.bytes if lane is not None else 0

    def statistics(self) -> JournalStatistics:
        return JournalStatistics(
            bytes=sum(each.size for each in self._index.segments.values()),
            live_bytes=self._index.live,
            segments=len(self._index.segments),
            unflushed_bytes=self._unflushed,
            appended=self._told,
            fsyncs=self._fsyncs,
            last_fsync_seconds=self._last_fsync_seconds,
            trouble=self.trouble,
        )

    async def clean(self) -> None:
        """Makes room, and erases models that have ended; one at a time. It is called by itself
        when a segment is full: call it now and then for the erasing."""
        async with self._cleaning:
            if self._writer.trouble is None:
                await self._seal()
                segments = self._index.segments.values()
                await self._cleaner.clean([s for s in segments if s.number != self._active])

    # --- inside ---

    def _of(
        self,
        kind: Kind,
        work: Work,
        creates: bool = False,
        failed: bool = False,
        atom_tokens: int | None = None,
    ) -> Header:
        counted = kind is not Kind.STARTED
        return Header(
            kind,
            lsn=self._index.next_lsn,
            lane=work.lane,
            count=self._index.lane(work.lane).count + 1 if counted else 0,
            request_id=work.request_id,
            owner=work.owner,
            seq_id=work.seq_id,
            operation=type(work.operation).__name__,
            failed=failed,
            creates=creates,
            atom_tokens=atom_tokens,
        )

    def _append(self, header: Header, value: Work | Outcome | None = None) -> None:
        head = pack_header(header)
        body = b"" if value is None else pack(value)
        entry = Entry(header, FRAME.size + len(head) + len(body))
        self._index.add(entry)
        self._write([Item(head, body, entry)])

    def _write(self, items: Sequence[Item]) -> None:
        self._told += len(items)
        self._unflushed += sum(item.entry.size for item in items)
        self._writer.append(items)

    def _fail(self, error: Exception) -> None:
        """What is not durable now will not be. Whoever waits for it is told."""
        cause = f"{type(error).__name__}: {error}"
        self._failure = ServerError(f"the journal's writer has failed: {cause}")
        self._failed.set()
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(_not_durable(self._failure))

    def _on_written(self, written: Written) -> None:
        try:
            self._land(written)
        except Exception as error:  # what is told as durable must be known to be
            log.exception("the journal's index failed")
            self._fail(error)

    def _land(self, written: Written) -> None:
        self._fsyncs += 1
        self._last_fsync_seconds = written.seconds
        segment = self._home(written)
        for item, offset in zip(written.items, written.offsets, strict=True):
            self._index.landed(item.entry, segment, offset)
            self._durable_lsn = max(self._durable_lsn, item.entry.header.lsn + 1)
            self._unflushed -= item.entry.size
        self._durable += len(written.items)
        while self._waiters and self._waiters[0][0] <= self._durable:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _home(self, written: Written) -> Segment:
        number = written.segment.number
        if number != self._active:
            if self._active is not None and not self._cleaning.locked():
                self._tasks.spawn(self.clean(), "clean the journal")
            self._active = number
            self._index.segments[number] = Segment(number, written.segment.salt)
        segment = self._index.segments[number]
        segment.size = written.size
        return segment

    async def _seal(self) -> None:
        """Nothing is written any more to a segment that holds what is to be erased."""
        active = self._index.segments.get(self._active) if self._active is not None else None
        if active is not None and (active.erase or active.live == 0):
            self._writer.roll()
            await self.flushed()
            if self._active == active.number:
                self._active = None


def _not_durable(failure: ServerError) -> Unavailable:
    return Unavailable(f"{failure.message}; send it again to the next process", retry_after=5.0)
