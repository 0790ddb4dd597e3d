"""A request between its acceptance and its answer: its work, and what came back so far. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from openrl.engines.base import WeightsKey
from openrl.scheduler.core.events import Item, Kind, SampleSize
from openrl.scheduler.core.packing import cut_atoms
from openrl.types import (
    Failed,
    ForwardBackward,
    ForwardBackwardOutput,
    Operation,
    OptimStep,
    Outcome,
    Result,
    Sample,
    SampledSequence,
    SampleOutput,
    Work,
)


@dataclass(slots=True, eq=False)
class Pending:
    """`atoms` are the (start, stop) of datums that a forward_backward was cut into, `parts`
    their outcomes by index; `rows` and `prompt` belong to a sample; `ended` to every other kind.
    `started`: the engine has been given some of it."""

    work: Work
    weights: WeightsKey
    atoms: tuple[tuple[int, int], ...] = ()
    max_new_tokens: int = 0
    payload_bytes: int = 0
    parts: dict[int, ForwardBackwardOutput | Failed] = field(default_factory=dict)
    rows: dict[int, SampledSequence | Failed] = field(default_factory=dict)
    prompt: SampleOutput | None = None
    ended: Result | Failed | None = None
    started: bool = False

    def item(self, now: float) -> Item:
        """`now` on the core's clock: the deadline counts from here."""
        work = self.work
        seconds = work.deadline_seconds
        return Item(
            request_id=work.request_id,
            owner=work.owner,
            session_id=work.session_id,
            lane=work.lane,
            seq_id=work.seq_id,
            kind=kind_of(work.operation),
            weights=self.weights,
            atoms=self._atom_tokens(),
            sample=self._sample_size(),
            deadline=None if seconds is None else now + seconds,
        )

    def _atom_tokens(self) -> tuple[int, ...]:
        operation = self.work.operation
        if not isinstance(operation, ForwardBackward):
            return ()
        lengths = [len(datum.tokens) for datum in operation.data]
        return tuple(sum(lengths[start:stop]) for start, stop in self.atoms)

    def _sample_size(self) -> SampleSize | None:
        operation = self.work.operation
        if not isinstance(operation, Sample):
            return None
        return SampleSize(len(operation.prompt), operation.num_samples, self.max_new_tokens)


def training_pending(work: Work, weights: WeightsKey, atom_tokens: int) -> Pending:
    operation = work.operation
    atoms: tuple[tuple[int, int], ...] = ()
    if isinstance(operation, ForwardBackward):
        atoms = cut_atoms([len(datum.tokens) for datum in operation.data], atom_tokens)
    return Pending(work, weights, atoms, payload_bytes=payload_bytes(operation))


def kind_of(operation: Operation) -> Kind:
    match operation:
        case ForwardBackward():
            return "forward_backward"
        case OptimStep():
            return "optim_step"
        case Sample():
            return "sample"
        case _:
            return "control"


def payload_bytes(operation: Operation) -> int:
    """Bytes of the arrays that a queued request holds."""
    match operation:
        case ForwardBackward(data=data):
            return sum(
                datum.tokens.nbytes + sum(a.nbytes for a in datum.loss_inputs.values())
                for datum in data
            )
        case Sample(prompt=prompt, target_prompt_logprobs=targets):
            return prompt.nbytes + (0 if targets is None else targets.values.nbytes)
        case _:
            return 0


def unused_tokens(pending: Pending, outcome: Outcome) -> int:
    """What a sample could have had beyond what it got."""
    operation = pending.work.operation
    if not isinstance(operation, Sample):
        return 0
    made = 0
    if isinstance(outcome, SampleOutput):
        made = sum(len(sequence.tokens) for sequence in outcome.sequences)
    return operation.num_samples * pending.max_new_tokens - made
