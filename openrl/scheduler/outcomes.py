"""Many parts, one answer. Pure.

Metrics merge by the reduction that their name ends with, as the protocol's clients merge the
chunks of a request; a metric that some part lacks is left out. Means come out as if the request
had not been cut: clients, which know the datums alone, weigh their own chunks by those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from openrl.errors import ServerError
from openrl.scheduler.pending import Pending
from openrl.types import (
    ACTIVE_TOKENS,
    Failed,
    ForwardBackward,
    ForwardBackwardOutput,
    Outcome,
    Sample,
    SampledSequence,
)


def outcome_of(request: Pending) -> Outcome:
    match request.work.operation:
        case ForwardBackward():
            return _merged_parts(request)
        case Sample():
            return _assembled_sample(request)
        case _:
            return request.ended or _incomplete(request)


def _incomplete(request: Pending) -> Failed:
    return Failed(ServerError(f"{request.work.request_id} ended without all of its parts"))


def _merged_parts(request: Pending) -> Outcome:
    parts: list[ForwardBackwardOutput] = []
    for index in sorted(request.parts):
        part = request.parts[index]
        if isinstance(part, Failed):
            return part
        parts.append(part)
    return merge(parts) if len(parts) == len(request.atoms) else _incomplete(request)


def merge(parts: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """`parts` are of one request, in its order, and not none."""
    outputs = tuple(output for part in parts for output in part.outputs)
    shared = [key for key in parts[0].metrics if all(key in part.metrics for part in parts)]
    counts = _counts(parts)
    metrics = {key: _reduce(key, [p.metrics[key] for p in parts], counts) for key in shared}
    return ForwardBackwardOutput(outputs, metrics)


def _counts(parts: Sequence[ForwardBackwardOutput]) -> list[float]:
    """How many records each part's means are over."""
    active = [part.metrics.get(ACTIVE_TOKENS, 0.0) for part in parts]
    return active if any(active) else [float(len(part.outputs)) for part in parts]


def _reduce(key: str, values: Sequence[float], counts: Sequence[float]) -> float:
    """`counts` are the records that each value speaks for."""
    match key.rpartition(":")[2]:
        case "sum":
            return sum(values)
        case "mean":
            return sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)
        case "min":
            return min(values)
        case "max":
            return max(values)
        case _:  # "unique", and whatever has no rule: the first speaks for all
            return values[0]


def _assembled_sample(request: Pending) -> Outcome:
    sample = request.work.operation
    assert isinstance(sample, Sample)
    failed = [row for row in request.rows.values() if isinstance(row, Failed)]
    if failed:
        return failed[0]
    sequences = _in_order(request.rows)
    if len(sequences) != sample.num_samples or request.prompt is None:
        return _incomplete(request)
    return replace(request.prompt, sequences=sequences)


def _in_order(rows: Mapping[int, SampledSequence | Failed]) -> tuple[SampledSequence, ...]:
    ordered = (rows[index] for index in sorted(rows))
    return tuple(row for row in ordered if isinstance(row, SampledSequence))
