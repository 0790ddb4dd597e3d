"""Who is expected back, and how long a head is held for them.

Loops whose steps one pass has answered come back within milliseconds of each other. The first to
come would find the engine idle and run alone, the others together after it: two passes where one
would do. So a head may be held for a moment. The rules, each held by a test:

- it is held for lanes alone that will probably come in time: each lane's absence has a mean and
  a mean deviation, estimated as TCP does round trips (RFC 6298), and one deviation after the mean
  must be within the hold; a lane later than `PATIENCE` deviations is waited for no more;
- for no longer than one pass fewer saves, by the cost model, nor than `scheduler.hold_seconds`,
  counted from the first hold to the next pass over these base weights;
- never when the engine has other work: what else is ready starts at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from sortedcontainers import SortedList  # type: ignore[import-untyped]

from openrl.engines.base import WeightsKey
from openrl.scheduler.core.requests import Request

PATIENCE = 4.0
"""Mean deviations beyond the mean: RFC 6298's K."""

FAR = 4.0
"""An absence of more than so many times the longest hold is a pause, which says nothing about the
habit: an evaluation, a checkpoint."""

DOUBT = 2
"""How often a lane must come back without a pause, after one, to be expected again."""

_MEAN, _SPREAD = 1 / 8, 1 / 4  # the gains of RFC 6298


class Due(NamedTuple):
    """When a lane has probably come, and until when it is expected."""

    probably: float
    latest: float
    lane: str


@dataclass(slots=True)
class Habit:
    """How long a lane stays away after its last answer, in seconds; `mean` is None before the
    first return, `doubt` counts down after a pause. `due` is its entry among those that are
    expected over `weights`."""

    mean: float | None = None
    spread: float = 0.0
    doubt: int = 0
    away_since: float | None = None
    due: Due | None = None
    weights: WeightsKey | None = None

    def learn(self, absence: float) -> None:
        if self.mean is None:
            self.mean, self.spread = absence, absence / 2
            return
        self.spread += _SPREAD * (abs(absence - self.mean) - self.spread)
        self.mean += _MEAN * (absence - self.mean)


@dataclass(frozen=True, slots=True)
class Hold:
    """The head, and those that are ready with it, are held until then at most, for `lanes`;
    `first` when it has just begun."""

    head: Request
    until: float
    lanes: tuple[str, ...]
    first: bool


class Company:
    def __init__(self, most_seconds: float) -> None:
        """0 holds nothing."""
        self._most = most_seconds
        self._due: dict[WeightsKey, SortedList] = {}  # of Due
        self._since: dict[WeightsKey, float] = {}

    # --- habits ---

    def left(self, name: str, habit: Habit, weights: WeightsKey, now: float) -> None:
        """The lane has nothing any more: its last request has been answered."""
        habit.away_since = now
        if habit.mean is None or habit.mean > self._most or habit.doubt:
            return
        probably, latest = habit.mean + habit.spread, habit.mean + PATIENCE * habit.spread
        habit.due, habit.weights = Due(now + probably, now + latest, name), weights
        self._due.setdefault(weights, SortedList()).add(habit.due)

    def came(self, habit: Habit, now: float) -> None:
        """Something came to a lane."""
        if habit.away_since is not None:
            absence, habit.away_since = now - habit.away_since, None
            if absence > FAR * self._most:
                habit.doubt = DOUBT
            else:
                habit.doubt = max(0, habit.doubt - 1)
                habit.learn(absence)
        self.forget(habit)

    def forget(self, habit: Habit) -> None:
        """The lane is not expected any more."""
        if habit.due is not None and habit.weights is not None:
            self._due[habit.weights].discard(habit.due)
            habit.due = None

    # --- holding ---

    def hold(self, head: Request, worth: float, now: float) -> Hold | None:
        """Whether to hold the heads of an otherwise idle engine; None when nobody is due that
        is worth it. `worth` is the seconds that one pass fewer saves."""
        weights = head.item.weights
        first = weights not in self._since
        since = self._since.get(weights, now)
        end = since + min(worth, self._most)
        due = self._due_until(weights, now, end)
        if now >= end or not due:
            return None
        self._since[weights] = since
        until = min(end, max(one.latest for one in due))
        return Hold(head, until, tuple(one.lane for one in due), first)

    def started(self, weights: WeightsKey, now: float) -> float:
        """For how many seconds the heads of a pass that starts have been held."""
        return now - self._since.pop(weights, now)

    def _due_until(self, weights: WeightsKey, now: float, end: float) -> list[Due]:
        """Who will probably have come by `end`, soonest first. Who is late is forgotten."""
        queue = self._due.get(weights, SortedList())
        due = list(queue[: queue.bisect_right(Due(end, inf, ""))])
        for late in (one for one in due if one.latest <= now):
            queue.remove(late)
        return [one for one in due if one.latest > now]
