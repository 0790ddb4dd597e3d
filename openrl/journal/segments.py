"""One file of the journal: its name, its first record, and what can be read of it.

`00000012-5f1c09ab.log`: the number, and in hexadecimal the salt of its checksums.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import msgpack

from openrl.journal.records import (
    FRAME,
    MAGIC,
    Buffer,
    Header,
    Kind,
    frame,
    header_crc,
    pack_header,
    unpack_header,
)

_NAME = re.compile(r"(\d{8,})-([0-9a-f]{8})\.log")
_MOST_HEADER = 4 << 20
FORMAT = 1


@dataclass(frozen=True, slots=True)
class SegmentName:
    number: int
    salt: int

    @staticmethod
    def draw(number: int) -> SegmentName:
        return SegmentName(number, secrets.randbits(32))

    @staticmethod
    def of(path: Path) -> SegmentName | None:
        match = _NAME.fullmatch(path.name)
        return SegmentName(int(match[1]), int(match[2], 16)) if match else None

    def __str__(self) -> str:
        return f"{self.number:08d}-{self.salt:08x}.log"


@dataclass(frozen=True, slots=True)
class Opening:
    """What the first record says: all of segment `previous` up to `previous_size` was durable;
    the next new record was to have `lsn`; and `census`, how many records each living lane had."""

    previous: int
    previous_size: int
    lsn: int
    census: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Found:
    """A record whose header is intact. `sound` says that its body is too."""

    header: Header
    offset: int
    size: int
    sound: bool


@dataclass(frozen=True, slots=True)
class Gap:
    """Bytes in which there is no record."""

    offset: int
    size: int


def opening_record(salt: int, opening: Opening) -> bytes:
    header = pack_header(Header(Kind.OPENED))
    body: bytes = msgpack.packb(
        {
            "format": FORMAT,
            "previous": opening.previous,
            "previous_size": opening.previous_size,
            "lsn": opening.lsn,
            "census": dict(opening.census),
        }
    )
    return frame(salt, header, body) + header + body


def durable_record(salt: int, batch: int, counts: Mapping[str, int]) -> bytes:
    """The mark behind the segment's `batch`, counted from 1; `counts`: the newest number of each
    lane that had new records in it."""
    header = pack_header(Header(Kind.DURABLE, count=batch))
    body: bytes = msgpack.packb(dict(counts))
    return frame(salt, header, body) + header + body


def read_opening(body: Buffer) -> Opening:
    given: Mapping[str, Any] = msgpack.unpackb(body)
    return Opening(given["previous"], given["previous_size"], given["lsn"], given["census"])


def read_counts(body: bytes) -> Mapping[str, int]:
    counts: Mapping[str, int] = msgpack.unpackb(body)
    return counts


def scan(data: bytes, salt: int) -> Iterator[Found | Gap]:
    """All of a segment, from its beginning to its end. A record that goes on beyond the end is
    not sound, and its size is what is there of it."""
    view, at = memoryview(data), 0
    while at < len(data):
        found = _record_at(view, at, salt)
        if found is None:
            following = _resync(data, view, at + 1, salt)
            yield Gap(at, following - at)
            at = following
        else:
            yield found
            at += found.size


def body_of(record: bytes) -> bytes:
    """Of a whole record that was found to be sound."""
    _, header_size, _, _, _ = FRAME.unpack_from(record)
    return record[FRAME.size + header_size :]


def parts_of(record: bytes, salt: int) -> tuple[bytes, bytes] | None:
    """Header and body as they stand in the record; None when it is not sound."""
    found = _record_at(memoryview(record), 0, salt)
    if found is None or not found.sound or found.size != len(record):
        return None
    _, header_size, _, _, _ = FRAME.unpack_from(record)
    return record[FRAME.size : FRAME.size + header_size], record[FRAME.size + header_size :]


def _record_at(view: memoryview, at: int, salt: int) -> Found | None:
    if len(view) - at < FRAME.size:
        return None
    magic, header_size, body_size, body_crc, crc = FRAME.unpack_from(view, at)
    start = at + FRAME.size
    end = start + header_size
    if magic != MAGIC or header_size > _MOST_HEADER or end > len(view):
        return None
    if header_crc(salt, header_size, body_size, body_crc, view[start:end]) != crc:
        return None
    body = view[end : end + body_size]
    sound = len(body) == body_size and crc32(body, salt) == body_crc
    return Found(unpack_header(view[start:end]), at, end - at + len(body), sound)


def _resync(data: bytes, view: memoryview, at: int, salt: int) -> int:
    """Where the next record begins; the end when there is none."""
    while (at := data.find(MAGIC, at)) >= 0:
        if _record_at(view, at, salt) is not None:
            return at
        at += 1
    return len(data)
