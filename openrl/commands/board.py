"""What `openrl top` shows, made of the events of a dashboard's stream. Pure.

Shares, rates and busy time are of the last `WINDOW` seconds of passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

WINDOW = 10.0
CLOCK = "clock"
"""The event that ends a turn."""


@dataclass(frozen=True, slots=True)
class Pass:
    """`parts`: seconds of the engine by job."""

    kind: str
    start: float
    end: float
    seconds: float
    tokens: int
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Row:
    """One job. `share` is of the engine's time that was used."""

    job: str
    owner: str
    name: str
    models: tuple[str, ...]
    share: float
    seconds: float
    tokens: int | None
    waiting: int
    why: str


@dataclass(frozen=True, slots=True)
class Picture:
    """`busy`: the share of the window in which the engine computed, by kind of pass."""

    rows: tuple[Row, ...]
    busy: Mapping[str, float]
    tokens_per_second: float
    waiting: int
    running: int
    models: tuple[str, ...]
    trouble: str


class Board:
    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self._sections: dict[str, Any] = {}
        self._now = 0.0

    def take(self, event: str, value: Any) -> None:
        """What it does not know it leaves out: the server may be newer."""
        if event == "passes":
            self._passes += [_pass(each) for each in value]
        elif event in ("engine", "jobs"):
            self._sections[event] = value
        elif event in (CLOCK, "hello"):
            self._now = value["clock"]
            self._passes = [each for each in self._passes if each.end > self._now - WINDOW]

    def picture(self) -> Picture:
        engine = self._sections.get("engine", {})
        used: dict[str, float] = {}
        busy: dict[str, float] = {}
        tokens = 0.0
        for each in self._passes:
            inside = self._inside(each)
            busy[each.kind] = busy.get(each.kind, 0.0) + each.seconds * inside / WINDOW
            tokens += each.tokens * inside
            for job, seconds in each.parts.items():
                used[job] = used.get(job, 0.0) + seconds * inside
        together = sum(used.values()) or 1.0
        jobs = self._sections.get("jobs", {}).get("jobs", [])
        rows = [_row(job, used.get(job["id"], 0.0) / together) for job in jobs]
        return Picture(
            rows=tuple(sorted(rows, key=lambda row: (-row.share, -row.waiting, row.job))),
            busy=busy,
            tokens_per_second=tokens / WINDOW,
            waiting=engine.get("waiting", 0),
            running=engine.get("running", 0),
            models=tuple(_model(each) for each in engine.get("models", ())),
            trouble=engine.get("trouble") or "",
        )

    def _inside(self, given: Pass) -> float:
        """Which part of a pass lies in the window."""
        length = given.end - given.start
        return min(1.0, (given.end - (self._now - WINDOW)) / length) if length > 0 else 1.0


def events(lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Of a stream as the server writes it: a name and one line of JSON each."""
    name = ""
    for line in lines:
        field, _, value = line.decode().rstrip("\n").partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def _pass(given: list[Any]) -> Pass:
    _, kind, start, end, seconds, tokens, _, parts = given
    return Pass(kind, start, end, seconds, tokens, dict(parts))


def _row(job: Mapping[str, Any], share: float) -> Row:
    waits = job.get("waits", ())
    return Row(
        job=job["id"],
        owner=job["owner"],
        name=job.get("name", ""),
        models=tuple(f"{each['base']} r{each['rank']}" for each in job.get("models", ())),
        share=share,
        seconds=job["seconds"],
        tokens=job.get("tokens"),
        waiting=sum(each["count"] for each in waits),
        why="; ".join(dict.fromkeys(f"{each['kind']}: {each['why']}" for each in waits)),
    )


def _model(given: Mapping[str, Any]) -> str:
    if given["state"] != "loading":
        return f"{given['name']} {given['state']}"
    return f"{given['name']} {given['stage']} {100 * given['fraction']:.0f}%"
