"""A directory of segments as it is found at start, and what of it can be relied on.

An end that was being written when the process or the machine stopped was promised to nobody: it
is cut off. Of the segments before it the next one's first record says how much was durable; in
the last one a mark says so. Anything else that cannot be read is damage.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from openrl.errors import UserError
from openrl.journal.files import FileOperations
from openrl.journal.lanes import Entry
from openrl.journal.records import Kind
from openrl.journal.segments import (
    Found,
    Gap,
    Opening,
    SegmentName,
    body_of,
    read_counts,
    read_opening,
    scan,
)

log = logging.getLogger("openrl")

_NO_LANE = (Kind.OPENED, Kind.DURABLE)


@dataclass(frozen=True, slots=True)
class File:
    """`parts` of a segment of `size` bytes; `opening` is None when it cannot be read. `counts`:
    how many records each lane had, by the marks; `marks` are the places of those."""

    name: SegmentName
    size: int
    parts: Sequence[Found | Gap]
    opening: Opening | None
    counts: Mapping[str, int]
    marks: frozenset[int]

    @property
    def proven(self) -> int:
        """How much of it was durable by its own marks."""
        ends = [
            part.offset + part.size
            for part in self.parts
            if isinstance(part, Found) and part.header.kind == Kind.DURABLE
        ]
        return max(ends, default=0)


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes that held records once. `counted`: a mark behind it says of which lanes."""

    segment: int
    offset: int
    size: int
    counted: bool

    def __str__(self) -> str:
        return f"{self.size} bytes at {self.offset} of segment {self.segment}"


@dataclass(frozen=True, slots=True)
class Contents:
    """`entries` in the order of the log, copies included; `left` names the lanes of what is on
    disk and does not count, by segment. `regions` is what was lost without a name to it."""

    files: Sequence[File]
    entries: Sequence[Entry]
    left: Mapping[int, set[str]]
    regions: Sequence[Region]


def read_directory(directory: Path, files: FileOperations) -> Contents:
    """Cuts a torn end off. Raises `UserError` when the directory cannot be read or written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_writable(directory, files)
        named = [(name, path) for path in directory.iterdir() if (name := SegmentName.of(path))]
        found = [_read(name, path, files) for name, path in sorted(named, key=_number)]
        return _contents(_cut(directory, files, found))
    except OSError as error:
        raise UserError(
            f"the journal in {directory} cannot be opened: {error.strerror or error}: the server "
            "must be able to read and write there, or run with journal.enabled = false"
        ) from error


def _number(named: tuple[SegmentName, Path]) -> int:
    return named[0].number


def _check_writable(directory: Path, files: FileOperations) -> None:
    """A disk that is full may be so because of the journal, which can make room."""
    probe = directory / "probe"
    try:
        probe.unlink(missing_ok=True)
        files.close(files.create(probe))
        files.unlink(probe)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _read(name: SegmentName, path: Path, files: FileOperations) -> File:
    data = files.read(path)
    parts = tuple(scan(data, name.salt))
    counts: dict[str, int] = {}
    marks: set[int] = set()
    for part in parts:
        if isinstance(part, Found) and part.sound and part.header.kind == Kind.DURABLE:
            counts.update(read_counts(body_of(data[part.offset : part.offset + part.size])))
            marks.add(part.offset)
    return File(name, len(data), parts, _opening(data, parts), counts, frozenset(marks))


def _opening(data: bytes, parts: Sequence[Found | Gap]) -> Opening | None:
    first = parts[0] if parts else None
    if isinstance(first, Found) and first.sound and first.header.kind == Kind.OPENED:
        return read_opening(body_of(data[: first.size]))
    return None


def _cut(directory: Path, files: FileOperations, found: Sequence[File]) -> list[File]:
    """Without what was not durable when it was written. What the process before this one wrote
    last may not be durable yet: it is now."""
    durable = {each.opening.previous: each.opening.previous_size for each in found if each.opening}
    kept: list[File] = []
    for file in reversed(found):
        size = durable.get(file.name.number)
        if size is None and not kept:
            size = _torn_at(file)
            _shorten(directory, files, file, size)
        if size is None:
            size = file.size
        if size:
            kept.append(_without(file, size))
    return kept[::-1]


def _torn_at(file: File) -> int:
    proven = file.proven
    bad = (
        part.offset
        for part in file.parts
        if part.offset >= proven and (isinstance(part, Gap) or not part.sound)
    )
    return next(bad, file.size)


def _shorten(directory: Path, files: FileOperations, file: File, size: int) -> None:
    path = directory / str(file.name)
    if size < file.size:
        log.warning("%s: the last %d bytes were not written whole", path, file.size - size)
    if size:
        files.cut(path, size)
    else:
        files.unlink(path)


def _without(file: File, size: int) -> File:
    """The parts up to `size`; where the file is shorter, a gap stands for what is gone."""
    parts = list(file.parts)
    if file.size < size:
        parts.append(Gap(file.size, size - file.size))
    return replace(file, size=size, parts=tuple(parts))


def _contents(files: Sequence[File]) -> Contents:
    entries: list[Entry] = []
    left: dict[int, set[str]] = {}
    for file in files:
        number = file.name.number
        for part in file.parts:
            if isinstance(part, Gap) or part.header.kind in _NO_LANE:
                continue
            if part.offset < file.size:
                entries.append(Entry(part.header, part.size, number, part.offset, part.sound))
            else:
                left.setdefault(number, set()).add(part.header.lane)
    return Contents(files, entries, left, [each for file in files for each in _regions(file)])


def _regions(file: File) -> Iterator[Region]:
    """Marks are numbered: between two that follow on each other there was one batch, and the
    latter says whose records were in it."""
    batch, open_regions = 0, list[Gap]()
    for part in file.parts:
        if isinstance(part, Gap):
            if part.offset < file.size:
                open_regions.append(part)
        elif part.header.kind == Kind.DURABLE:
            counted = part.header.count == batch + 1 and part.offset in file.marks
            batch = part.header.count
            yield from (Region(file.name.number, g.offset, g.size, counted) for g in open_regions)
            open_regions.clear()
    yield from (Region(file.name.number, g.offset, g.size, False) for g in open_regions)
