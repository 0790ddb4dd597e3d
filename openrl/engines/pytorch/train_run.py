"""One run of a training pass: atoms of many models in one packed forward and backward.

Atoms are run together as they come; when memory does not suffice, their halves are run instead,
down to single atoms. That is safe because an atom's gradients stay in a buffer of its own until
the atom is known to be good.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrl.engines.base import AtomPiece
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.datums import (
    AtomInputs,
    AtomNumbers,
    atom_output,
    device_numbers,
    host_numbers,
)
from openrl.engines.pytorch.full import FullHead, FullWeights, Parameters, Skeleton, collected
from openrl.engines.pytorch.job import Job
from openrl.engines.pytorch.logprobs import Head, Task, Wanted, sweep
from openrl.engines.pytorch.lora import Factors
from openrl.engines.pytorch.packing import lay_out, training_batch
from openrl.engines.pytorch.segments import Segment
from openrl.errors import OpenRLError, OutOfMemory, ServerError, UserError, in_words
from openrl.types import Failed, ForwardBackwardOutput, RequestId

log = logging.getLogger("openrl")

Outcome = ForwardBackwardOutput | Failed
_Result = tuple[Outcome, Factors | None]  # with the atom's own gradient


@dataclass(frozen=True, slots=True, eq=False)
class Atom:
    """One piece of the pass, ready to run. `place` is its place in the pass."""

    place: int
    piece: AtomPiece
    job: Job
    inputs: AtomInputs

    @property
    def full(self) -> FullWeights | None:
        """The weights of a model that trains all of them."""
        return self.job.adapter if isinstance(self.job.adapter, FullWeights) else None

    @property
    def rows(self) -> int:
        return self.inputs.spans[-1].end


class TrainRun:
    """One pass: `outcomes` by place fills up as atoms are run."""

    def __init__(
        self, base: BaseModel, activation_bytes: int | None, skeleton: Skeleton | None = None
    ) -> None:
        """`skeleton` is the base model's, for atoms of full models."""
        self._base = base
        self._skeleton = skeleton or Skeleton(base)
        self._activation_bytes = activation_bytes
        self.outcomes: dict[int, Outcome] = {}
        self._failed: dict[RequestId, OpenRLError] = {}

    def atoms(self, atoms: Sequence[Atom]) -> None:
        """Runs atoms of one kind (all forward_only or none), in order."""
        if not atoms:
            return
        problem = self._try(atoms, self._too_large(atoms))
        if problem is None:
            return
        if len(atoms) == 1:
            if isinstance(problem, OutOfMemory) and not self._too_large(atoms):
                problem = self._try(atoms, recompute=True)
            if problem is not None:
                self._fail(atoms[0], problem)
            return
        half = len(atoms) // 2
        self.atoms(atoms[:half])
        self.atoms(atoms[half:])

    def _too_large(self, atoms: Sequence[Atom]) -> bool:
        """Whether what the backward pass needs would not fit if it were all kept."""
        needed = sum(atom.rows for atom in atoms) * self._base.row_bytes
        return self._activation_bytes is not None and needed > self._activation_bytes

    def _try(self, atoms: Sequence[Atom], recompute: bool) -> OpenRLError | None:
        """What kept the atoms from being run, if anything did. Nothing is booked before all of
        them have been run, lest those that are run again count twice."""
        try:
            if (full := atoms[0].full) is not None:
                results = self._alone(atoms[0], full)
            else:
                results = self._together(atoms, recompute)
        except Exception as error:
            # Whatever it is, atoms that run without the culprit need not know. Only the words are
            # kept: the error's frames hold the tensors that filled memory.
            if len(atoms) == 1 and not isinstance(error, (RuntimeError, MemoryError)):
                log.exception("an atom of %s cannot be run", atoms[0].piece.request_id)
            return _resource_error(error, atoms)
        for atom, (outcome, gradient) in zip(atoms, results, strict=True):
            self._book(atom, outcome, gradient)
        return None

    def _together(self, atoms: Sequence[Atom], recompute: bool) -> list[_Result]:
        """The host waits for the device once, when everything has been queued. An atom that
        turns out bad has spoilt nothing but its own rows and its own buffer."""
        training = not atoms[0].piece.forward_only
        rows = lay_out([d.tokens for atom in atoms for d in atom.piece.data], self._base.device)
        segments = _segments(atoms, training)
        with torch.set_grad_enabled(training):
            hidden_TD = self._base.hidden(training_batch(rows, segments), recompute)
            grad_TD = torch.zeros_like(hidden_TD) if training else None
            results = [
                self._sweep(self._base, atom, segment, hidden_TD.detach(), grad_TD)
                for atom, segment in zip(atoms, segments, strict=True)
            ]
            if grad_TD is not None and hidden_TD.requires_grad:
                hidden_TD.backward(grad_TD)
        return _settled(atoms, results, [segment.gradient for segment in segments])

    def _alone(self, atom: Atom, full: FullWeights) -> list[_Result]:
        """An atom of a full model, on weights of its own."""
        training = not atom.piece.forward_only
        buffer = atom.job.empty_buffer() if training else None
        into = buffer if isinstance(buffer, Parameters) else None
        rows = lay_out([d.tokens for d in atom.piece.data], self._base.device)
        segment = Segment(0, atom.rows, None, buffer)
        with torch.set_grad_enabled(training), collected(full.weights, into) as weights:
            hidden_TD = self._skeleton.hidden(training_batch(rows, (segment,)), weights)
            grad_TD = torch.zeros_like(hidden_TD) if training else None
            head = FullHead(self._base, full, into)
            numbers = self._sweep(head, atom, segment, hidden_TD.detach(), grad_TD)
            if grad_TD is not None:
                hidden_TD.backward(grad_TD)
        return _settled([atom], [numbers], [buffer])

    @staticmethod
    def _sweep(
        head: Head, atom: Atom, segment: Segment, hidden_TD: Tensor, grad_TD: Tensor | None
    ) -> Tensor:
        rows = slice(segment.start, segment.end)
        task = Task(
            hidden_SD=hidden_TD[rows],
            targets_SK=atom.inputs.targets_SK,
            spans=atom.inputs.spans,
            loss=atom.inputs.spec.name,
            inputs=atom.inputs.inputs,
            config=atom.inputs.config,
            adapter=segment.adapter,
        )
        wanted = None
        if segment.gradient is not None and grad_TD is not None:
            wanted = Wanted(segment.gradient, grad_TD[rows])
        return device_numbers(sweep(head, task, wanted))

    def _book(self, atom: Atom, outcome: Outcome, gradient: Factors | None) -> None:
        """One that follows a failed atom of its request fails with it."""
        request_id = atom.piece.request_id
        if (earlier := self._failed.get(request_id)) is not None:
            self._fail(atom, earlier)
        elif isinstance(outcome, Failed):
            self._fail(atom, outcome.error)
        else:
            self.outcomes[atom.place] = outcome
            if gradient is not None:
                atom.job.add_atom(request_id, gradient)
                if atom.piece.last:
                    atom.job.commit(request_id)

    def fail(self, place: int, request_id: RequestId, error: OpenRLError) -> None:
        """And with it what follows of its request, whose first error counts."""
        self.outcomes[place] = Failed(self._failed.setdefault(request_id, error))

    def _fail(self, atom: Atom, error: OpenRLError) -> None:
        self.fail(atom.place, atom.piece.request_id, error)
        atom.job.discard(atom.piece.request_id)


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


def _settled(
    atoms: Sequence[Atom], results: Sequence[Tensor], buffers: Sequence[Factors | None]
) -> list[_Result]:
    return [
        (_judged(atom.piece, atom.inputs, buffer, numbers), buffer)
        for atom, buffer, numbers in zip(atoms, buffers, _fetch(results, buffers), strict=True)
    ]


def _judged(
    piece: AtomPiece, inputs: AtomInputs, gradient: Factors | None, numbers: _Numbers
) -> Outcome:
    try:
        output = atom_output(piece, inputs, numbers.atom)
    except OpenRLError as error:
        return Failed(error)
    if gradient is not None and not _finite(gradient, numbers.gradient_sum):
        first, last = piece.start, piece.start + len(piece.data) - 1
        return Failed(UserError(f"the gradient of datums {first} to {last} is not finite"))
    return output


def _finite(gradient: Factors, total: float) -> bool:
    """A sum is finite only if its terms are; it may overflow though they are."""
    return math.isfinite(total) or bool(gradient.flat.isfinite().all())


def runs_of(atoms: Sequence[Atom], limit: int | None) -> Iterator[list[Atom]]:
    """Cuts a pass into runs of at most `limit` rows, or of one atom; an atom of a full model is
    a run. How atoms are put together
    changes no bit of their results, only the time."""
    run: list[Atom] = []
    rows = 0
    for atom in atoms:
        apart = run and (atom.full is not None or run[0].full is not None)
        if apart or (run and limit is not None and rows + atom.rows > limit):
            yield run
            run, rows = [], 0
        run.append(atom)
        rows += atom.rows
    if run:
        yield run


def _segments(atoms: Sequence[Atom], training: bool) -> list[Segment]:
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


def _resource_error(error: Exception, atoms: Sequence[Atom]) -> OpenRLError:
    tokens = sum(atom.rows for atom in atoms)
    longest = max(len(datum.tokens) for atom in atoms for datum in atom.piece.data)
    words = in_words(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "memory" in words.lower():
        return OutOfMemory(
            f"{tokens} tokens in one atom, the longest datum {longest}, do not fit in memory: "
            "send shorter datums"
        )
    return ServerError(f"the engine failed on an atom of {tokens} tokens: {words}")
