"""Runs training passes: many models' atoms in one packed forward and backward.

A pass is run as it comes; when memory does not suffice, its halves are run instead, down to
single atoms. That is safe because an atom's gradients stay in a buffer of its own until the atom
is known to be good.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrl.engines.base import (
    AtomPiece,
    CreateAdapter,
    LoadAdapter,
    OptimPass,
    OptimReport,
    SaveAdapter,
    TrainPass,
    TrainReport,
)
from openrl.engines.pytorch import checkpoint
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.datums import (
    AtomInputs,
    AtomNumbers,
    atom_inputs,
    atom_output,
    device_numbers,
    host_numbers,
)
from openrl.engines.pytorch.job import Job
from openrl.engines.pytorch.logprobs import Task, Wanted, sweep
from openrl.engines.pytorch.lora import Factors, fresh_adapter
from openrl.engines.pytorch.optim import Step, step_all
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.engines.pytorch.segments import Segment
from openrl.errors import NotFound, OpenRLError, OutOfMemory, ServerError, UserError
from openrl.types import Failed, ForwardBackwardOutput, ModelId, OptimStepDone, RequestId

Outcome = ForwardBackwardOutput | Failed


@dataclass(frozen=True, slots=True, eq=False)
class _Atom:
    """One piece of the pass, ready to run. `place` is its place in the pass."""

    place: int
    piece: AtomPiece
    job: Job
    inputs: AtomInputs

    @property
    def rows(self) -> int:
        return self.inputs.spans[-1].end


class Trainer:
    """All jobs over one base model. `name` is the base model's public name."""

    def __init__(self, base: BaseModel, name: str) -> None:
        self._base = base
        self._name = name
        self._jobs: dict[ModelId, Job] = {}
        self._slots = 0

    @property
    def count(self) -> int:
        return len(self._jobs)

    def job(self, model_id: ModelId) -> Job:
        if model_id not in self._jobs:
            raise NotFound(f"model {model_id} has no weights in this engine")
        return self._jobs[model_id]

    # --- forward and backward ---------------------------------------------------------------

    def train(self, work: TrainPass) -> TrainReport:
        run = _TrainRun(self._base)
        atoms = self._prepare(work.pieces, run)
        running = {piece.request_id for piece in work.pieces}
        for job in {id(atom.job): atom.job for atom in atoms}.values():
            job.discard_all_but(running)
        limit = self._base.fused_rows
        # Rows that want no gradient would only make the backward pass longer.
        for forward_only in (False, True):
            for some in _runs([a for a in atoms if a.piece.forward_only == forward_only], limit):
                run.atoms(some)
        return TrainReport(tuple(run.outcomes[place] for place in range(len(work.pieces))))

    def _prepare(self, pieces: Sequence[AtomPiece], run: _TrainRun) -> list[_Atom]:
        """In slot order; the atoms of one request stay in theirs."""
        atoms = []
        for place, piece in enumerate(pieces):
            try:
                job = self.job(piece.model_id)
                atoms.append(_Atom(place, piece, job, atom_inputs(piece, self._base.device)))
            except OpenRLError as error:
                run.outcomes[place] = Failed(error)
        return sorted(atoms, key=lambda atom: atom.job.slot)

    # --- optimizer --------------------------------------------------------------------------

    def optimize(self, work: OptimPass) -> OptimReport:
        """Steps of different models are one kernel call where their settings are equal."""
        outcomes: dict[int, OptimStepDone | Failed] = {}
        steps: dict[int, Step] = {}
        for place, piece in enumerate(work.pieces):
            try:
                job = self.job(piece.model_id)
            except OpenRLError as error:
                outcomes[place] = Failed(error)
                continue
            if job.gradient is None:
                outcomes[place] = OptimStepDone({"skipped_no_gradients": 1.0}, job.version)
            else:
                steps[place] = Step(job.optimizer, job.gradient.flat, piece.adam)
        for place, done in zip(steps, step_all(list(steps.values())), strict=True):
            outcomes[place] = self._stepped(self.job(work.pieces[place].model_id), done)
        return OptimReport(tuple(outcomes[place] for place in range(len(work.pieces))))

    @staticmethod
    def _stepped(job: Job, done: dict[str, float] | UserError) -> OptimStepDone | Failed:
        if isinstance(done, UserError):
            return Failed(done)
        job.adapter.refresh()
        job.discard_all_but(set())
        job.clear_gradient()
        job.version += 1
        return OptimStepDone(done, job.version)

    # --- adapters ---------------------------------------------------------------------------

    def create(self, order: CreateAdapter) -> None:
        if order.model_id in self._jobs:
            raise UserError(f"model {order.model_id} exists already")
        base = self._base
        if order.source is None:
            job = Job(self._slots, fresh_adapter(base.linears, order.lora, base.device, base.dtype))
        else:
            adapter = checkpoint.read_adapter(order.source, base.linears, base.device, base.dtype)
            checkpoint.require_same(adapter.config, order.lora)
            job = Job(self._slots, adapter)
            if order.with_optimizer:
                job = self._with_optimizer(job, order)
        self._jobs[order.model_id] = job
        self._slots += 1

    def _with_optimizer(self, job: Job, order: CreateAdapter) -> Job:
        assert order.source is not None
        size = job.adapter.layout.size
        state = checkpoint.read_optimizer(order.source, size, self._base.device)
        restored = Job(job.slot, job.adapter, state.moments, state.version)
        if state.gradient is not None:
            restored.gradient = job.adapter.layout.view(state.gradient)
        return restored

    def load(self, order: LoadAdapter) -> None:
        job, base = self.job(order.model_id), self._base
        adapter = checkpoint.read_adapter(order.source, base.linears, base.device, base.dtype)
        checkpoint.require_same(adapter.config, job.adapter.config)
        moments = None
        if order.with_optimizer:
            size = job.adapter.layout.size
            moments = checkpoint.read_optimizer(order.source, size, base.device).moments
        job.replace(adapter, moments)

    def save(self, order: SaveAdapter) -> None:
        job = self.job(order.model_id)
        checkpoint.write_adapter(job.adapter, order.directory, self._name)
        if order.with_optimizer:
            checkpoint.write_optimizer(job, order.directory)

    def drop(self, model_id: ModelId) -> None:
        self._jobs.pop(model_id, None)


class _TrainRun:
    """One pass: `outcomes` by place fills up as atoms are run."""

    def __init__(self, base: BaseModel) -> None:
        self._base = base
        self.outcomes: dict[int, Outcome] = {}
        self._failed: dict[RequestId, OpenRLError] = {}

    def atoms(self, atoms: Sequence[_Atom]) -> None:
        """Runs atoms of one kind (all forward_only or none), in order."""
        if not atoms:
            return
        try:
            self._together(atoms)
            return
        except (RuntimeError, MemoryError) as error:
            # Only the words are kept: the error's frames hold the tensors that filled memory.
            problem = _resource_error(error, atoms)
        if len(atoms) == 1:
            self._fail(atoms[0], problem)
            return
        half = len(atoms) // 2
        self.atoms(atoms[:half])
        self.atoms(atoms[half:])

    def _together(self, atoms: Sequence[_Atom]) -> None:
        """The host waits for the device once, when everything has been queued. An atom that
        turns out bad has spoilt nothing but its own rows and its own buffer."""
        training = not atoms[0].piece.forward_only
        rows = lay_out([d.tokens for atom in atoms for d in atom.piece.data], self._base.device)
        segments = _segments(atoms, training)
        with torch.set_grad_enabled(training):
            hidden_TD = self._base.hidden(training_batch(rows, segments))
            grad_TD = torch.zeros_like(hidden_TD) if training else None
            results = [
                self._sweep(atom, segment, hidden_TD.detach(), grad_TD)
                for atom, segment in zip(atoms, segments, strict=True)
            ]
            if grad_TD is not None and hidden_TD.requires_grad:
                hidden_TD.backward(grad_TD)
        buffers = [segment.gradient for segment in segments]
        for atom, buffer, numbers in zip(atoms, buffers, _fetch(results, buffers), strict=True):
            self._finish(atom, buffer, numbers)

    def _sweep(
        self, atom: _Atom, segment: Segment, hidden_TD: Tensor, grad_TD: Tensor | None
    ) -> Tensor:
        rows = slice(segment.start, segment.end)
        task = Task(
            hidden_SD=hidden_TD[rows],
            targets_SK=atom.inputs.targets_SK,
            spans=atom.inputs.spans,
            loss=atom.inputs.spec.name,
            inputs=atom.inputs.inputs,
            config=atom.inputs.config,
            adapter=atom.job.adapter,
        )
        wanted = None
        if segment.gradient is not None and grad_TD is not None:
            wanted = Wanted(segment.gradient, grad_TD[rows])
        return device_numbers(sweep(self._base, task, wanted))

    def _finish(self, atom: _Atom, gradient: Factors | None, numbers: _Numbers) -> None:
        """Books one atom. One that follows a failed atom of its request fails with it."""
        piece, job = atom.piece, atom.job
        try:
            if (earlier := self._failed.get(piece.request_id)) is not None:
                raise earlier
            output = atom_output(piece, atom.inputs, numbers.atom)
            if gradient is not None and not _finite(gradient, numbers.gradient_sum):
                first, last = piece.start, piece.start + len(piece.data) - 1
                raise UserError(f"the gradient of datums {first} to {last} is not finite")
        except OpenRLError as error:
            self._fail(atom, error)
            return
        self.outcomes[atom.place] = output
        if gradient is not None:
            job.add_atom(piece.request_id, gradient)
            if piece.last:
                job.commit(piece.request_id)

    def _fail(self, atom: _Atom, error: OpenRLError) -> None:
        request_id = atom.piece.request_id
        self._failed.setdefault(request_id, error)
        atom.job.discard(request_id)
        self.outcomes[atom.place] = Failed(self._failed[request_id])


@dataclass(frozen=True, slots=True, eq=False)
class _Numbers:
    atom: AtomNumbers
    gradient_sum: float


def _fetch(results: Sequence[Tensor], buffers: Sequence[Factors | None]) -> Iterator[_Numbers]:
    """Brings to the host, in one transfer, what came of all atoms."""
    sums = [results[0].new_zeros(()) if buffer is None else buffer.flat.sum() for buffer in buffers]
    packed = torch.cat([torch.stack(sums), *(result.flatten() for result in results)])
    numbers = packed.cpu().numpy()
    start = len(sums)
    for place, result in enumerate(results):
        end = start + result.numel()
        atom = host_numbers(numbers[start:end], result.shape)
        yield _Numbers(atom, float(numbers[place]))
        start = end


def _finite(gradient: Factors, total: float) -> bool:
    """A sum is finite only if its terms are; it may overflow though they are."""
    return math.isfinite(total) or bool(gradient.flat.isfinite().all())


def _runs(atoms: Sequence[_Atom], limit: int | None) -> Iterator[list[_Atom]]:
    """Cuts a pass into runs of at most `limit` rows, or of one atom. How atoms are put together
    changes no bit of their results, only the time."""
    run: list[_Atom] = []
    rows = 0
    for atom in atoms:
        if run and limit is not None and rows + atom.rows > limit:
            yield run
            run, rows = [], 0
        run.append(atom)
        rows += atom.rows
    if run:
        yield run


def _segments(atoms: Sequence[_Atom], training: bool) -> list[Segment]:
    ends = np.cumsum([atom.rows for atom in atoms]).tolist()
    return [
        Segment(
            end - atom.rows,
            end,
            atom.job.adapter,
            atom.job.empty_buffer() if training else None,
        )
        for atom, end in zip(atoms, ends, strict=True)
    ]


def _resource_error(error: Exception, atoms: Sequence[_Atom]) -> OpenRLError:
    tokens = sum(atom.rows for atom in atoms)
    longest = max(len(datum.tokens) for atom in atoms for datum in atom.piece.data)
    words = str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "memory" in words.lower():
        return OutOfMemory(
            f"{tokens} tokens in one atom, the longest datum {longest}, do not fit in memory: "
            "send shorter datums"
        )
    return ServerError(f"the engine failed on an atom of {tokens} tokens: {words}")
