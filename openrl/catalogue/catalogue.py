"""Names: owners' sessions, runs, checkpoints and samplers, in SQLite. Never tensors.

One `Catalogue` belongs to one thread, the event loop's: a call takes well under a millisecond. A
commit outlives the process, and a power cut too once it is `flushing.flushed()`. What a request
looks up is answered from memory.

Every lookup takes the owner, and another owner's name is `NotFound` just as one that never was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from openrl.catalogue.flushing import Flushing
from openrl.catalogue.ledgers import AuditLog, UsageLedger
from openrl.catalogue.placements import Placements
from openrl.catalogue.records import (
    Checkpoint,
    Mark,
    Noun,
    Page,
    Run,
    Sampler,
    Session,
    T,
    decode,
    encode,
    identity,
)
from openrl.catalogue.table import Filter, Table
from openrl.errors import NotFound, UserError
from openrl.types import ModelId, OwnerId, SamplerTarget

REMEMBERED = 16384  # rows answered from memory, a KiB each; others cost a look into the file
MARKS = 1024  # of the clones of one sampler


class Catalogue:
    def __init__(self, file: Path | None, remembered: int | None = None) -> None:
        """Opens or makes the database; a `file` None keeps it in memory. `remembered` None means
        `REMEMBERED`. Raises `ServerError` when the file was written by a newer version."""
        self._table = Table(file)
        self.flushing = Flushing(self._table.sql, file)
        self.audit = AuditLog(self._table.sql)
        self.usage = UsageLedger(self._table.sql)
        self.placements = Placements(self._table.sql)
        self._known: dict[tuple[str, str], Noun] = {}  # the oldest is forgotten first
        self._remembered = REMEMBERED if remembered is None else remembered
        self._touched: dict[ModelId, float] = {}

    def close(self) -> None:
        self.write_touched()
        self.usage.write()
        self._table.close()

    # --- sessions ---

    def add_session(self, session: Session) -> None:
        self._put(session)

    def session(self, session_id: str, owner: OwnerId) -> Session:
        return self._owned(Session, session_id, owner)

    def find_session(self, session_id: str) -> Session | None:
        """For ourselves: whoever its owner is."""
        return self._find(Session, session_id)

    def owners(self) -> frozenset[OwnerId]:
        """Whoever ever made a session."""
        return frozenset(map(OwnerId, self._table.owners("Session")))

    def sessions(self, owner: OwnerId, limit: int = 100, offset: int = 0) -> Page[Session]:
        return self._page(Session, "owner", (owner,), limit, offset)

    def sessions_after(self, owner: OwnerId, last: str | None) -> Iterator[Session]:
        """Newest first, those that come after the session `last`."""
        time = float("inf") if last is None else self.session(last, owner).created_at
        for body in self._table.after("Session", owner, time, last or ""):
            yield decode(Session, body)

    def finish_session(
        self, session_id: str, owner: OwnerId, reason: str, detail: str | None = None
    ) -> None:
        """The first reason wins."""
        session = self.session(session_id, owner)
        if session.finished is None:
            self._put(replace(session, finished=reason, detail=detail))

    def set_project(self, session_id: str, owner: OwnerId, project_id: str) -> None:
        self._put(replace(self.session(session_id, owner), project_id=project_id))

    def stored(self, session_id: str) -> tuple[int, int]:
        """How many checkpoints the runs of a session have, and their size in bytes."""
        return self._table.stored(session_id)

    def kept(self, owner: OwnerId) -> tuple[int, int]:
        """How many checkpoints an owner has, and their size in bytes."""
        return self._table.kept(owner)

    # --- runs ---

    def add_run(self, run: Run) -> None:
        self._put(run)

    def run(self, model_id: str, owner: OwnerId) -> Run:
        """`last_request_at` may be newer in memory than in the file."""
        return self._fresh(self._owned(Run, model_id, owner))

    def _fresh(self, run: Run) -> Run:
        return replace(run, last_request_at=self._touched.get(run.model_id, run.last_request_at))

    def find_run(self, model_id: str) -> Run | None:
        """For ourselves: whoever its owner is."""
        return self._find(Run, model_id)

    def runs(
        self,
        owner: OwnerId,
        limit: int = 100,
        offset: int = 0,
        *,
        project_id: str | None = None,
        readable: bool = False,
    ) -> Page[Run]:
        """`readable` adds others' runs that have a published checkpoint; a project holds none."""
        if project_id is not None:
            page = self._page(Run, "project", (owner, project_id), limit, offset)
        else:
            page = self._page(Run, "readable" if readable else "owner", (owner,), limit, offset)
        return replace(page, items=tuple(map(self._fresh, page.items)))

    def runs_of(self, session_id: str, owner: OwnerId) -> tuple[Run, ...]:
        self.session(session_id, owner)
        return self._page(Run, "parent", (session_id,)).items

    def touch_run(self, model_id: ModelId, now: float) -> None:
        """Remembers the time of a run's newest request; written with the next list or close."""
        self._touched[model_id] = now

    def write_touched(self) -> None:
        for model_id, now in list(self._touched.items()):
            run = self._find(Run, model_id)
            if run is not None:
                self._put(replace(run, last_request_at=now))
            del self._touched[model_id]

    # --- checkpoints ---

    def add_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Takes the place of one of the same path."""
        self._put(checkpoint)

    def checkpoint(self, path: str, owner: OwnerId) -> Checkpoint:
        return self._owned(Checkpoint, path, owner)

    def readable_checkpoint(self, path: str, owner: OwnerId) -> Checkpoint:
        """One's own, or one that its owner has published."""
        found = self._find(Checkpoint, path)
        if found is not None and found.public:
            return found
        return self.checkpoint(path, owner)

    def find_checkpoint(self, path: str) -> Checkpoint | None:
        """For ourselves: whoever its owner is."""
        return self._find(Checkpoint, path)

    def checkpoints(self, owner: OwnerId, limit: int = 100, offset: int = 0) -> Page[Checkpoint]:
        return self._page(Checkpoint, "owner", (owner,), limit, offset)

    def all_checkpoints(self, limit: int) -> Page[Checkpoint]:
        """For administrators: every owner's."""
        return self._page(Checkpoint, "all", (), limit)

    def checkpoints_of(self, model_id: str, owner: OwnerId) -> tuple[Checkpoint, ...]:
        self.run(model_id, owner)
        return self._page(Checkpoint, "parent", (model_id,)).items

    def published_of(self, model_id: str) -> tuple[Checkpoint, ...]:
        """What of a run every owner may read. Raises `NotFound` when that is nothing."""
        saved = self._page(Checkpoint, "parent", (model_id,)).items
        if public := tuple(each for each in saved if each.public):
            return public
        raise NotFound(f"no model {model_id!r}")

    def publish(self, path: str, owner: OwnerId, public: bool) -> None:
        self._put(replace(self.checkpoint(path, owner), public=public))

    def set_expiry(self, path: str, owner: OwnerId, expires_at: float | None) -> None:
        self._put(replace(self.checkpoint(path, owner), expires_at=expires_at))

    def expired(self, now: float) -> tuple[Checkpoint, ...]:
        bodies = self._table.expired("Checkpoint", now)
        return tuple(decode(Checkpoint, body) for body in bodies)

    def delete_checkpoint(self, checkpoint: Checkpoint) -> bool:
        """False when its path has been deleted or written anew since it was looked up."""
        standing = self._find(Checkpoint, checkpoint.path)
        if standing is None or standing.version != checkpoint.version:
            return False
        self._table.delete("Checkpoint", checkpoint.path)
        self._known.pop(("Checkpoint", checkpoint.path), None)
        return True

    # --- samplers ---

    def add_sampler(self, sampler: Sampler) -> Sampler:
        """Idempotent by id: returns the one that stands. Raises `UserError` when the id stands
        for other weights."""
        standing = self._find(Sampler, sampler.sampling_session_id)
        if standing is None:
            self._put(sampler)
            return sampler
        if (standing.owner, standing.target) != (sampler.owner, sampler.target):
            raise UserError(f"sampling session {sampler.sampling_session_id!r} exists already")
        return standing

    def sampler(self, sampling_session_id: str, owner: OwnerId) -> Sampler:
        """With the target that it reads now."""
        sampler = self._owned(Sampler, sampling_session_id, owner)
        run = self._find(Run, sampler.follows) if sampler.follows else None
        return replace(sampler, target=run.inflight) if run and run.inflight else sampler

    def join_sampler(self, sampling_session_id: str, owner: OwnerId) -> int:
        """Counts one more client, and returns its number: 1 for the first that joins."""
        sampler = self.sampler(sampling_session_id, owner)
        joined = replace(sampler, clients=sampler.clients + 1)
        self._put(joined)
        return joined.clients

    def mark(self, sampling_session_id: str, mark: Mark) -> None:
        """In the place of the one for the same clone. The oldest of too many is dropped."""
        if sampler := self.find_sampler(sampling_session_id):
            others = [each for each in sampler.marks if each.clone != mark.clone]
            self._put(replace(sampler, marks=(*others[1 - MARKS :], mark)))

    def mark_of(self, sampling_session_id: str, clone: int) -> Mark | None:
        sampler = self.find_sampler(sampling_session_id)
        marks = sampler.marks if sampler else ()
        return next((each for each in marks if each.clone == clone), None)

    def move_followers(self, model_id: ModelId, target: SamplerTarget) -> SamplerTarget | None:
        """All samplers that follow the run read `target` from now on; returns what they left."""
        run = self._find(Run, model_id)
        if run is None:
            return None
        self._put(replace(run, inflight=target))
        return run.inflight

    def find_sampler(self, sampling_session_id: str) -> Sampler | None:
        """For ourselves: whoever its owner is."""
        return self._find(Sampler, sampling_session_id)

    def samplers_of(self, session_id: str, owner: OwnerId) -> tuple[Sampler, ...]:
        self.session(session_id, owner)
        return self._page(Sampler, "parent", (session_id,)).items

    # --- memory and table ---

    def _put(self, noun: Noun) -> None:
        kind, name, parent = identity(noun)
        self._table.put(kind, name, noun.owner, parent, noun.created_at, encode(noun))
        self._remember(kind, name, noun)

    def _remember(self, kind: str, name: str, noun: Noun) -> None:
        self._known[kind, name] = noun
        if len(self._known) > self._remembered:
            del self._known[next(iter(self._known))]

    def _find(self, kind: type[T], name: str) -> T | None:
        if known := self._known.get((kind.__name__, name)):
            return cast(T, known)
        body = self._table.get(kind.__name__, name)
        if body is None:
            return None
        noun = decode(kind, body)
        self._remember(kind.__name__, name, noun)
        return noun

    def _owned(self, kind: type[T], name: str, owner: OwnerId) -> T:
        noun = self._find(kind, name)
        if noun is None or noun.owner != owner:
            raise NotFound(f"no {_CALLED[kind]} {name!r}")
        return noun

    def _page(
        self, kind: type[T], by: Filter, values: tuple[str, ...], limit: int = -1, offset: int = 0
    ) -> Page[T]:
        bodies, total = self._table.page(kind.__name__, by, values, limit, offset)
        return Page(tuple(decode(kind, body) for body in bodies), total)


_CALLED: Mapping[type[Any], str] = {
    Session: "session",
    Run: "model",
    Checkpoint: "checkpoint",
    Sampler: "sampling session",
}
