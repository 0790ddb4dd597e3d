"""The way in: every request is checked, given its seeds, journalled and queued, once.

A repeat of a request id gets the first one's answer. Training work with bad content is accepted
and fails through its future, since clients cannot go on after a refused POST; bad samples are
refused at once. Work that arrives while weights load waits; while draining nothing comes in.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from openrl.catalogue import Catalogue
from openrl.config import Limits, SchedulerConfig
from openrl.engines.base import BaseModelInfo
from openrl.engines.validation import check_sample, check_training, max_new_tokens
from openrl.errors import Gone, NotFound, OpenRLError, Unavailable, UserError
from openrl.futures import Futures
from openrl.journal import Flushed, Journal, NullJournal
from openrl.scheduler.actor import EngineActor
from openrl.scheduler.closing import farewell, not_created, past_life
from openrl.scheduler.core.events import LaneOpened, SeqConsumed
from openrl.scheduler.enquiries import QueueState
from openrl.scheduler.fetching import Fetching
from openrl.scheduler.models import Model
from openrl.scheduler.pending import Pending, payload_bytes, training_pending
from openrl.scheduler.quotas import Quotas
from openrl.types import (
    CreateModel,
    CreateModelFromCheckpoint,
    Failed,
    LoraConfig,
    ModelId,
    OwnerId,
    RequestId,
    Sample,
    SamplerTarget,
    SessionId,
    Work,
)

Creation: TypeAlias = CreateModel | CreateModelFromCheckpoint

_AT_ONCE = Flushed(NullJournal())
"""For samples: after a restart their clients send them again."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The POST is answered after `await committed`; a duplicate awaits the same."""

    request_id: RequestId
    committed: Flushed


class Admission:
    def __init__(
        self,
        actor: EngineActor,
        catalogue: Catalogue,
        fetching: Fetching,
        futures: Futures,
        journal: Journal,
        config: SchedulerConfig,
        limits: Limits,
        now: Callable[[], float],
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        hold_seconds: float = 50.0,
    ) -> None:
        """`now` gives Unix seconds; `hold_seconds` is how long training work over its owner's
        bound is held, less than the client's timeout for a POST."""
        self._actor = actor
        self._catalogue = catalogue
        self._fetching = fetching
        self._futures = futures
        self._journal = journal
        self._config = config
        self._limits = limits
        self._now = now
        self._draw_seed = draw_seed
        self._quotas = Quotas(actor.entitlements, actor.backlog, actor.models, hold_seconds)
        self._draining = False

    # --- what the door calls ---

    async def admit(self, work: Work) -> RequestId:
        """Accepts the work and returns when it is durable. Training work over its owner's bounds
        is held meanwhile. Raises what `submit` raises."""
        if not self._futures.known(work.request_id):
            await self._fetching.for_work(work)
            await self._quotas.hold(work)
        accepted = self.submit(work)
        await accepted.committed
        return accepted.request_id

    def submit(self, work: Work) -> Accepted:
        """Raises `NotFound` for a model that never was or is another's, `UserError` or `Gone`
        for a sample that cannot run, `Overloaded` and `Unavailable` when it could later."""
        if self._futures.known(work.request_id):
            self._futures.find(work.request_id, work.owner)
        elif isinstance(work.operation, Sample):
            self._check_open()
            self._submit_sample(work, work.operation)
        else:
            self._check_open()
            if self._journal.trouble is not None:
                raise Unavailable(f"training work is not taken: {self._journal.trouble}", 5.0)
            self._submit_training(work)
        sampled = isinstance(work.operation, Sample)
        return Accepted(work.request_id, _AT_ONCE if sampled else Flushed(self._journal))

    def cancel(self, request_id: RequestId, owner: OwnerId) -> None:
        """Does nothing to what has been answered. Raises `NotFound` as `futures.find` does."""
        self._futures.find(request_id, owner)
        self._actor.cancel(request_id)

    def why_waiting(self, request_id: RequestId) -> str:
        """For people, on a poll that found no answer yet."""
        return self._actor.enquiries.why_waiting(request_id)

    def queue_state(self, request_id: RequestId) -> QueueState:
        return self._actor.enquiries.queue_state(request_id)

    def take_back_samples(self, session_id: SessionId) -> int:
        """Of a client that is not heard any more: nobody waits for them. Returns how many. What
        it sent to its models runs, so that it finds them where it left them."""
        samples = [
            pending.work.request_id
            for pending in self._actor.backlog
            if pending.work.session_id == session_id and isinstance(pending.work.operation, Sample)
        ]
        for request_id in samples:
            self._actor.cancel(request_id)
        return len(samples)

    def end_session(self, session_id: SessionId) -> None:
        """What a finished session holds in the engine goes, after what it has queued still:
        adapters, and the versions of its ephemeral samplers. Checkpoints stay."""
        self._actor.when_done(session_id, partial(self._let_go, session_id))

    def end_finished_sessions(self) -> None:
        """Their clients finished them, and an earlier process did not get to it."""
        for session_id in {model.session_id for model in self._actor.models.all_alive()}:
            owner = self._actor.models.of(session_id)[0].owner
            with suppress(NotFound):
                if self._catalogue.session(session_id, owner).finished is not None:
                    self.end_session(session_id)

    @property
    def draining(self) -> bool:
        return self._draining

    async def drain(self, seconds: float) -> int:
        """Refuses new work and waits for the old. What is left then goes on with the next process
        when there is a journal, and fails when there is none; returns how much that is."""
        self._draining = True
        return await self._actor.drain(seconds)

    # --- samples ---

    def _submit_sample(self, work: Work, sample: Sample) -> None:
        assert work.target is not None, "a sample has a target"
        info = self._actor.models.base(work.target.base_model)
        check_sample(sample, info, self._limits)
        self._check_there(work.target)
        self._quotas.check_samples(work.owner)
        work = replace(work, operation=self._seeded(sample))
        self._accept(
            Pending(
                work,
                info.weights,
                max_new_tokens=max_new_tokens(sample, info),
                payload_bytes=payload_bytes(sample),
            )
        )

    def _check_there(self, target: SamplerTarget) -> None:
        """The weights that the sampling session pins can still be had."""
        if target.version is None:
            return
        if target.path is not None:
            self._fetching.check(target.path, target.version)
        elif target.version not in (pins := self._actor.models.pins):
            raise Gone(pins.why_gone(target.version))

    # --- training ---

    def _submit_training(self, work: Work) -> None:
        if isinstance(work.operation, CreateModel | CreateModelFromCheckpoint):
            self._submit_creation(work, work.operation)
            return
        model = self._actor.models.find(work.lane)
        if (away := self._actor.models.away.get(work.lane)) is not None:
            raise Unavailable(away, retry_after=30.0)
        if model is None:
            self._refuse(
                work, past_life(self._catalogue.run(work.lane, work.owner), self._catalogue)
            )
        elif model.owner != work.owner:
            raise NotFound(f"no model {work.lane!r}")
        elif model.closed is not None:
            self._refuse(work, model.closed)
        else:
            self._submit_to(model, work)

    def _submit_to(self, model: Model, work: Work) -> None:
        info = self._actor.models.base(model.base_model)
        self._catalogue.touch_run(model.model_id, self._now())
        if problem := self._problem(work, info):
            self._refuse(work, problem)
            self._actor.post(SeqConsumed(work.lane, work.seq_id))
        else:
            self._accept(training_pending(work, info.weights, model.atom_tokens))

    def _problem(self, work: Work, info: BaseModelInfo) -> UserError | None:
        assert not isinstance(work.operation, Sample)
        try:
            check_training(work.operation, info, self._limits)
        except UserError as error:
            return error
        return None

    # --- models ---

    def _submit_creation(self, work: Work, creation: Creation) -> None:
        """A model that cannot be made is remembered as closed, so that what its client has sent
        after it fails with the cause."""
        known = self._actor.models.find(work.lane)
        if known is not None:
            raise NotFound(f"model {work.lane!r} was made long ago: its answer is not kept")
        if run := self._catalogue.find_run(work.lane):
            self._refuse(work, past_life(run, self._catalogue))
            return
        creation = replace(creation, lora=self._with_seed(creation.lora))
        work = replace(work, operation=creation)
        model = Model(
            ModelId(work.lane),
            work.session_id,
            work.owner,
            creation.base_model,
            creation.lora,
            self._config.atom_tokens,
        )
        self._actor.models.add(model)
        try:
            info = self._actor.models.base(creation.base_model)
            check_training(creation, info, self._limits)
            self._quotas.check_models(work.owner, creation.lora)
        except UserError as error:
            self._actor.models.close(work.lane, not_created(model.model_id, error))
            self._refuse(work, error)
            return
        self._actor.post(LaneOpened(work.lane, work.seq_id))
        self._accept(training_pending(work, info.weights, model.atom_tokens))

    def _with_seed(self, lora: LoraConfig) -> LoraConfig:
        return lora if lora.seed is not None else replace(lora, seed=self._draw_seed())

    def _let_go(self, session_id: SessionId) -> None:
        for model in self._actor.models.of(session_id):
            self._actor.unpin_all(model.model_id)
            work = farewell(model)
            alive = model.closed is None and self._actor.failure is None
            if alive and not self._futures.known(work.request_id):
                weights = self._actor.models.base(model.base_model).weights
                self._accept(training_pending(work, weights, model.atom_tokens))

    # --- both ---

    def _check_open(self) -> None:
        if self._draining:
            raise Unavailable("the server is shutting down", retry_after=5.0)
        if self._actor.failure is not None:
            raise Unavailable(f"nothing runs here: {self._actor.failure.message}", retry_after=30.0)

    def _accept(self, pending: Pending) -> None:
        self._open(pending.work)
        self._actor.submit(pending)

    def _refuse(self, work: Work, error: OpenRLError) -> None:
        self._open(work)
        self._actor.settle(work, Failed(error))

    def _open(self, work: Work) -> None:
        kind = type(work.operation).__name__
        self._futures.open(work.request_id, work.owner, kind, work.lane)
        if not isinstance(work.operation, Sample):
            creates = isinstance(work.operation, CreateModel | CreateModelFromCheckpoint)
            self._journal.accepted(work, self._config.atom_tokens if creates else None)

    def _seeded(self, sample: Sample) -> Sample:
        if sample.params.seed is not None:
            return sample
        return replace(sample, params=replace(sample.params, seed=self._draw_seed()))
