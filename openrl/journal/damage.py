"""Whom damage concerns. What cannot be told apart is blamed on more models, never on fewer.

A record whose header can be read says itself whose it is. One that is gone leaves a hole in the
numbers of its lane, as later records, marks and the census show them. Where none of these is
left, all models are blamed that may have had a record there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from openrl.journal.index import Index
from openrl.journal.lanes import Entry, Lane
from openrl.journal.reading import Contents, File, Region
from openrl.journal.segments import Opening


class Damage:
    """`index` has been fed with the `entries`, each once and in the order of lsn."""

    def __init__(self, contents: Contents, index: Index, entries: Sequence[Entry]) -> None:
        self._index = index
        self._regions = contents.regions
        self._counts: dict[str, set[int]] = {}
        self._newest: dict[str, int] = {}
        for entry in entries:
            self._counts.setdefault(entry.header.lane, set()).add(entry.header.count)
            self._newest[entry.header.lane] = entry.header.lsn
        self._opened, self._opening = _latest_opening(contents.files)
        self._told = self._numbers_told(contents.files)
        for name in self._told:
            index.lane(name)  # all that is left of it may be its number
        self._blamed = set(self._perhaps_in_regions(contents))

    def of(self, lane: Lane) -> str | None:
        """What a living model lost. What an earlier start found is remembered: the holes may have
        been cleaned away since."""
        if lane.damage is not None:
            return lane.damage.header.name
        if unsound := [entry for entry in _needed(lane) if not entry.sound]:
            entry = unsound[0]
            return (
                f"record {entry.header.lsn} ({entry.header.kind} {entry.header.request_id}) cannot "
                f"be read at byte {entry.offset} of segment {entry.segment}"
            ) + _more(len(unsound) - 1)
        if missing := self._missing(lane):
            return f"record {missing[0]} of the model is missing{_more(len(missing) - 1)}" + (
                self._where()
            )
        if lane.creation is None:
            return f"the model's creation is missing{self._where()}"
        if lane.model_id in self._blamed:
            return f"the model's newest records may be missing{self._where()}"
        return None

    def elsewhere(self) -> str | None:
        """What may have been of nobody who is still here."""
        lost = [name for name, entry in self._index.answers.items() if not entry.sound]
        if lost:
            return f"the answer to {lost[0]} cannot be read{_more(len(lost) - 1)}"
        return f"{self._regions[0]} cannot be read" if self._regions else None

    def _numbers_told(self, files: Sequence[File]) -> dict[str, int]:
        """The newest number of each lane that marks or the newest census speak of. Older ones
        speak of models that have ended, too."""
        told = dict(self._opening.census) if self._opening else {}
        for file in files:
            for name, count in file.counts.items():
                if file.name.number >= self._opened or name in self._index.lanes:
                    told[name] = max(told.get(name, 0), count)
        return told

    def _missing(self, lane: Lane) -> list[int]:
        count = max(lane.count, self._told.get(lane.model_id, 0))
        needed = set(range(1, count + 1))
        if lane.snapshot is not None:
            header = lane.snapshot.header
            needed = {*header.kept, *range(header.position_count + 1, count + 1)}
        return sorted(needed - self._counts.get(lane.model_id, set()))

    def _perhaps_in_regions(self, contents: Contents) -> Iterator[str]:
        alive = [name for name, lane in self._index.lanes.items() if lane.end is None]
        for region in contents.regions:
            newest_before = max(
                (
                    entry.header.lsn
                    for entry in contents.entries
                    if (entry.segment, entry.offset) < (region.segment, region.offset)
                ),
                default=0,
            )
            for name in alive:
                if not self._is_told(name, region, newest_before):
                    yield name

    def _is_told(self, name: str, region: Region, newest_before: int) -> bool:
        """Something behind the region says how many records the lane had."""
        newest = self._newest.get(name, 0)
        if self._opening is not None and region.segment < self._opened:
            return name in self._opening.census or newest >= self._opening.lsn
        return region.counted or newest > newest_before

    def _where(self) -> str:
        return f" ({self._regions[0]} cannot be read)" if self._regions else ""


def _latest_opening(files: Sequence[File]) -> tuple[int, Opening | None]:
    readable = [(each.name.number, each.opening) for each in files if each.opening is not None]
    return readable[-1] if readable else (0, None)


def _needed(lane: Lane) -> Iterator[Entry]:
    yield from (entry for entry in (lane.created, lane.snapshot) if entry is not None)
    yield from lane.accepted.values()
    yield from lane.committed.values()
    # An answer that is kept is not needed to go on, but it was promised.
    yield from lane.answers.values()


def _more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""
