"""What happened: who used the engine, pass by pass and in sum, and each request's history."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from openrl.engines.base import WeightsKey
from openrl.scheduler.core.company import Hold
from openrl.scheduler.core.events import Finished, Kind, PassId
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.packing import PassKind
from openrl.scheduler.core.passes import Flight
from openrl.scheduler.core.settlement import Part
from openrl.scheduler.core.tallies import Tallies
from openrl.types import RequestId

TIMELINE = 4096
STORY = 16384
ACCOUNTS = 4096
"""How many lanes, sessions and owners have an account; those go that did nothing for longest."""

QUEUED = "queued"
"""What the first line of every request says."""

LEVELS = ("lane", "session", "owner")


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One finished pass. `seconds` is measured engine time, `who` are owners, `requests` those
    that had a part in it. `tokens` hold the `prefilled` ones, of prompts and of rows that came
    back; `rows` are the sequences of a slice. `waits` are the seconds from acceptance to this pass,
    of each request that it is the first to serve; `used` the engine seconds that each of `lanes`
    is charged."""

    pass_id: PassId
    kind: PassKind
    weights: WeightsKey
    start: float
    end: float
    seconds: float
    tokens: int
    who: tuple[str, ...]
    lanes: tuple[str, ...]
    requests: int
    prefilled: int
    rows: int
    waits: tuple[float, ...]
    used: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Account:
    """Sums since the start: engine seconds, tokens trained and sampled (prompts included),
    requests answered, and the seconds that they waited for their first service."""

    engine_seconds: float = 0.0
    tokens: int = 0
    requests: int = 0
    wait_seconds: float = 0.0


@dataclass(slots=True)
class Sums:
    """An account that is being written; `used` orders accounts by when that was last."""

    used: int
    engine_seconds: float = 0.0
    tokens: int = 0
    requests: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StoryLine:
    """`at` is seconds on the core's clock."""

    at: float
    lane: str
    request_id: RequestId | None
    what: str


class Chronicle:
    def __init__(self, pass_tokens: int) -> None:
        """`pass_tokens` is what a full training pass holds."""
        self._pass_tokens = pass_tokens
        self.timeline: deque[PassRecord] = deque(maxlen=TIMELINE)
        self._sums: dict[str, dict[str, Sums]] = {level: {} for level in LEVELS}
        self._uses = 0
        self.passes: dict[PassKind, int] = {}
        self.engine_seconds = 0.0
        self.mean_seconds = 0.0
        self.idle_runnable_seconds = 0.0
        self.holds = 0
        self.held_seconds = 0.0
        self._lines: deque[StoryLine] = deque(maxlen=STORY)
        self.tallies = Tallies()

    def tell(self, at: float, lane: str, request_id: RequestId | None, what: str) -> None:
        self._lines.append(StoryLine(at, lane, request_id, what))

    def story(self, lane: str) -> tuple[StoryLine, ...]:
        return tuple(line for line in self._lines if line.lane == lane)

    def stories(self, prefix: str) -> tuple[StoryLine, ...]:
        """Of all lanes whose names begin so, oldest first."""
        return tuple(line for line in self._lines if line.lane.startswith(prefix))

    def of_request(self, request_id: RequestId) -> tuple[StoryLine, ...]:
        """From `queued` on, oldest first; as far back as is kept."""
        found: list[StoryLine] = []
        for line in reversed(self._lines):
            if line.request_id == request_id:
                found.append(line)
                if line.what == QUEUED:
                    break
        return tuple(reversed(found))

    def held(self, hold: Hold | None, now: float) -> None:
        if hold is not None and hold.first:
            seconds = hold.until - now
            what = f"held for at most {seconds * 1e3:.0f} ms: models due are {len(hold.lanes)}"
            self.tell(now, hold.head.item.lane, hold.head.id, what)

    def started(self, flight: Flight) -> None:
        self.holds += flight.held > 0.0
        self.held_seconds += flight.held
        for request, count in Counter(flight.parts).items():
            what = f"pass {flight.id}: {count} of {request.parts} parts"
            self.tell(flight.started, request.item.lane, request.id, what)
        for row in flight.prefills:
            lane = flight.rows[row].share.name
            self.tell(flight.started, lane, row.request_id, f"pass {flight.id}: row {row.sample}")
        for out in flight.preempted:
            what = f"pass {flight.id}: row {out.id.sample} makes room"
            self.tell(flight.started, out.share.name, out.id.request_id, what)

    def idled(self, seconds: float) -> None:
        """The engine computed nothing although something was ready."""
        self.idle_runnable_seconds += seconds

    def used(self, leaf: Share, seconds: float, tokens: int) -> None:
        for sums in self._sums_of(leaf):
            sums.engine_seconds += seconds
            sums.tokens += tokens

    def answered(self, leaf: Share, kind: Kind, wait: float) -> None:
        self.tallies.waited(kind, wait)
        for sums in self._sums_of(leaf):
            sums.requests += 1
            sums.wait_seconds += wait

    def accounts(self) -> dict[tuple[str, str], Account]:
        """By level and name: ("owner", …), ("session", …), ("lane", …)."""
        return {
            (level, name): Account(s.engine_seconds, s.tokens, s.requests, s.wait_seconds)
            for level, book in self._sums.items()
            for name, s in book.items()
        }

    def _sums_of(self, leaf: Share) -> Iterator[Sums]:
        self._uses += 1
        for level, (node, _) in zip(LEVELS, leaf.path, strict=True):
            book = self._sums[level]
            if (sums := book.get(node.name)) is None:
                sums = book[node.name] = Sums(self._uses)
                if len(book) > ACCOUNTS:
                    _forget_idle(book)
            sums.used = self._uses
            yield sums

    def record(
        self, flight: Flight, event: Finished, parts: Mapping[Share, Part], now: float
    ) -> None:
        kind = flight.group[1]
        requests = {request.id for request in flight.parts} | {r.request_id for r in flight.rows}
        tokens = sum(part.tokens for part in parts.values())
        leaves = sorted(parts, key=lambda leaf: leaf.name)
        self.timeline.append(
            PassRecord(
                flight.id,
                kind,
                flight.group[0],
                flight.started,
                now,
                event.seconds,
                tokens,
                tuple(sorted({leaf.owner.name for leaf in parts})),
                tuple(leaf.name for leaf in leaves),
                len(requests),
                sum(flight.prefills.values()),
                len(flight.rows),
                flight.waits,
                tuple(parts[leaf].seconds for leaf in leaves),
            )
        )
        tally = self.tallies.ran(kind, tokens, len(parts), len(requests))
        if kind == "train":
            tally.filled.add(tokens / self._pass_tokens)
        self.tallies.worked(kind, now - event.seconds, event.seconds, tokens)
        self.idled(max(0.0, now - flight.started - event.seconds))
        self.passes[kind] = self.passes.get(kind, 0) + 1
        self.engine_seconds += event.seconds
        weight = 0.1 if self.mean_seconds else 1.0
        self.mean_seconds += weight * (event.seconds - self.mean_seconds)


def _forget_idle(book: dict[str, Sums]) -> None:
    """An eighth of the accounts at once, so that looking for them costs each new one little."""
    for name in sorted(book, key=lambda name: book[name].used)[: max(1, len(book) // 8)]:
        del book[name]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of one moment. `accounts` as in `Chronicle.accounts`.

    `idle_runnable_seconds`: how long the engine computed nothing while accepted work could have
    run: on the way to the engine and back, or held. What is on its way to the scheduler is not
    in it. `holds` are the passes whose heads were held for company, `held_seconds` for how long."""

    engine_ready: bool
    lanes: int
    requests_waiting: int
    requests_running: int
    rows_running: int
    rows_preempted: int
    passes: Mapping[PassKind, int]
    engine_seconds: float
    idle_runnable_seconds: float
    holds: int
    held_seconds: float
    accounts: Mapping[tuple[str, str], Account]
