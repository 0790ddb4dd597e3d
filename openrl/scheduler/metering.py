"""What finished work counts as: in an owner's usage by the hour, in its model's curves, and among
all answers. Whoever else wants to hear of each answer watches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from openrl.catalogue.ledgers import Bucket, UsageKind, UsageLedger, hour_of
from openrl.scheduler.core.events import Kind
from openrl.scheduler.curves import Curves
from openrl.scheduler.models import Models
from openrl.scheduler.pending import kind_of
from openrl.types import (
    ExternalWeightsSaved,
    Failed,
    ForwardBackward,
    ForwardBackwardOutput,
    OptimStepDone,
    Outcome,
    Sample,
    SampleOutput,
    SamplerWeightsSaved,
    WeightsSaved,
    Work,
)


class Meter:
    """`now` is in Unix seconds. What failed counts for nothing in usage. `answered` counts by kind
    and whether it went well, since the start."""

    def __init__(self, usage: UsageLedger, models: Models, now: Callable[[], float]) -> None:
        self._usage = usage
        self._models = models
        self._now = now
        self.curves = Curves()
        self.answered: Counter[tuple[Kind, bool]] = Counter()
        self.watchers: list[Callable[[Work, Outcome], None]] = []

    def count(self, work: Work, outcome: Outcome) -> None:
        self.answered[kind_of(work.operation), not isinstance(outcome, Failed)] += 1
        self._draw(work, outcome)
        for watch in self.watchers:
            watch(work, outcome)
        hour, base = hour_of(self._now()), self._base_of(work)
        for kind, amount in _amounts(work, outcome):
            self._usage.count(Bucket(work.owner, hour, work.session_id, base, kind), amount)

    def _draw(self, work: Work, outcome: Outcome) -> None:
        match work.operation, outcome:
            case ForwardBackward(forward_only=False), ForwardBackwardOutput(metrics=metrics):
                self.curves.add(work.lane, work.owner, self._now(), metrics)
            case _, OptimStepDone(version=version):
                self.curves.stepped(work.lane, version)

    def _base_of(self, work: Work) -> str:
        if work.target is not None:
            return work.target.base_model
        model = self._models.find(work.lane)
        return "" if model is None else model.base_model


def _amounts(work: Work, outcome: Outcome) -> Iterator[tuple[UsageKind, int]]:
    match work.operation, outcome:
        case ForwardBackward(data=data), ForwardBackwardOutput():
            yield "training", sum(len(datum.tokens) for datum in data)
        case Sample(prompt=prompt), SampleOutput(sequences=sequences) as output:
            cached = min(output.prompt_cache_hit_tokens, len(prompt))
            yield "prefill_cached", cached
            yield "prefill", len(prompt) - cached
            yield "sampled", sum(len(sequence.tokens) for sequence in sequences)
        case _, WeightsSaved() | ExternalWeightsSaved() | SamplerWeightsSaved(path=str()):
            yield "checkpoint", 1
