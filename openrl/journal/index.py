"""What is still needed of all that was appended, kept up with each record. Pure.

A record is needed for one or two reasons, and goes when none is left; what has gone never comes
back. Reasons: the work has no outcome; the operation is replayed, since its model lives and no
snapshot includes it; its answer is kept; it is a living model's creation or newest snapshot; it
says that a model has ended of which something is still on disk.

Recovery feeds the same index, in the order of `lsn`, with what it finds on disk. There may be
more than is needed: an accepted work whose outcome has been cleaned away is told from a pending
one by the snapshot, which says which of those before it were `kept`.
"""

from __future__ import annotations

from collections.abc import Collection
from sys import maxsize

from openrl.journal.lanes import Entry, Lane, Segment
from openrl.journal.records import Header, Kind
from openrl.types import ModelId, RequestId


class Index:
    """`live` bytes are needed of what was appended."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.segments: dict[int, Segment] = {}
        self.answers: dict[str, Entry] = {}
        self.next_lsn = 1
        self.live = 0

    def lane(self, name: str) -> Lane:
        if (found := self.lanes.get(name)) is None:
            found = self.lanes[name] = Lane(ModelId(name))
        return found

    def add(self, entry: Entry) -> None:
        """A record that was appended or found; in the order of lsn."""
        header = entry.header
        self.next_lsn = max(self.next_lsn, header.lsn + 1)
        lane = self.lane(header.lane)
        lane.count = max(lane.count, header.count)
        lane.owner = lane.owner or header.owner
        match header.kind:
            case Kind.ACCEPTED:
                self._accepted(lane, entry)
            case Kind.STARTED:
                self._started(lane, entry)
            case Kind.REDOING:
                self._redoing(lane, entry)
            case Kind.COMMITTED:
                self._committed(lane, entry)
            case Kind.SNAPSHOT:
                self._snapshot(lane, entry)
            case Kind.ENDED:
                self._ended(lane, entry)
            case Kind.DAMAGED if lane.end is None and lane.damage is None:
                lane.damage = entry
                self._hold(entry)

    def forget(self, request_ids: Collection[RequestId]) -> None:
        for request_id in request_ids:
            if (entry := self.answers.pop(request_id, None)) is not None:
                lane = self.lanes[entry.header.lane]
                del lane.answers[request_id]
                self._release(entry)
                if lane.end is not None and (home := self.segments.get(entry.segment)):
                    home.erase = True

    def landed(self, entry: Entry, segment: Segment, offset: int) -> None:
        """It is durable at its first place, or at another one."""
        if entry.holds:
            self._take_from(entry)
        entry.segment, entry.offset = segment.number, offset
        segment.lanes.add(entry.header.lane)
        if entry.holds:
            self._give_to(entry)
        elif self.lanes.get(entry.header.lane) is None or self.lanes[entry.header.lane].end:
            segment.erase = True

    def drop(self, segment: Segment) -> None:
        """Its file is gone."""
        del self.segments[segment.number]
        left = {name for other in self.segments.values() for name in other.lanes}
        for name in segment.lanes - left:
            lane = self.lanes.get(name)
            if lane is not None and lane.end is not None and not lane.end.holds:
                del self.lanes[name]

    def forget_ended(self) -> None:
        """Lets go of the ends of models of which nothing else is on disk."""
        ended = [lane for lane in self.lanes.values() if lane.end is not None and lane.end.holds]
        for lane in ended:
            assert lane.end is not None
            homes = [each.number for each in self.segments.values() if lane.model_id in each.lanes]
            if not lane.answers and lane.end.segment and homes == [lane.end.segment]:
                self._release(lane.end)
                self.segments[lane.end.segment].erase = True

    def snapshot_header(
        self, model_id: ModelId, position: RequestId, name: str, lsn: int
    ) -> Header:
        """Raises `ValueError` when there is no outcome at `position`, or a snapshot after it."""
        lane = self.lanes.get(model_id)
        at = self._position(lane, position) if lane is not None else None
        if lane is None or at is None:
            raise ValueError(f"{position} is no executed operation after the last snapshot")
        position_lsn, count = at
        before = [
            entry.header.count
            for request_id, entry in lane.accepted.items()
            if (outcome := lane.committed.get(request_id)) is None
            or outcome.header.lsn > position_lsn
        ]
        if lane.created is not None:
            before.append(lane.created.header.count)
        return Header(
            Kind.SNAPSHOT,
            lsn,
            lane=model_id,
            name=name,
            position=position,
            position_lsn=position_lsn,
            position_count=count,
            kept=tuple(sorted(each for each in before if each < count or each == 1)),
            last_seq=lane.last_seq,
        )

    def _position(self, lane: Lane, position: RequestId) -> tuple[int, int] | None:
        if (outcome := lane.committed.get(position)) is not None:
            return outcome.header.lsn, outcome.header.count
        if lane.snapshot is not None:
            header = lane.snapshot.header
            return (
                (header.position_lsn, header.position_count)
                if header.position == position
                else None
            )
        if lane.created is not None and lane.created.header.request_id == position:
            return lane.created.header.lsn, lane.created.header.count
        return None

    # --- what each record does ---

    def _accepted(self, lane: Lane, entry: Entry) -> None:
        if lane.end is not None:
            return
        lane.accepted[entry.header.request_id] = entry
        lane.bytes += entry.size
        self._hold(entry)
        if entry.header.creates:
            lane.creation = entry

    def _started(self, lane: Lane, entry: Entry) -> None:
        if entry.header.request_id in lane.accepted:
            lane.started.setdefault(entry.header.request_id, []).append(entry)
            self._hold(entry)

    def _redoing(self, lane: Lane, entry: Entry) -> None:
        """A start that has come so far has survived what it did before. The newest stays, lest
        those that it has cleared come back."""
        request_id = entry.header.request_id
        if lane.end is not None:
            return
        self._hold(entry)
        if request_id:
            self._survived(lane, lane.turn(request_id) - 1)
            lane.redoing.setdefault(request_id, []).append(entry)
        else:
            self._survived(lane, maxsize)
            if lane.redone is not None:
                self._release(lane.redone)
            lane.redone = entry

    def _survived(self, lane: Lane, turn: int) -> None:
        for request_id in [each for each in lane.redoing if lane.turn(each) <= turn]:
            for attempt in lane.redoing.pop(request_id):
                self._release(attempt)

    def _committed(self, lane: Lane, entry: Entry) -> None:
        request_id = entry.header.request_id
        self.answers[request_id] = lane.answers[request_id] = entry
        self._hold(entry)
        lane.last_seq = max(lane.last_seq, entry.header.seq_id)
        for attempt in lane.started.pop(request_id, ()):
            self._release(attempt)
        if lane.end is not None:
            return
        self._hold(entry)
        if entry.header.creates:
            lane.created = entry
        else:
            lane.committed[request_id] = entry
            lane.bytes += entry.size

    def _snapshot(self, lane: Lane, entry: Entry) -> None:
        if lane.end is not None:
            return
        header = entry.header
        kept = set(header.kept)
        for request_id, outcome in list(lane.committed.items()):
            if outcome.header.lsn <= header.position_lsn:
                self._leave(lane, lane.committed, request_id)
        for request_id, work in list(lane.accepted.items()):
            if work.header.count < header.position_count and work.header.count not in kept:
                self._leave(lane, lane.accepted, request_id)
        self._survived(lane, 0)  # what it includes has no other turn any more
        if lane.snapshot is not None:
            self._release(lane.snapshot)
        lane.snapshot = entry
        lane.last_seq = max(lane.last_seq, header.last_seq)
        self._hold(entry)

    def _ended(self, lane: Lane, entry: Entry) -> None:
        if lane.end is not None:
            return
        for held in (lane.created, lane.snapshot, lane.damage, lane.redone):
            if held is not None:
                self._release(held)
        self._survived(lane, maxsize)
        for entries in (lane.accepted, lane.committed):
            for request_id in list(entries):
                self._leave(lane, entries, request_id)
        for attempts in lane.started.values():
            for attempt in attempts:
                self._release(attempt)
        lane.started.clear()
        lane.creation = lane.created = lane.snapshot = lane.damage = lane.redone = None
        lane.end = entry
        self._hold(entry)
        for segment in self.segments.values():
            if lane.model_id in segment.lanes:
                segment.erase = True

    def _leave(self, lane: Lane, entries: dict[str, Entry], request_id: str) -> None:
        entry = entries.pop(request_id)
        lane.bytes -= entry.size
        self._release(entry)

    def _hold(self, entry: Entry) -> None:
        entry.holds += 1
        if entry.holds == 1:
            self._give_to(entry)

    def _release(self, entry: Entry) -> None:
        entry.holds -= 1
        if entry.holds == 0:
            self._take_from(entry)

    def _give_to(self, entry: Entry) -> None:
        self.live += entry.size
        if (home := self.segments.get(entry.segment)) is not None:
            home.entries.add(entry)
            home.live += entry.size

    def _take_from(self, entry: Entry) -> None:
        self.live -= entry.size
        if (home := self.segments.get(entry.segment)) is not None:
            home.entries.discard(entry)
            home.live -= entry.size
            home.changed = self.next_lsn
