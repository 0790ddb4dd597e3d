"""One record: a frame, a small header, a body.

    magic 4 | header length 4 | body length 4 | body's crc 4 | header's crc 4 | header | body

The header, a msgpack map, says whose record it is, so that damage to the body can be told to
whom it concerns; its crc covers the lengths too. All checksums begin with the segment's `salt`,
a number that callers do not know, so that nothing that is in a body can pass for a record.

A record keeps its `lsn` when it is copied to a newer segment: readers sort by it, and take one of
several. `count` numbers the accepted works and the outcomes of one lane from 1.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, TypeAlias
from zlib import crc32

import msgpack

MAGIC = b"\xf5oRL"
FRAME = struct.Struct("<4sIIII")
_LENGTHS = struct.Struct("<III")

Buffer: TypeAlias = bytes | memoryview


class Kind(StrEnum):
    OPENED = "opened"  # first in a segment
    DURABLE = "durable"  # all before it in its segment is
    ACCEPTED = "accepted"
    STARTED = "started"
    COMMITTED = "committed"
    REDOING = "redoing"  # at a start; without a request: the model is what it was
    SNAPSHOT = "snapshot"
    ENDED = "ended"
    DAMAGED = "damaged"  # found to be at a start: `name` says how


@dataclass(frozen=True, slots=True)
class Header:
    """Which fields are set depends on the kind; those with their default are left out on disk.

    `operation` is the name of its class and `failed` an outcome's. Of a snapshot:
    `position` and `position_lsn` of the outcome up to which it goes, `position_count` how many
    records its lane had then, `kept` the numbers of those before it that are still needed.
    """

    kind: str
    lsn: int = 0
    lane: str = ""
    count: int = 0
    request_id: str = ""
    owner: str = ""
    seq_id: int = 0
    operation: str = ""
    failed: bool = False
    creates: bool = False
    atom_tokens: int | None = None
    name: str = ""
    position: str = ""
    position_lsn: int = 0
    position_count: int = 0
    kept: tuple[int, ...] = ()
    last_seq: int = 0


_DEFAULTS: Mapping[str, Any] = {each.name: each.default for each in fields(Header)}


def pack_header(header: Header) -> bytes:
    given = {
        name: value for name in _DEFAULTS if (value := getattr(header, name)) != _DEFAULTS[name]
    }
    return bytes(msgpack.packb(given))


def unpack_header(content: Buffer) -> Header:
    """Passes over fields that a later version has added."""
    given = msgpack.unpackb(content, use_list=False)
    return Header(**{name: value for name, value in given.items() if name in _DEFAULTS})


def frame(salt: int, header: bytes, body: bytes) -> bytes:
    """What stands before header and body."""
    body_crc = crc32(body, salt)
    crc = header_crc(salt, len(header), len(body), body_crc, header)
    return FRAME.pack(MAGIC, len(header), len(body), body_crc, crc)


def header_crc(salt: int, header_size: int, body_size: int, body_crc: int, header: Buffer) -> int:
    return crc32(header, crc32(_LENGTHS.pack(header_size, body_size, body_crc), salt))
