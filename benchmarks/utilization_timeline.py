"""What a timeline of passes says about a stretch of time. Pure: records in, figures out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pass:
    """One pass as `GET openrl/statistics` tells it. `start` and `end` are the scheduler's, in
    seconds on one clock; `seconds` is what the engine measured of it. `tokens` hold the
    `prefilled` ones. `rows` are the sequences of a slice, `lanes` how many models shared it,
    `waits` the seconds that those had waited which it served first."""

    kind: str
    start: float
    end: float
    seconds: float
    tokens: int
    prefilled: int = 0
    rows: int = 0
    lanes: int = 1
    waits: tuple[float, ...] = ()

    @property
    def sampled(self) -> int:
        return self.tokens - self.prefilled if self.kind == "sample" else 0

    @property
    def trained(self) -> int:
        return self.tokens if self.kind == "train" else 0

    def part(self, begin: float, end: float) -> float:
        """Which part of the pass lies in that stretch of time."""
        if self.end <= self.start:
            return float(begin <= self.start < end)
        overlap = min(self.end, end) - max(self.start, begin)
        return max(0.0, overlap) / (self.end - self.start)


def pass_of(record: Mapping[str, Any]) -> Pass:
    return Pass(
        record["kind"],
        record["start"],
        record["end"],
        record["seconds"],
        record["tokens"],
        record["prefilled"],
        record["rows"],
        len(record["lanes"]),
        tuple(record["waits"]),
    )


@dataclass(frozen=True)
class Figures:
    """Of a stretch of `wall` seconds. `busy` is the engine's seconds, `busy_by_kind` its parts;
    `sampled` and `trained` are tokens; what began before or ended after counts in part.
    `between` is the time that passes were under way without the engine computing: on the way
    there and back. `jobs` is how many models shared a pass of each kind, by engine time."""

    wall: float
    busy: float
    between: float
    sampled: float
    trained: float
    passes: Mapping[str, int]
    busy_by_kind: Mapping[str, float]
    jobs: Mapping[str, float]
    wait_p50: float
    wait_p95: float

    @property
    def busy_fraction(self) -> float:
        return self.busy / self.wall

    @property
    def tokens_per_busy_second(self) -> float:
        return (self.sampled + self.trained) / self.busy if self.busy else 0.0


def figures(passes: Iterable[Pass], begin: float, end: float) -> Figures:
    inside = [(one, part) for one in passes if (part := one.part(begin, end)) > 0.0]
    kinds = sorted({one.kind for one, _ in inside})
    busy = {k: sum(one.seconds * part for one, part in inside if one.kind == k) for k in kinds}
    jobs = {
        kind: sum(one.lanes * one.seconds * part for one, part in inside if one.kind == kind)
        / max(busy[kind], 1e-12)
        for kind in kinds
    }
    waits = [wait for one, _ in inside if begin <= one.start < end for wait in one.waits]
    return Figures(
        wall=end - begin,
        busy=sum(busy.values()),
        between=sum(max(0.0, p.end - p.start - p.seconds) * part for p, part in inside),
        sampled=sum(one.sampled * part for one, part in inside),
        trained=sum(one.trained * part for one, part in inside),
        passes={k: sum(one.kind == k for one, _ in inside) for k in kinds},
        busy_by_kind=busy,
        jobs=jobs,
        wait_p50=quantile(waits, 0.5),
        wait_p95=quantile(waits, 0.95),
    )


def quantile(values: Sequence[float], part: float) -> float:
    """The smallest value that at least this part of them don't exceed; 0 of none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[max(0, -int(-part * len(ordered) // 1) - 1)]


def goodput(sampled: float, trained: float, wall: float, rates: tuple[float, float]) -> float:
    """(sampled / R_s + trained / R_t) / wall: 1 is an engine that does, all the time, as much as
    one job alone could have it do. Fused passes may do more."""
    return (sampled / rates[0] + trained / rates[1]) / wall
