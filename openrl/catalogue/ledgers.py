"""Two ledgers beside the catalogue's rows: what owners did, and what they used."""

from __future__ import annotations

import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from openrl.types import OwnerId

log = logging.getLogger("openrl")

UsageKind: TypeAlias = Literal["training", "prefill", "prefill_cached", "sampled", "checkpoint"]

HOUR = 3600
KEPT_SECONDS = 90 * 24 * HOUR
"""Audit entries older than this are forgotten."""


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """`at` is in Unix seconds; `event` is `{resource}_{action}`."""

    at: float
    event: str
    details: Mapping[str, str]


class AuditLog:
    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql

    def add(self, owner: OwnerId, at: float, event: str, **details: str) -> None:
        """On a full disk the entry is lost to the log: what it tells of has happened."""
        entry = (owner, at, event, json.dumps(details))
        try:
            self._sql.execute("INSERT INTO audit VALUES (?, ?, ?, ?)", entry)
        except sqlite3.Error as error:
            log.error("not in the audit log (%s): %s", error, entry)

    def between(
        self, owner: OwnerId, start: float, end: float, resource: str | None = None
    ) -> tuple[AuditEntry, ...]:
        """Oldest first, `end` excluded; `resource` None means all."""
        rows = self._sql.execute(
            "SELECT at, event, details FROM audit WHERE owner = ? AND at >= ? AND at < ?"
            " AND event GLOB ? ORDER BY at, rowid",
            (owner, start, end, "*" if resource is None else f"{resource}_*"),
        )
        return tuple(AuditEntry(at, event, json.loads(details)) for at, event, details in rows)

    def forget(self, now: float) -> None:
        """A few at a time, so that it takes no longer when there is much."""
        self._sql.execute(
            "DELETE FROM audit WHERE at < ? AND rowid IN"
            " (SELECT rowid FROM audit ORDER BY rowid LIMIT 1000)",
            (now - KEPT_SECONDS,),
        )


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is counted together; `hour` is its start in Unix seconds."""

    owner: OwnerId
    hour: int
    session: str
    base_model: str
    kind: UsageKind


class UsageLedger:
    """Tokens and checkpoints by hour. Counted in memory and written now and then: the crash of
    the process loses what was counted since."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql
        self._counted: Counter[Bucket] = Counter()

    def count(self, bucket: Bucket, amount: int) -> None:
        if amount:
            self._counted[bucket] += amount

    def write(self) -> None:
        """What a full disk does not take stays counted."""
        for b, amount in list(self._counted.items()):
            self._sql.execute(
                "INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE"
                " SET amount = amount + excluded.amount",
                (b.owner, b.hour, b.session, b.base_model, b.kind, amount),
            )
            del self._counted[b]

    def between(self, owner: OwnerId, start: float, end: float) -> tuple[tuple[Bucket, int], ...]:
        """By hour, then the largest first; hours that begin in [start, end)."""
        self.write()
        rows = self._sql.execute(
            "SELECT hour, session, base_model, kind, amount FROM usage WHERE owner = ?"
            " AND hour >= ? AND hour < ? ORDER BY hour, amount DESC",
            (owner, start, end),
        )
        return tuple((Bucket(owner, h, s, b, k), amount) for h, s, b, k, amount in rows)


def hour_of(at: float) -> int:
    return int(at) // HOUR * HOUR
