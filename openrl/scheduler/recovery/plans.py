"""What an earlier process has left, made into what this one goes on with.

Answers can be fetched again, lanes go on at the operation that is next, requests without an
answer are queued in the order of their acceptance, and samplers find their versions. What is to
be done again in the engine is planned here and done by `replay`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from openrl.errors import OpenRLError, ServerError, UserError
from openrl.journal import Executed, Recovered, RecoveredModel
from openrl.scheduler.closing import damaged, not_created, unloaded
from openrl.scheduler.core.events import Event, LaneOpened, LanePaused, SeqConsumed
from openrl.scheduler.models import Model
from openrl.scheduler.parts import Parts
from openrl.scheduler.pending import Pending, training_pending
from openrl.scheduler.recovery.beginnings import beginning
from openrl.scheduler.recovery.versions import Versions
from openrl.types import (
    CreateModel,
    CreateModelFromCheckpoint,
    Failed,
    Malformed,
    RequestId,
    SamplerWeightsSaved,
    SaveWeightsForSampler,
    SessionId,
    VersionId,
    Work,
)

log = logging.getLogger("openrl")

ATTEMPTS = 3
"""A request that the engine was at when so many processes ended is taken to have ended them; so is
one that was being done again when so many starts ended, and its model is stopped."""

_PINS = SaveWeightsForSampler.__name__


@dataclass(frozen=True, slots=True)
class Plan:
    """How a model becomes what it was: from `snapshot`, or made anew by `creation`; then `todo`
    is done again, as far as it changed the model or pinned one of `versions`. `deaths`: how many
    starts in a row have ended in it."""

    model: Model
    creation: Work
    snapshot: Path | None
    position: RequestId
    todo: tuple[Executed, ...]
    versions: frozenset[VersionId]
    deaths: int


@dataclass(slots=True)
class Revived:
    """`pending` is to be submitted after `events`; `failed` is to be settled; lanes of `suspects`,
    which a process ended with, are paused, and are to be resumed in this order."""

    events: list[Event] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    failed: list[tuple[Work, OpenRLError]] = field(default_factory=list)
    suspects: list[RequestId] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)


class Recovery:
    def __init__(self, recovered: Recovered, parts: Parts) -> None:
        self._recovered = recovered
        self._models = parts.models
        self._catalogue = parts.catalogue
        self._futures = parts.futures
        self._journal = parts.journal
        self._snapshots = parts.snapshots
        self._atom_tokens = parts.config.atom_tokens
        self._versions = Versions(parts.models, parts.catalogue, parts.snapshots)
        self._seqs: defaultdict[str, set[int]] = defaultdict(set)  # answered, by lane
        self._revived = Revived()

    def revive(self) -> Revived:
        for answer in self._recovered.answers:
            self._seqs[answer.lane].add(_seq(answer.request_id))
            stored = partial(self._recovered.outcome, answer.request_id)
            self._futures.restore(
                answer.request_id, answer.owner, answer.operation, answer.lane, answer.size, stored
            )
        for one in self._recovered.models:
            self._revive(one)
        self._versions.revive()
        known = [one.model_id for one in self._recovered.models]
        self._snapshots.delete(self._snapshots.strangers(known))
        self._look_at_suspects()
        return self._revived

    # --- one model ---

    def _revive(self, one: RecoveredModel) -> None:
        creation = one.creation
        if creation is None or one.damage is not None:
            self._stop(one, one.damage or "its creation is lost")
            return
        operation = creation.operation
        assert isinstance(operation, CreateModel | CreateModelFromCheckpoint)
        if operation.base_model not in self._models.bases:
            self._set_aside(one, operation.base_model)
            return
        model = self._model(one, operation)
        self._models.add(model)
        if (ended := _ended(one)) is not None:
            self._models.close(one.model_id, ended)
            self._journal.ended(one.model_id)
            self._fail_pending(one, ended)
            return
        try:
            plan = self._plan(one, model, creation)
            self._queue(one, model)
        except ServerError as error:
            self._models.close(one.model_id, error)
            self._stop(one, error.message)
            return
        if plan is not None:
            self._revived.plans.append(plan)

    def _model(
        self, one: RecoveredModel, operation: CreateModel | CreateModelFromCheckpoint
    ) -> Model:
        assert one.creation is not None
        return Model(
            one.model_id,
            one.creation.session_id,
            one.owner,
            operation.base_model,
            operation.lora,
            one.atom_tokens or self._atom_tokens,
        )

    def _stop(self, one: RecoveredModel, damage: str) -> None:
        """Nobody else is touched by what this model has lost."""
        log.error("model %s could not be recovered: %s", one.model_id, damage)
        error = damaged(one.model_id, damage, self._catalogue)
        run = self._catalogue.find_run(one.model_id)
        if run is not None:
            self._models.add(
                Model(one.model_id, run.session_id, run.owner, run.base_model, run.lora, 0, error)
            )
        self._fail_pending(one, error)

    def _set_aside(self, one: RecoveredModel, base_model: str) -> None:
        reason = f"its base model {base_model!r} is not served now: it goes on when it is again"
        log.error("model %s waits: %s", one.model_id, reason)
        self._models.away[one.model_id] = reason
        for request_id in one.pending:
            self._open(request_id, one)

    # --- its lane ---

    def _queue(self, one: RecoveredModel, model: Model) -> None:
        works = [self._recovered.work(request_id) for request_id in one.pending]
        first = min([_first_open(one), *(work.seq_id for work in works)])
        answered = {_seq(each.request_id) for each in one.executed} | self._seqs[one.model_id]
        self._revived.events.append(LaneOpened(one.model_id, first))
        for seq in sorted(seq for seq in answered if seq >= first):
            self._revived.events.append(SeqConsumed(one.model_id, seq))
        weights = self._models.base(model.base_model).weights
        for work in works:
            self._open(work.request_id, one)
            attempts = self._recovered.attempts.get(work.request_id, 0)
            if attempts >= ATTEMPTS:
                self._give_up(work)
            else:
                self._revived.pending.append(training_pending(work, weights, model.atom_tokens))

    def _give_up(self, work: Work) -> None:
        error = ServerError(f"the server ended {ATTEMPTS} times while it was at this request")
        self._revived.failed.append((work, error))
        self._revived.events.append(SeqConsumed(work.lane, work.seq_id))
        if isinstance(work.operation, CreateModel | CreateModelFromCheckpoint):
            self._models.close(work.lane, not_created(work.lane, error))

    def _look_at_suspects(self) -> None:
        """Those first that were there most often."""
        attempts = self._recovered.attempts
        waiting = [pending.work for pending in self._revived.pending]
        suspects = [work for work in waiting if attempts.get(work.request_id, 0) > 0]
        suspects.sort(key=lambda work: -attempts[work.request_id])
        self._revived.suspects = [work.request_id for work in suspects]
        self._revived.events += [LanePaused(lane) for lane in {work.lane for work in suspects}]

    def _fail_pending(self, one: RecoveredModel, error: OpenRLError) -> None:
        for request_id in one.pending:
            if not self._futures.known(request_id):
                self._open(request_id, one)
            self._revived.pending = [
                each for each in self._revived.pending if each.work.request_id != request_id
            ]
            self._revived.failed.append((self._nameless(request_id, one), error))

    def _nameless(self, request_id: RequestId, one: RecoveredModel) -> Work:
        """A work that is to be answered whatever it was."""
        session_id = SessionId(one.model_id.rpartition(":train:")[0])
        operation = Malformed(UserError("it could not be read again"))
        seq = _seq(request_id)
        return Work(request_id, one.owner, session_id, one.model_id, seq, operation)

    def _open(self, request_id: RequestId, one: RecoveredModel) -> None:
        self._futures.open(request_id, one.owner, "", one.model_id)

    # --- what is to be done again ---

    def _plan(self, one: RecoveredModel, model: Model, creation: Work) -> Plan | None:
        """None for a model that has not been made yet. Raises `ServerError` when it cannot become
        what it was."""
        if one.created is None:
            return None
        samplers = self._versions.live_of(model)
        pinned = {
            VersionId(each.request_id): index
            for index, each in enumerate(one.executed)
            if VersionId(each.request_id) in samplers and self._pins(each)
        }
        directory, index = beginning(one, pinned, self._snapshots, self._versions.durable)
        later = {version for version, at in pinned.items() if at > index}
        begun = [each for each in one.pending if VersionId(each) in samplers]
        later |= set(map(VersionId, begun))
        missing = frozenset(v for v in later if not self._versions.durable(v))
        position = one.executed[index].request_id if index >= 0 else _before(one, creation)
        # Of a save that was cut short after its row was there, samplers may have read: it is
        # pinned now, and answered in its turn.
        todo = one.executed[index + 1 :] + tuple(Executed(each, _PINS, False) for each in begun)
        deaths = self._deaths([position, *(each.request_id for each in todo)])
        self._versions.expect(model, missing)
        if directory is not None and (one.snapshot is None or directory.name != one.snapshot.name):
            self._snapshots.counts(one.model_id, position, directory)
        self._snapshots.delete(p for p in self._snapshots.of(one.model_id) if p != directory)
        return Plan(model, creation, directory, position, todo, missing, deaths)

    def _pins(self, each: Executed) -> bool:
        if each.failed or each.operation != _PINS:
            return False
        outcome = self._recovered.outcome(each.request_id)
        return isinstance(outcome, SamplerWeightsSaved) and outcome.path is None

    def _deaths(self, requests: Iterable[RequestId]) -> int:
        """In the worst of them. It has succeeded, so that it can be neither failed nor left out:
        raises `ServerError` when it has ended so many starts that the model must stop."""
        counts = {each: self._recovered.deaths.get(each, 0) for each in requests}
        worst = max(counts, key=lambda each: counts[each])
        if counts[worst] >= ATTEMPTS:
            raise ServerError(f"the server ended {ATTEMPTS} times while it did {worst} again")
        return counts[worst]


def _first_open(one: RecoveredModel) -> int:
    """The seq_id after the last operation that succeeded. Failed ones may have been refused before
    their turn, so that what belongs before them can still come."""
    if one.created is None:
        return 0
    position = one.snapshot.position if one.snapshot is not None else ""
    done = [each.request_id for each in one.executed if not each.failed]
    return 1 + max([0, *(_seq(request_id) for request_id in (position, *done))])


def _before(one: RecoveredModel, creation: Work) -> RequestId:
    return creation.request_id if one.snapshot is None else one.snapshot.position


def _ended(one: RecoveredModel) -> OpenRLError | None:
    """Its last operation ended it, and the process ended before the journal heard of it."""
    if isinstance(one.created, Failed):
        return not_created(one.model_id, one.created.error)
    if any(each.operation == "UnloadModel" and not each.failed for each in one.executed):
        return unloaded(one.model_id)
    return None


def _seq(request_id: str) -> int:
    """What ends a session's models has no number: it comes after all."""
    number = request_id.rpartition(":")[2]
    return int(number) if number.isdigit() else -1
