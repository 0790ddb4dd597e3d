"""Every experiment of a study, in SQLite: what was tried, what came of it, what was decided."""

from __future__ import annotations

import json
import secrets
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS experiments (
    number INTEGER PRIMARY KEY,
    change TEXT NOT NULL,
    settings TEXT NOT NULL,
    source TEXT NOT NULL,
    decision TEXT NOT NULL,
    because TEXT NOT NULL DEFAULT '',
    started REAL NOT NULL,
    ended REAL,
    engine_seconds REAL,
    search TEXT NOT NULL DEFAULT '[]',
    validation TEXT NOT NULL DEFAULT '[]',
    p_value REAL,
    bar REAL,
    checkpoint TEXT
);
"""
RUNNING, KEPT, DISCARDED, PRUNED = "running", "kept", "discarded", "pruned"
REFUSED, FAILED, OVER_BUDGET, LOST = "refused", "failed", "over budget", "lost"


@dataclass(frozen=True)
class Experiment:
    """`search` has a score for each rung, `validation` one for each question. `source` is the
    editable file as it was run. An experiment is kept when `p_value` is at most `bar`."""

    number: int
    change: str
    settings: dict[str, Any]
    source: str
    decision: str = RUNNING
    because: str = ""
    started: float = 0.0
    ended: float | None = None
    engine_seconds: float | None = None
    search: Sequence[float] = field(default=())
    validation: Sequence[float] = field(default=())
    p_value: float | None = None
    bar: float | None = None
    checkpoint: str | None = None

    @property
    def mean(self) -> float | None:
        return sum(self.validation) / len(self.validation) if self.validation else None


_JSON = ("settings", "search", "validation")


class Ledger:
    """One writer. Opened again, what was running when it was closed is `lost`."""

    def __init__(self, file: Path) -> None:
        self._database = sqlite3.connect(file, isolation_level=None)
        self._database.row_factory = sqlite3.Row
        self._database.executescript(_SCHEMA)
        self._database.execute(
            "UPDATE experiments SET decision = ?, because = ? WHERE decision = ?",
            (LOST, "research was interrupted", RUNNING),
        )

    def close(self) -> None:
        self._database.close()

    def fact(self, name: str, value: str | None = None) -> str | None:
        """What was first said of `name` stays."""
        if value is not None:
            self._database.execute("INSERT OR IGNORE INTO facts VALUES (?, ?)", (name, value))
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row["value"] if row else None

    def salt(self) -> str:
        """What the splits' questions are drawn by: experiments don't know it."""
        salt = self.fact("salt", secrets.token_hex(8))
        assert salt is not None
        return salt

    def put(self, experiment: Experiment) -> None:
        row = {
            name: json.dumps(value) if name in _JSON else value
            for name, value in vars(experiment).items()
        }
        marks = ", ".join(f":{name}" for name in row)
        self._database.execute(
            f"INSERT OR REPLACE INTO experiments ({', '.join(row)}) VALUES ({marks})",  # noqa: S608
            row,
        )

    def experiments(self) -> list[Experiment]:
        rows = self._database.execute("SELECT * FROM experiments ORDER BY number")
        return [
            Experiment(**{n: json.loads(row[n]) if n in _JSON else row[n] for n in row.keys()})  # noqa: SIM118
            for row in rows
        ]

    def spent(self) -> float:
        """Engine-seconds of all experiments and what judged them."""
        (spent,) = self._database.execute(
            "SELECT COALESCE(SUM(engine_seconds), 0) FROM experiments"
        ).fetchone()
        return float(spent)

    def best(self) -> Experiment | None:
        """The one kept last; the defaults are kept first."""
        kept = [each for each in self.experiments() if each.decision == KEPT]
        return max(kept, key=lambda each: each.ended or 0.0) if kept else None

    def judged(self) -> int:
        """How many have been held against the best one on the validation split."""
        return sum(each.bar is not None for each in self.experiments())
