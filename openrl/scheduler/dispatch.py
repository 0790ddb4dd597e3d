"""From the core's decisions to engine passes, and from an engine's reports to events. Pure.

The core names requests; here they get their payloads, and what an engine hands back goes to its
request. A request that was refused meanwhile is gone from the backlog: its parts are dropped,
but the core still hears of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from openrl.engines.base import (
    AdapterSource,
    AtomPiece,
    ControlPass,
    ControlReport,
    DecodePass,
    DecodeReport,
    OptimPass,
    OptimPiece,
    OptimReport,
    Pass,
    Report,
    RowId,
    RowReport,
    RowStart,
    TrainPass,
    TrainReport,
)
from openrl.errors import OpenRLError
from openrl.scheduler.backlog import Backlog
from openrl.scheduler.core.events import (
    PartEnded,
    RowProgress,
    StartDecode,
    StartOptim,
    StartTrain,
)
from openrl.scheduler.pending import Pending
from openrl.types import (
    Failed,
    ForwardBackward,
    ModelId,
    OptimStep,
    RequestId,
    Sample,
    SamplerTarget,
)

Locate = Callable[[SamplerTarget], Path | None]
"""Where a version can be read from; None when it lives in the engine's memory alone."""


# --- decisions to passes -------------------------------------------------------------------


def train_pass(start: StartTrain, backlog: Backlog) -> TrainPass:
    pieces = tuple(atom_piece(backlog.get(request), index) for request, index in start.atoms)
    return TrainPass(start.weights, pieces)


def atom_piece(pending: Pending, index: int) -> AtomPiece:
    work = pending.work
    operation = work.operation
    assert isinstance(operation, ForwardBackward)
    start, stop = pending.atoms[index]
    return AtomPiece(
        request_id=work.request_id,
        model_id=ModelId(work.lane),
        start=start,
        data=operation.data[start:stop],
        loss_fn=operation.loss_fn,
        loss_fn_config=operation.loss_fn_config,
        forward_only=operation.forward_only,
        last=index == len(pending.atoms) - 1,
    )


def optim_pass(start: StartOptim, backlog: Backlog) -> OptimPass:
    return OptimPass(start.weights, tuple(_step(backlog.get(r)) for r in start.requests))


def _step(pending: Pending) -> OptimPiece:
    operation = pending.work.operation
    assert isinstance(operation, OptimStep)
    return OptimPiece(pending.work.request_id, ModelId(pending.work.lane), operation.adam)


def decode_pass(
    start: StartDecode, backlog: Backlog, locate: Locate, orphans: Iterable[RowId]
) -> DecodePass:
    """`orphans` are rows that a failed pass may have left in the engine."""
    admit = tuple(_row_start(backlog.get(r), indexes, locate) for r, indexes in start.admit)
    drop = tuple(dict.fromkeys((*start.drop, *orphans)))
    resume, preempt = start.resume, start.preempt
    return DecodePass(start.weights, admit, resume, preempt, drop, start.steps, start.seconds)


def _row_start(pending: Pending, indexes: tuple[int, ...], locate: Locate) -> RowStart:
    sample, target = pending.work.operation, pending.work.target
    assert isinstance(sample, Sample)
    assert target is not None
    adapter = None
    if target.version is not None:
        adapter = AdapterSource(target.version, locate(target))
    return RowStart(pending.work.request_id, sample, adapter, indexes, pending.max_new_tokens)


def by_model(pieces: Iterable[AtomPiece | OptimPiece]) -> list[list[int]]:
    """The places of each model's."""
    places: dict[ModelId, list[int]] = {}
    for place, piece in enumerate(pieces):
        places.setdefault(piece.model_id, []).append(place)
    return list(places.values())


def part(work: TrainPass | OptimPass, places: Iterable[int]) -> TrainPass | OptimPass:
    match work:
        case TrainPass(weights=weights, pieces=pieces):
            return TrainPass(weights, tuple(pieces[place] for place in places))
        case OptimPass(weights=weights, pieces=steps):
            return OptimPass(weights, tuple(steps[place] for place in places))


# --- reports to events ---------------------------------------------------------------------


def train_parts(start: StartTrain, report: TrainReport, backlog: Backlog) -> tuple[PartEnded, ...]:
    for (request_id, index), outcome in zip(start.atoms, report.outcomes, strict=True):
        if pending := backlog.find(request_id):
            pending.parts[index] = outcome
    return _ended((r for r, _ in start.atoms), report.outcomes)


def optim_parts(start: StartOptim, report: OptimReport, backlog: Backlog) -> tuple[PartEnded, ...]:
    for request_id, outcome in zip(start.requests, report.outcomes, strict=True):
        if pending := backlog.find(request_id):
            pending.ended = outcome
    return _ended(start.requests, report.outcomes)


def _ended(requests: Iterable[RequestId], outcomes: Iterable[object]) -> tuple[PartEnded, ...]:
    return tuple(
        PartEnded(request_id, not isinstance(outcome, Failed))
        for request_id, outcome in zip(requests, outcomes, strict=True)
    )


def decode_rows(report: DecodeReport, backlog: Backlog) -> tuple[RowProgress, ...]:
    for request_id, prompt in report.prompts.items():
        if pending := backlog.find(request_id):
            pending.prompt = prompt
    for row in report.rows:
        if (pending := backlog.find(row.row.request_id)) and row.ended is not None:
            pending.rows[row.row.sample] = row.ended
    return tuple(map(_progress, report.rows))


def _progress(report: RowReport) -> RowProgress:
    return RowProgress(
        row=report.row,
        new_tokens=report.new_tokens,
        kv_blocks=report.kv_blocks,
        ended=report.ended is not None,
        ok=not isinstance(report.ended, Failed),
    )


def failed_report(work: Pass, error: OpenRLError, running: Iterable[RowId]) -> Report:
    """What an engine would have said, had it failed every request of the pass by itself."""
    failed = Failed(error)
    match work:
        case TrainPass(pieces=pieces):
            return TrainReport(tuple(failed for _ in pieces))
        case OptimPass(pieces=steps):
            return OptimReport(tuple(failed for _ in steps))
        case ControlPass():
            return ControlReport(error)
        case DecodePass():
            return DecodeReport(tuple(RowReport(row, 0, 0, failed) for row in running), {})
