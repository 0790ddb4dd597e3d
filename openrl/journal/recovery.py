"""From what is on disk to what goes on: the index, and the models and answers in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrl.errors import ServerError
from openrl.journal.damage import Damage
from openrl.journal.encoding import unpack
from openrl.journal.files import FileOperations
from openrl.journal.index import Index
from openrl.journal.lanes import Entry, Lane, Segment
from openrl.journal.reading import Contents
from openrl.journal.recovered import Answer, Executed, Recovered, RecoveredModel, Snapshot
from openrl.journal.segments import SegmentName, parts_of
from openrl.types import CreateModel, CreateModelFromCheckpoint, Outcome, OwnerId, RequestId, Work

_CREATIONS = {CreateModel.__name__, CreateModelFromCheckpoint.__name__}


class Payloads:
    """Bodies, read from their segments when they are asked for."""

    def __init__(self, directory: Path, files: FileOperations, index: Index) -> None:
        self._directory = directory
        self._files = files
        self._index = index

    def work(self, request_id: RequestId) -> Work:
        lane = self._lane(request_id)
        work: Work = self._read(
            lane.accepted.get(request_id) if lane is not None else None, request_id
        )
        return work

    def outcome(self, request_id: RequestId) -> Outcome:
        lane = self._lane(request_id)
        found = self._index.answers.get(request_id)
        if found is None and lane is not None:
            found = lane.committed.get(request_id)
            if found is None and lane.created and lane.created.header.request_id == request_id:
                found = lane.created
        outcome: Outcome = self._read(found, request_id)
        return outcome

    def record(self, entry: Entry) -> tuple[bytes, bytes] | None:
        """Header and body as they are on disk; None when they cannot be relied on. Raises
        `OSError`."""
        segment = self._index.segments[entry.segment]
        path = self._directory / str(SegmentName(segment.number, segment.salt))
        return parts_of(self._files.read(path, entry.offset, entry.size), segment.salt)

    def _lane(self, request_id: RequestId) -> Lane | None:
        return self._index.lanes.get(request_id.rpartition(":")[0])

    def _read(self, entry: Entry | None, request_id: RequestId) -> Any:
        if entry is None or not entry.segment:
            raise ServerError(f"{request_id} is not in the journal")
        try:
            record = self.record(entry)
            if record is None:
                raise ValueError("its checksum is wrong")
            return unpack(record[1])
        except (OSError, ValueError) as error:
            raise ServerError(f"{request_id} cannot be read from the journal: {error}") from error


def recover(directory: Path, files: FileOperations, contents: Contents) -> tuple[Index, Recovered]:
    index = Index()
    for file in contents.files:
        lanes = set(contents.left.get(file.name.number, ()))
        index.segments[file.name.number] = Segment(
            file.name.number, file.name.salt, file.size, lanes=lanes
        )
        if file.opening is not None:
            index.next_lsn = max(index.next_lsn, file.opening.lsn)
    entries = _once_each(contents.entries)
    for entry in contents.entries:
        index.segments[entry.segment].lanes.add(entry.header.lane)
    for entry in entries:
        index.add(entry)
    damage = Damage(contents, index, entries)
    payloads = Payloads(directory, files, index)
    living = [lane for lane in index.lanes.values() if lane.end is None and not lane.failed]
    recovered = Recovered(
        models=tuple(_model(lane, damage, payloads) for lane in living),
        answers=tuple(_answer(entry) for entry in index.answers.values() if entry.sound),
        attempts={
            RequestId(request_id): len(attempts)
            for lane in living
            for request_id, attempts in lane.started.items()
        },
        damage=damage.elsewhere(),
        payloads=payloads,
        deaths={
            RequestId(request_id): len(attempts)
            for lane in living
            for request_id, attempts in lane.redoing.items()
        },
    )
    return index, recovered


def _once_each(found: Sequence[Entry]) -> list[Entry]:
    """In the order of lsn; of several copies the newest, unless it is damaged and another isn't."""
    chosen: dict[int, Entry] = {}
    for entry in found:
        other = chosen.get(entry.header.lsn)
        if other is None or entry.sound or not other.sound:
            chosen[entry.header.lsn] = entry
    return [chosen[lsn] for lsn in sorted(chosen)]


def _model(lane: Lane, damage: Damage, payloads: Payloads) -> RecoveredModel:
    harm = damage.of(lane)
    creation, created = None, None
    try:
        if lane.creation is not None and lane.creation.header.operation in _CREATIONS:
            creation = payloads.work(RequestId(lane.creation.header.request_id))
        if lane.created is not None:
            created = payloads.outcome(RequestId(lane.created.header.request_id))
    except ServerError as error:
        harm = harm or error.message
    if creation is None:
        harm = harm or "the model's creation is missing"
    return RecoveredModel(
        model_id=lane.model_id,
        owner=OwnerId(lane.owner),
        creation=creation,
        atom_tokens=lane.creation.header.atom_tokens if lane.creation else None,
        created=created,
        snapshot=_snapshot(lane.snapshot),
        executed=tuple(
            Executed(RequestId(name), entry.header.operation, entry.header.failed)
            for name, entry in lane.committed.items()
        ),
        pending=tuple(RequestId(entry.header.request_id) for entry in lane.pending),
        last_seq=lane.last_seq,
        damage=harm,
    )


def _snapshot(entry: Entry | None) -> Snapshot | None:
    return Snapshot(RequestId(entry.header.position), entry.header.name) if entry else None


def _answer(entry: Entry) -> Answer:
    header = entry.header
    return Answer(
        request_id=RequestId(header.request_id),
        owner=OwnerId(header.owner),
        operation=header.operation,
        lane=header.lane,
        size=entry.size,
    )
