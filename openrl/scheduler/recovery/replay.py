"""Models become what they were when an earlier process ended, before any request runs.

From its snapshot, or from its creation, each model does again what had succeeded after it, with
the same atoms; a failed operation stays failed, and only a step that dropped its gradient does so
again. Nothing here makes an answer: those were given. Models go side by side, so that their passes
are fused as they would be otherwise. Those in which earlier starts have ended come last and each
alone, the most suspect first: should another of them end this one, the others are not blamed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from openrl.engines.base import (
    AtomPiece,
    Control,
    ControlPass,
    ControlReport,
    CreateAdapter,
    LoadProgress,
    OptimPass,
    OptimPiece,
    OptimReport,
    PinVersion,
    RestoreAdapter,
    TrainPass,
    TrainReport,
    WeightsKey,
)
from openrl.errors import OpenRLError, ServerError
from openrl.journal import Executed, Recovered
from openrl.scheduler.closing import damaged
from openrl.scheduler.controls import Order
from openrl.scheduler.core.events import Event, LaneClosed
from openrl.scheduler.dispatch import atom_piece
from openrl.scheduler.parts import Parts
from openrl.scheduler.pending import training_pending
from openrl.scheduler.recovery.aside import of_loaded_bases
from openrl.scheduler.recovery.plans import Plan
from openrl.scheduler.snapshots import changed_by_step
from openrl.types import (
    Failed,
    ForwardBackward,
    LoadWeights,
    ModelId,
    OptimStep,
    OptimStepDone,
    Outcome,
    RequestId,
    SaveWeightsForSampler,
    VersionId,
    Work,
)

log = logging.getLogger("openrl")

_AGAIN = ("ForwardBackward", "OptimStep", "LoadWeights", "SaveWeightsForSampler")
"""Operations that may have to be done again; the others have left what they did on disk."""


@dataclass(slots=True)
class _Course:
    """One model on its way; `left` are the works it does again, one at a time, `at` what the engine
    was given last."""

    plan: Plan
    weights: WeightsKey
    left: Iterator[Work]
    at: RequestId | None = None

    @property
    def model_id(self) -> ModelId:
        return self.plan.model.model_id


class Replay:
    def __init__(
        self,
        plans: Sequence[Plan],
        recovered: Recovered,
        parts: Parts,
        post: Callable[[Event], None],
    ) -> None:
        self._recovered = recovered
        self._runner = parts.runner
        self._controls = parts.controls
        self._snapshots = parts.snapshots
        self._models = parts.models
        self._catalogue = parts.catalogue
        self._journal = parts.journal
        self._post = post
        self._progressed = parts.loading.progressed
        self._of_loaded_bases = partial(of_loaded_bases, parts=parts, post=post)
        self._pass_tokens = parts.config.pass_tokens
        self._total = sum(1 + len(plan.todo) for plan in plans)
        self._done = 0
        self._plans = plans
        self._courses: dict[ModelId, _Course] = {}  # those on their way

    def _course(self, plan: Plan) -> _Course:
        weights = self._models.weights_of(plan.model.model_id)
        return _Course(plan, weights, self._works(plan))

    async def run(self) -> None:
        """Raises `EngineDied`. A model that cannot become what it was is stopped alone, and one
        whose base model could not be loaded waits for the next process."""
        plans = self._of_loaded_bases(self._plans)
        suspects = sorted((p for p in plans if p.deaths), key=lambda plan: -plan.deaths)
        for together in ([p for p in plans if not p.deaths], *([plan] for plan in suspects)):
            await self._side_by_side(together)

    async def _side_by_side(self, plans: Iterable[Plan]) -> None:
        self._courses = {plan.model.model_id: self._course(plan) for plan in plans}
        for course in tuple(self._courses.values()):
            await self._begin(course)
        while heads := list(self._heads()):
            for weights in {course.weights for course, _ in heads}:
                together = [(course, work) for course, work in heads if course.weights == weights]
                await self._train(weights, together)
                await self._step(weights, together)
                for course, work in together:
                    await self._control(course, work)

    # --- what is next ---

    def _heads(self) -> Iterator[tuple[_Course, Work]]:
        for course in tuple(self._courses.values()):
            try:
                work = next(course.left, None)
            except OpenRLError as error:
                self._stop(course.model_id, error)
                continue
            if work is None:
                del self._courses[course.model_id]
                self._journal.redoing(course.model_id, None)
            else:
                yield course, work

    def _works(self, plan: Plan) -> Iterator[Work]:
        for each in plan.todo:
            self._tell(plan)
            if each.operation not in _AGAIN or not self._counted(each):
                continue
            work = self._recovered.work(each.request_id)
            match work.operation:
                case ForwardBackward(forward_only=True):
                    pass
                case SaveWeightsForSampler() if VersionId(work.request_id) not in plan.versions:
                    pass
                case _:
                    yield work

    def _counted(self, each: Executed) -> bool:
        if not each.failed:
            return True
        outcome = self._recovered.outcome(each.request_id)
        return each.operation == "OptimStep" and changed_by_step(outcome)

    def _note(self, model_id: ModelId, request_id: RequestId) -> None:
        """Should the process end in the next pass, this is what it may have ended of."""
        course = self._courses.get(model_id)
        if course is not None and course.at != request_id:
            course.at = request_id
            self._journal.redoing(model_id, request_id)

    def _tell(self, plan: Plan) -> None:
        self._done += 1
        weights = self._models.weights_of(plan.model.model_id)
        stage = f"recovering: {self._done} of {self._total} operations"
        self._progressed(LoadProgress(weights, stage, self._done / self._total))

    # --- doing it ---

    async def _begin(self, course: _Course) -> None:
        self._tell(course.plan)
        plan = course.plan
        try:
            control = await self._beginning(plan)
        except OpenRLError as error:
            self._stop(course.model_id, error)
            return
        if await self._obeyed(course, control, plan.position):
            self._snapshots.reached(course.model_id, plan.position)

    async def _beginning(self, plan: Plan) -> Control:
        model = plan.model
        if plan.snapshot is not None:
            return RestoreAdapter(model.model_id, model.lora, plan.snapshot)
        order = await self._controls.prepare(plan.creation)
        assert isinstance(order, Order)
        assert isinstance(order.control, CreateAdapter)
        return order.control

    async def _train(self, weights: WeightsKey, heads: Iterable[tuple[_Course, Work]]) -> None:
        pieces = [piece for course, work in heads for piece in self._pieces(course, work)]
        for some in _passes(pieces, self._pass_tokens):
            work = TrainPass(weights, some)
            for piece in some:
                self._note(piece.model_id, piece.request_id)
            ran = await self._runner.execute(work)
            assert isinstance(ran.report, TrainReport)
            for piece, outcome in zip(some, ran.report.outcomes, strict=True):
                if isinstance(outcome, Failed):
                    self._stop(piece.model_id, outcome.error)
            await self._secure(self._snapshots.trained(work, ran.report, ran.seconds))

    def _pieces(self, course: _Course, work: Work) -> Iterator[AtomPiece]:
        if isinstance(work.operation, ForwardBackward):
            pending = training_pending(work, course.weights, course.plan.model.atom_tokens)
            for index in range(len(pending.atoms)):
                yield atom_piece(pending, index)

    async def _step(self, weights: WeightsKey, heads: Iterable[tuple[_Course, Work]]) -> None:
        pieces = tuple(
            OptimPiece(work.request_id, course.model_id, work.operation.adam)
            for course, work in heads
            if isinstance(work.operation, OptimStep) and course.model_id in self._courses
        )
        if not pieces:
            return
        work = OptimPass(weights, pieces)
        for piece in pieces:
            self._note(piece.model_id, piece.request_id)
        ran = await self._runner.execute(work)
        assert isinstance(ran.report, OptimReport)
        for piece, outcome in zip(pieces, ran.report.outcomes, strict=True):
            self._compare(piece, outcome)
        await self._secure(self._snapshots.stepped(work, ran.report, ran.seconds))

    def _compare(self, piece: OptimPiece, outcome: Outcome) -> None:
        answered = self._recovered.outcome(piece.request_id)
        if isinstance(outcome, Failed) and not changed_by_step(outcome):
            self._stop(piece.model_id, outcome.error)
        elif isinstance(answered, OptimStepDone) and answered != outcome:
            log.warning("%s came out otherwise when it was done again", piece.request_id)

    async def _control(self, course: _Course, work: Work) -> None:
        match work.operation:
            case LoadWeights():
                try:
                    order = await self._controls.prepare(work)
                except OpenRLError as error:
                    self._stop(course.model_id, error)
                    return
                assert isinstance(order, Order)
                if await self._obeyed(course, order.control, work.request_id):
                    self._snapshots.reached(course.model_id, work.request_id)
                    await self._secure([course.model_id])
            case SaveWeightsForSampler():
                pin = PinVersion(course.model_id, VersionId(work.request_id))
                await self._obeyed(course, pin, work.request_id)
            case _:
                pass

    async def _obeyed(self, course: _Course, control: Control, request_id: RequestId) -> bool:
        self._note(course.model_id, request_id)
        ran = await self._runner.execute(ControlPass(course.weights, request_id, control))
        assert isinstance(ran.report, ControlReport)
        if ran.report.error is not None:
            self._stop(course.model_id, ran.report.error)
            return False
        if isinstance(control, PinVersion):
            self._models.pins.weigh(control.version_id, ran.report.size_bytes)
        return True

    async def _secure(self, models: Iterable[ModelId]) -> None:
        """A long replay is not begun from the start when it is interrupted in its turn."""
        await self._runner.securing.snapshot(m for m in models if m in self._courses)

    def _stop(self, model_id: ModelId, error: OpenRLError) -> None:
        if (course := self._courses.pop(model_id, None)) is None:
            return
        log.error("model %s could not be recovered: %s", model_id, error.message)
        cause: ServerError = damaged(model_id, error.message, self._catalogue)
        for version in course.plan.versions:
            if version in self._models.pins:
                self._models.pins.forget(version)
        self._models.close(model_id, cause)
        self._post(LaneClosed(model_id, cause))


def _passes(pieces: Sequence[AtomPiece], tokens: int) -> Iterator[tuple[AtomPiece, ...]]:
    """In order, of about so many tokens each, and of no less than one piece."""
    some: list[AtomPiece] = []
    size = 0
    for piece in pieces:
        more = sum(len(datum.tokens) for datum in piece.data)
        if some and size + more > tokens:
            yield tuple(some)
            some, size = [], 0
        some.append(piece)
        size += more
    if some:
        yield tuple(some)
