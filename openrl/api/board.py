"""What the dashboard shows, for one who looks: jobs, passes, curves, memory.

A job is a session: its models and samplers together. One's own jobs have names; others' are
shares under a name that means nothing and lasts until the server restarts. An administrator
sees all names.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from openrl.api.services import Services
from openrl.keys import Holder
from openrl.scheduler.core.story import Account, PassRecord, Statistics
from openrl.scheduler.core.tallies import SLICE_SECONDS, Slice
from openrl.scheduler.curves import Point
from openrl.scheduler.enquiries import Memory, Waiting
from openrl.scheduler.models import Model

Plain: TypeAlias = dict[str, Any]

JOBS = 200
"""The most that are listed: those that came last."""

FRESH_SECONDS = 0.5
"""How old the facts may be that several who look share."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One moment, `at` seconds on the core's clock."""

    at: float
    statistics: Statistics
    waiting: Sequence[Waiting]
    memory: Memory


class Board:
    """`boot` names this life of the server: numbers of passes and points begin anew with it."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._secret = secrets.token_bytes(16)
        self._facts: Facts | None = None
        self.boot = secrets.token_hex(4)

    def view(self, holder: Holder) -> View:
        return View(self._services, holder, self._alias, self.facts)

    def facts(self) -> Facts:
        enquiries = self._services.enquiries
        now = enquiries.now()
        if self._facts is None or now - self._facts.at > FRESH_SECONDS:
            self._facts = Facts(
                now, enquiries.statistics(), enquiries.waiting(), enquiries.memory()
            )
        return self._facts

    def _alias(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()[:6]


class View:
    def __init__(
        self,
        services: Services,
        holder: Holder,
        alias: Callable[[str], str],
        facts: Callable[[], Facts],
    ) -> None:
        self._services = services
        self._holder = holder
        self._alias = alias
        self._facts = facts

    # --- who is who ---

    def sees(self, owner: str) -> bool:
        return self._holder.admin or owner == self._holder.owner

    def owner_name(self, owner: str) -> str:
        return owner if self.sees(owner) else f"other-{self._alias(owner)}"

    def job_name(self, session_id: str) -> str:
        session = self._services.catalogue.find_session(session_id)
        if session is not None and self.sees(session.owner):
            return session_id
        return f"other-{self._alias(session_id)}"

    # --- what changes from second to second ---

    def sections(self) -> dict[str, Plain]:
        """Each is sent when it has changed."""
        facts = self._facts()
        return {
            "engine": self._engine(facts.statistics),
            "jobs": {"jobs": self._jobs(facts)},
            "memory": self._memory(facts.memory),
        }

    def clock(self) -> Plain:
        """The clock of passes, and Unix seconds at the same moment."""
        return {"clock": self._services.enquiries.now(), "unix": self._services.clock()}

    def hour(self, since: float) -> list[list[Any]]:
        """Start, busy seconds by kind, tokens: the slices of the last hour that end after it."""
        return [
            _slice(s) for s in self._services.enquiries.hour() if s.start + SLICE_SECONDS > since
        ]

    def _engine(self, counters: Statistics) -> Plain:
        return {
            "ready": counters.engine_ready,
            "seconds": round(counters.engine_seconds, 3),
            "waiting": counters.requests_waiting,
            "running": counters.requests_running,
            "rows": counters.rows_running,
            "preempted": counters.rows_preempted,
            "trouble": self._services.journal.statistics().trouble,
            "models": [
                {"name": m.name, "state": m.state, "stage": m.stage, "fraction": m.fraction}
                for m in self._services.status()
            ],
        }

    # --- jobs ---

    def _jobs(self, facts: Facts) -> list[Plain]:
        accounts = {
            name: account
            for (level, name), account in facts.statistics.accounts.items()
            if level == "session"
        }
        models: dict[str, list[Model]] = {}
        for model in self._services.models.all_alive():
            models.setdefault(model.session_id, []).append(model)
        waits: dict[str, list[Waiting]] = {}
        for each in facts.waiting:
            waits.setdefault(each.session_id, []).append(each)
        known = list(dict.fromkeys([*accounts, *models, *waits]))[-JOBS:]
        return [
            self._job(name, accounts.get(name), models.get(name, []), waits.get(name, []))
            for name in known
        ]

    def _job(
        self,
        session_id: str,
        account: Account | None,
        models: Sequence[Model],
        waits: Sequence[Waiting],
    ) -> Plain:
        session = self._services.catalogue.find_session(session_id)
        account = account or Account()
        if session is None or not self.sees(session.owner):
            owner = "" if session is None else self.owner_name(session.owner)
            return {
                "id": self.job_name(session_id),
                "owner": owner,
                "mine": False,
                "seconds": round(account.engine_seconds, 3),
                "active": bool(waits),
            }
        return {
            "id": session_id,
            "owner": session.owner,
            "mine": True,
            "name": session.display_name or (session.tags[0] if session.tags else ""),
            "project": session.project_id,
            "created": session.created_at,
            "finished": session.finished,
            "active": bool(waits),
            "seconds": round(account.engine_seconds, 3),
            "tokens": account.tokens,
            "requests": account.requests,
            "wait_seconds": round(account.wait_seconds, 3),
            "models": [
                {"id": m.model_id, "base": m.base_model, "rank": m.lora.rank} for m in models
            ],
            "waits": [_wait(each) for each in waits],
        }

    # --- memory ---

    def _memory(self, memory: Memory) -> Plain:
        tables: Mapping[str, Mapping[Any, int]] = {
            "kv_blocks": memory.kv_blocks,
            "pinned_bytes": memory.pinned_bytes,
            "models": memory.models,
            "queued_bytes": memory.queued_bytes,
        }
        owners: dict[str, dict[str, int]] = {}
        for name, table in tables.items():
            for owner, amount in table.items():
                if amount:
                    owners.setdefault(self.owner_name(owner), {})[name] = amount
        capacity = memory.capacity
        return {"capacity": capacity and asdict(capacity), "owners": owners}

    # --- what only grows ---

    def passes(self, after: int, limit: int) -> tuple[list[list[Any]], int]:
        """The oldest of those after the pass `after`, and the number of the last one of them."""
        timeline = self._services.enquiries.timeline()
        start = bisect_right(timeline, after, key=lambda record: record.pass_id)
        found = timeline[start:][:limit]
        return [self._pass(each) for each in found], found[-1].pass_id if found else after

    def _pass(self, record: PassRecord) -> list[Any]:
        """Number, kind, start, end, seconds, tokens, requests, seconds by job."""
        jobs: dict[str, float] = {}
        for lane, seconds in zip(record.lanes, record.used, strict=True):
            job = self.job_name(lane.partition(":")[0])
            jobs[job] = jobs.get(job, 0.0) + seconds
        times = (round(record.start, 4), round(record.end, 4), round(record.seconds, 5))
        parts = [[job, round(seconds, 5)] for job, seconds in jobs.items()]
        return [record.pass_id, record.kind, *times, record.tokens, record.requests, parts]

    def points(self, after: int, limit: int) -> tuple[list[list[Any]], int]:
        """The newest after the point `after`, and the number of the last one."""
        curves = self._services.meter.curves
        found = [point for point in curves.after(after) if self.sees(point.owner)]
        return [as_list(point) for point in found[-limit:]], curves.last


def as_list(point: Point) -> list[Any]:
    """Number, model, Unix seconds, step, values."""
    return [point.number, point.model_id, round(point.at, 3), point.step, dict(point.values)]


def _slice(given: Slice) -> list[Any]:
    busy = {kind: round(seconds, 3) for kind, seconds in given.busy.items()}
    return [given.start, busy, given.tokens]


def _wait(waiting: Waiting) -> Plain:
    return {
        "lane": waiting.lane,
        "count": waiting.count,
        "kind": waiting.kind,
        "request": waiting.request_id,
        "since": waiting.since,
        "why": waiting.why,
    }
