"""Log-probabilities of chosen targets and the gradient of a loss, without the full logits.

The rows of one atom go through the head in chunks that restart with each atom, so that their
shapes depend on the atom alone. A chunk's logits become log-probabilities, loss terms and (in
the same memory) the gradient of the logits, which goes back through the head at once; then the
next chunk takes the memory. Log-sum-exp is fp32 whatever the base model's dtype, and its
exponentials are the gradient's.

Nothing here waits for the device: whether the numbers are finite is seen later, once a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from openrl.engines.pytorch import losses
from openrl.engines.pytorch.attention import Span
from openrl.engines.pytorch.lora import Adapter, Factors
from openrl.engines.pytorch.segments import (
    MIN_ROWS,
    Cut,
    Segment,
    SharedInput,
    products,
    products_backward,
)

_CHUNK_ELEMENTS = 1 << 24
"""Logits of a chunk: 64 MiB in fp32, 112 rows at a vocabulary of 150,000."""


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What is asked of one atom's rows: S rows, K targets for each.

    `hidden_SD` after the final norm; `targets_SK` int64; `inputs` fp32 [S, K] by name. `spans`
    are the datums, counted from the atom's first row.
    """

    hidden_SD: Tensor
    targets_SK: Tensor
    spans: tuple[Span, ...]
    loss: str
    inputs: Mapping[str, Tensor]
    config: Mapping[str, float]
    adapter: Adapter | None


class Head(Protocol):
    """The linear that makes logits of hidden states; a `BaseModel` is one."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def softcap(self) -> float | None: ...

    @property
    def head(self) -> SharedInput: ...

    @property
    def head_index(self) -> int: ...

    def cap(self, logits_TV: Tensor) -> Tensor: ...

    def collect(self, grad_CV: Tensor, hidden_CD: Tensor) -> None:
        """Told of each chunk's gradient of the logits, for a head that trains itself."""


def chunk_bytes(vocab_size: int) -> int:
    """What a chunk takes: its logits, twice where they are soft-capped or narrower than fp32."""
    return 2 * 4 * chunk_rows(vocab_size) * vocab_size


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """Where a sweep puts gradients: the head adapter's are added to `factors`, those of the
    hidden states are written to `hidden_SD`."""

    factors: Factors
    hidden_SD: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """fp32 [S, K]."""

    logprobs_SK: Tensor
    terms: losses.Terms


def chunk_rows(vocab_size: int) -> int:
    """By the vocabulary alone; a multiple of `MIN_ROWS`."""
    return max(MIN_ROWS, _CHUNK_ELEMENTS // vocab_size // MIN_ROWS * MIN_ROWS)


@torch.no_grad()
def sweep(base: Head, task: Task, wanted: Wanted | None) -> Sweep:
    """A loss of tokens takes one sweep; a loss of sequences takes a second one for its gradient,
    since no slope is known before the sequence's last log-probability is.
    """
    token_loss = losses.TOKEN_LOSSES[task.loss]
    if task.loss not in losses.SEQUENCE_LOSSES:
        return _sweep(base, task, token_loss, task.inputs, wanted)
    first = _sweep(base, task, None, task.inputs, None)
    inputs = {**task.inputs, "sequence_ratio": _sequence_ratios(task, first.logprobs_SK)}
    if wanted is not None:
        return _sweep(base, task, token_loss, inputs, wanted)
    return Sweep(first.logprobs_SK, token_loss(first.logprobs_SK, inputs, task.config))


def _sequence_ratios(task: Task, logprobs_SK: Tensor) -> Tensor:
    return torch.cat(
        [
            losses.sequence_ratio(
                logprobs_SK[span.start : span.end], _rows(task.inputs, span.start, span.end)
            )
            for span in task.spans
        ]
    )


def _rows(inputs: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    return {name: value[start:end] for name, value in inputs.items()}


def _sweep(
    base: Head,
    task: Task,
    token_loss: losses.TokenLoss | None,
    inputs: Mapping[str, Tensor],
    wanted: Wanted | None,
) -> Sweep:
    total, step = task.hidden_SD.shape[0], chunk_rows(base.vocab_size)
    logprobs, terms = [], []
    for start in range(0, total, step):
        rows = slice(start, min(start + step, total))
        head = _Head(base, task.hidden_SD[rows], task.adapter, wanted)
        logprobs.append(head.logprobs(task.targets_SK[rows]))
        if token_loss is None:
            continue
        terms.append(token_loss(logprobs[-1], _rows(inputs, rows.start, rows.stop), task.config))
        if wanted is not None:
            wanted.hidden_SD[rows] = head.backward(task.targets_SK[rows], terms[-1].slopes)
    return Sweep(torch.cat(logprobs), _joined(terms, logprobs))


def _joined(parts: list[losses.Terms], logprobs: list[Tensor]) -> losses.Terms:
    if not parts:
        nothing = torch.zeros_like(torch.cat(logprobs))
        return losses.Terms(nothing, nothing)
    clipped = [part.clipped for part in parts if part.clipped is not None]
    return losses.Terms(
        torch.cat([part.terms for part in parts]),
        torch.cat([part.slopes for part in parts]),
        torch.cat(clipped) if clipped else None,
    )


class _Head:
    """The head on one chunk of rows, forward and backward, outside autograd."""

    def __init__(
        self, base: Head, hidden_CD: Tensor, adapter: Adapter | None, wanted: Wanted | None
    ) -> None:
        self._base, self._hidden_CD, self._wanted = base, hidden_CD, wanted
        rows = hidden_CD.shape[0]
        factors = None if wanted is None else wanted.factors
        self._cut = Cut((Segment(0, rows, adapter, factors),), rows)
        self._parts = self._cut.adapting(base.head_index)
        self._uncapped_CV: Tensor | None = None

    def logprobs(self, targets_CK: Tensor) -> Tensor:
        """fp32 [C, K] of the targets. Keeps exp(logit - peak) and its sum for `backward`."""
        base = self._base
        (raw_CV,), self._lows = products(self._hidden_CD, base.head, self._cut, self._parts)
        logits_CV = base.cap(raw_CV.float())
        if base.softcap is not None and self._wanted is not None:
            self._uncapped_CV = 1 - (logits_CV / base.softcap).square_()
        chosen_CK = logits_CV.gather(1, targets_CK)
        peak_C1 = logits_CV.amax(1, keepdim=True)
        self._exp_CV = logits_CV.sub_(peak_C1).exp_()
        self._sum_C1 = self._exp_CV.sum(1, keepdim=True)
        return chosen_CK.sub_(peak_C1).sub_(self._sum_C1.log())

    def backward(self, targets_CK: Tensor, slopes_CK: Tensor) -> Tensor:
        """Gradient of the rows [C, D], given d(loss)/d(logprob). With p the softmax,
        d(logprob_k)/d(logit_j) = [j = target_k] - p_j."""
        weights_C1 = -slopes_CK.sum(1, keepdim=True) / self._sum_C1
        grad_CV = self._exp_CV.mul_(weights_C1).scatter_add_(1, targets_CK, slopes_CK)
        if self._uncapped_CV is not None:
            grad_CV.mul_(self._uncapped_CV)
        grad_CV = grad_CV.to(self._hidden_CD.dtype)
        self._base.collect(grad_CV, self._hidden_CD)
        grad_CD = products_backward(
            (grad_CV,),
            self._hidden_CD,
            self._base.head,
            self._cut,
            self._parts,
            self._lows,
        )
        assert grad_CD is not None
        return grad_CD
