"""What finished work counts as in an owner's usage: tokens and checkpoints, by the hour."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from openrl.catalogue.ledgers import Bucket, UsageKind, UsageLedger, hour_of
from openrl.scheduler.models import Models
from openrl.types import (
    ExternalWeightsSaved,
    ForwardBackward,
    ForwardBackwardOutput,
    Outcome,
    Sample,
    SampleOutput,
    SamplerWeightsSaved,
    WeightsSaved,
    Work,
)


class Meter:
    """`now` is in Unix seconds. What failed counts for nothing."""

    def __init__(self, usage: UsageLedger, models: Models, now: Callable[[], float]) -> None:
        self._usage = usage
        self._models = models
        self._now = now

    def count(self, work: Work, outcome: Outcome) -> None:
        hour, base = hour_of(self._now()), self._base_of(work)
        for kind, amount in _amounts(work, outcome):
            self._usage.count(Bucket(work.owner, hour, work.session_id, base, kind), amount)

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
