"""Counts of what passes and requests were like, for histograms, and the last hour of the engine."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from openrl.scheduler.core.events import Kind
from openrl.scheduler.core.packing import PassKind

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
WAITS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TOKENS = (16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 65536.0)
COMPANY = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)
FILLED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

SLICE_SECONDS = 10
HOUR = 3600


class Tally:
    """A histogram: `counts[i]` values were at most `bounds[i]` and above the bound before it; the
    last count is of those above all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class PassTally:
    """All passes of one kind. `jobs` counts the lanes in a pass, `filled` its tokens as a part
    of the budget of tokens (of training passes alone)."""

    seconds: Tally = field(default_factory=lambda: Tally(SECONDS))
    tokens: Tally = field(default_factory=lambda: Tally(TOKENS))
    jobs: Tally = field(default_factory=lambda: Tally(COMPANY))
    requests: Tally = field(default_factory=lambda: Tally(COMPANY))
    filled: Tally = field(default_factory=lambda: Tally(FILLED))


@dataclass(slots=True)
class Slice:
    """Engine seconds by kind in the `SLICE_SECONDS` that begin at `start`."""

    start: float
    busy: dict[PassKind, float] = field(default_factory=dict)
    tokens: int = 0


class Tallies:
    """`hour` holds the slices in which something ran, oldest first; times are the core's."""

    def __init__(self) -> None:
        self.passes: dict[PassKind, PassTally] = {}
        self.waits: dict[Kind, Tally] = {}
        self.hour: deque[Slice] = deque(maxlen=HOUR // SLICE_SECONDS + 1)

    def ran(self, kind: PassKind, tokens: int, jobs: int, requests: int) -> PassTally:
        """Counts a pass but for its time; returns the tally of its kind."""
        tally = self.passes.setdefault(kind, PassTally())
        tally.tokens.add(tokens)
        tally.jobs.add(jobs)
        tally.requests.add(requests)
        return tally

    def worked(self, kind: PassKind, start: float, seconds: float, tokens: int) -> None:
        """Measured seconds, laid out from `start` over the slices that they reach into."""
        self.passes.setdefault(kind, PassTally()).seconds.add(seconds)
        for at, part in _parts(start, seconds):
            one = self._slice(at)
            one.busy[kind] = one.busy.get(kind, 0.0) + part
        self._slice(start + seconds).tokens += tokens

    def waited(self, kind: Kind, seconds: float) -> None:
        self.waits.setdefault(kind, Tally(WAITS)).add(seconds)

    def _slice(self, at: float) -> Slice:
        start = at - at % SLICE_SECONDS
        for one in reversed(self.hour):
            if one.start <= start:
                break
        else:
            one = None
        if one is None or one.start < start:
            one = Slice(start)
            self.hour.append(one)
        return one


def _parts(start: float, seconds: float) -> Iterator[tuple[float, float]]:
    """Pieces (at, length) of an interval, cut where slices meet. What is longer than an hour is
    cut off: nobody sees more of it."""
    end = start + seconds
    at = max(start, end - HOUR)
    while at < end:
        until = min(end, at - at % SLICE_SECONDS + SLICE_SECONDS)
        yield at, until - at
        at = until
