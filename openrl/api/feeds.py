"""Which of a sampler's samples have been answered: one feed for each of its clients.

A client with thousands of samples in flight reads its feed, instead of holding a request open for
each of them. It gives back the cursor that it got last: what came until then has arrived.

A client that reads a feed asks for nothing else, so one that a restart has made us forget would
wait for ever. Hence a mark in the catalogue, written `BLOCK` samples ahead: between which numbers
samples may be in flight. A later life of the server says of all of those that they failed, and the
client then asks for each by itself, where it learns what became of it. That holds for samples that
were never sent, too, so a mark may be too wide.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from openrl.catalogue import Catalogue, Mark
from openrl.futures import Entry, Futures
from openrl.types import Failed, RequestId, Sample, SamplingSessionId

BLOCK = 256
LOST_AT_ONCE = 4096
"""A mark may be a billion numbers wide, when a client has left out as many: it is told by parts."""

CLONE = 1_000_000_000
"""Samples of a sampler's n-th clone are numbered from n times this, as the SDK does it."""

Name: TypeAlias = tuple[SamplingSessionId, int]


@dataclass(frozen=True, slots=True)
class Told:
    """That a sample has its outcome. `at` is its place in the order of all."""

    at: int
    request_id: RequestId
    failed: bool


@dataclass(slots=True)
class Feed:
    """`awaited`: numbers of samples that were accepted and not yet fetched. `covered`: where the
    mark in the catalogue ends. `lost`: the numbers that may have been in flight when an earlier
    life ended, until the client has heard of that; `lost_at` is the place of those told last.
    `readers` wait for news."""

    awaited: set[int] = field(default_factory=set)
    told: deque[Told] = field(default_factory=deque)
    covered: int = 0
    lost: Sequence[int] = ()
    lost_at: int = 0
    readers: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def idle(self) -> bool:
        return not (self.awaited or self.told or self.lost or self.readers)


class Feeds:
    def __init__(self, futures: Futures, catalogue: Catalogue, now: Callable[[], float]) -> None:
        """`now` gives Unix seconds. Cursors count microseconds from there, so that those of a later
        life are higher, and stay below 2^53."""
        self._futures = futures
        self._catalogue = catalogue
        self._life = self._last = int(now() * 1e6)
        self._feeds: dict[Name, Feed] = {}
        futures.on_resolved(self._resolved)

    def __len__(self) -> int:
        return len(self._feeds)

    def expect(self, sampler: SamplingSessionId, seq_id: int) -> None:
        """Before a sample is accepted: from here on the feed answers for it."""
        name = (sampler, seq_id // CLONE)
        feed = self._feed(name)
        feed.awaited.add(seq_id)
        if seq_id >= feed.covered:
            first = min([*feed.awaited, *feed.lost[:1]])
            feed.covered = max([seq_id, *feed.lost[-1:]]) + BLOCK
            self._catalogue.mark(sampler, Mark(name[1], first, feed.covered, self._life))

    async def read(
        self,
        sampler: SamplingSessionId,
        clone: int,
        cursor: int,
        fetched: Iterable[str],
        seconds: float,
    ) -> tuple[list[Told], int]:
        """What came after `cursor` as soon as there is any, and the cursor to come back with.
        `fetched` are requests whose answers have arrived."""
        name = (sampler, clone)
        feed = self._feed(name)
        mine = cursor if self._life <= cursor <= self._last else 0
        _trim(feed, mine, fetched)
        self._hear(name, feed, mine)
        if not feed.lost:
            await _news(feed, seconds)
        told = [*self._lost(sampler, feed), *feed.told]
        self._forget_if_idle(name, feed)
        return told, max([self._life, mine, *(each.at for each in told)])

    def sweep(self) -> None:
        """Forgets what nobody has fetched until its answer was forgotten."""
        for name, feed in list(self._feeds.items()):
            feed.awaited = {seq for seq in feed.awaited if self._known(name[0], seq)}
            feed.told = deque(each for each in feed.told if self._futures.known(each.request_id))
            self._forget_if_idle(name, feed)

    def _hear(self, name: Name, feed: Feed, cursor: int) -> None:
        """The client has got the part of the lost that was told last; after all of it the mark is
        of this life, so that a feed that is remembered again does not begin anew."""
        if not feed.lost_at or feed.lost_at > cursor:
            return
        feed.lost, feed.lost_at = feed.lost[LOST_AT_ONCE:], 0
        if not feed.lost and not feed.covered:
            self._catalogue.mark(name[0], Mark(name[1], 0, 0, self._life))

    def _lost(self, sampler: SamplingSessionId, feed: Feed) -> Iterator[Told]:
        """The next part of them, or the same again until its place is given back."""
        if feed.lost and not feed.lost_at:
            self._last += 1
            feed.lost_at = self._last
        for seq in feed.lost[:LOST_AT_ONCE]:
            yield Told(feed.lost_at, _request(sampler, seq), failed=True)

    def _feed(self, name: Name) -> Feed:
        feed = self._feeds.get(name)
        if feed is None:
            feed = self._feeds[name] = self._remembered(*name)
        return feed

    def _remembered(self, sampler: SamplingSessionId, clone: int) -> Feed:
        mark = self._catalogue.mark_of(sampler, clone)
        if mark is None:
            return Feed()
        if mark.life == self._life:
            return Feed(covered=mark.beyond)
        return Feed(lost=range(mark.first, mark.beyond))

    def _resolved(self, entry: Entry) -> None:
        if entry.kind != Sample.__name__:
            return
        seq = int(entry.request_id.rpartition(":")[2])
        feed = self._feeds.get((SamplingSessionId(entry.lane), seq // CLONE))
        if feed is not None and seq in feed.awaited:
            self._last += 1
            failed = isinstance(entry.outcome, Failed)
            feed.told.append(Told(self._last, entry.request_id, failed))
            feed.news.set()

    def _known(self, sampler: SamplingSessionId, seq: int) -> bool:
        return self._futures.known(_request(sampler, seq))

    def _forget_if_idle(self, name: Name, feed: Feed) -> None:
        """What it has marked is read again when it is needed."""
        if feed.idle:
            self._feeds.pop(name, None)


def _request(sampler: SamplingSessionId, seq: int) -> RequestId:
    return RequestId(f"{sampler}:{seq}")


def _trim(feed: Feed, cursor: int, fetched: Iterable[str]) -> None:
    while feed.told and feed.told[0].at <= cursor:
        feed.told.popleft()
    for request_id in fetched:
        number = request_id.rpartition(":")[2]
        if number.isdecimal():
            feed.awaited.discard(int(number))


async def _news(feed: Feed, seconds: float) -> None:
    if feed.told or seconds <= 0:
        return
    feed.news.clear()
    feed.readers += 1
    try:
        async with asyncio.timeout(seconds):
            await feed.news.wait()
    except TimeoutError:
        return
    finally:
        feed.readers -= 1
