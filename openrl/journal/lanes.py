"""What the index is made of: records, the segments that they are in, and the models' lanes."""

from __future__ import annotations

from dataclasses import dataclass, field
from sys import maxsize

from openrl.journal.records import Header
from openrl.types import ModelId


@dataclass(slots=True, eq=False)
class Entry:
    """A record and where it is: in `segment` at `offset`, or with segment 0 in memory only.
    `holds` counts the reasons to keep it."""

    header: Header
    size: int
    segment: int = 0
    offset: int = 0
    sound: bool = True
    holds: int = 0


@dataclass(slots=True, eq=False)
class Segment:
    """`live` bytes of `size` are needed: those of `entries`. `erase`: holds something of a model
    that has ended. `changed`: the lsn that came next when something of it was last given up; the
    segment may go once all before that is durable."""

    number: int
    salt: int
    size: int = 0
    live: int = 0
    entries: set[Entry] = field(default_factory=set)
    lanes: set[str] = field(default_factory=set)
    erase: bool = False
    unreadable: bool = False
    changed: int = 0


@dataclass(slots=True, eq=False)
class Lane:
    """`accepted` works without an outcome or to be replayed; `committed` outcomes to be replayed,
    in order; `bytes` of both. `started`: the attempts at works without an outcome; `redoing`: at
    doing again what has one, of starts that ended in them; `redone`: the last start that did not.
    `answers`: the outcomes that are kept. A lane with an `end` needs nothing else."""

    model_id: ModelId
    owner: str = ""
    creation: Entry | None = None
    created: Entry | None = None
    snapshot: Entry | None = None
    damage: Entry | None = None
    accepted: dict[str, Entry] = field(default_factory=dict)
    committed: dict[str, Entry] = field(default_factory=dict)
    started: dict[str, list[Entry]] = field(default_factory=dict)
    redoing: dict[str, list[Entry]] = field(default_factory=dict)
    redone: Entry | None = None
    answers: dict[str, Entry] = field(default_factory=dict)
    end: Entry | None = None
    count: int = 0
    last_seq: int = 0
    bytes: int = 0

    def turn(self, request_id: str) -> int:
        """Orders what a start does with the model: it is made or restored, then does again what has
        an outcome, then what has none yet."""
        if (outcome := self.committed.get(request_id)) is not None:
            return outcome.header.lsn
        makes = self.created is not None and self.created.header.request_id == request_id
        return maxsize if request_id in self.accepted and not makes else 0

    @property
    def failed(self) -> bool:
        """The creation did: there is no model."""
        return self.created is not None and self.created.header.failed

    @property
    def pending(self) -> list[Entry]:
        done = self.created.header.request_id if self.created else None
        return [
            entry
            for request_id, entry in self.accepted.items()
            if request_id not in self.committed and request_id != done
        ]
