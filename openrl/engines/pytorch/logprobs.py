"""Log-probabilities of chosen targets and the gradient of a loss, without the full logits.

The rows of one atom go through the head in chunks that restart with each atom, so that their
shapes depend on the atom alone. A chunk's logits become log-probabilities, loss terms and (in
the same memory) the gradient of the logits, which goes back through the head at once; then the
next chunk takes the memory. Log-sum-exp is fp32 whatever the base model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.engines.pytorch import losses
from openrl.engines.pytorch.attention import Span
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.lora import Adapter, Factors
from openrl.engines.pytorch.segments import (
    MIN_ROWS,
    Cut,
    Segment,
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


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """fp32 [S, K], and the gradient of the loss by the hidden states [S, D] where asked for."""

    logprobs_SK: Tensor
    terms: losses.Terms
    inputs: Mapping[str, Tensor]
    grad_hidden_SD: Tensor | None


def chunk_rows(vocab_size: int) -> int:
    """By the vocabulary alone; a multiple of `MIN_ROWS`."""
    return max(MIN_ROWS, _CHUNK_ELEMENTS // vocab_size // MIN_ROWS * MIN_ROWS)


@torch.no_grad()
def sweep(base: BaseModel, task: Task, gradient: Factors | None) -> Sweep:
    """With `gradient`: adds the head adapter's gradient to it and forms the hidden states' too.

    A loss of tokens takes one sweep; a loss of sequences takes a second one for its gradient,
    since no slope is known before the sequence's last log-probability is.
    """
    token_loss = losses.TOKEN_LOSSES[task.loss]
    if task.loss not in losses.SEQUENCE_LOSSES:
        return _sweep(base, task, token_loss, task.inputs, gradient)
    first = _sweep(base, task, None, task.inputs, None)
    inputs = {**task.inputs, "sequence_ratio": _sequence_ratios(task, first.logprobs_SK)}
    if gradient is not None:
        return _sweep(base, task, token_loss, inputs, gradient)
    terms = token_loss(first.logprobs_SK, inputs, task.config)
    return Sweep(first.logprobs_SK, terms, inputs, None)


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
    base: BaseModel,
    task: Task,
    token_loss: losses.TokenLoss | None,
    inputs: Mapping[str, Tensor],
    gradient: Factors | None,
) -> Sweep:
    total, step = task.hidden_SD.shape[0], chunk_rows(base.vocab_size)
    logprobs, terms = [], []
    grad_SD = torch.empty_like(task.hidden_SD) if gradient is not None else None
    for start in range(0, total, step):
        end = min(start + step, total)
        head = _Head(base, task.hidden_SD[start:end], task.adapter, gradient)
        targets_CK = task.targets_SK[start:end]
        logits_CV = head.logits()
        lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
        logprobs.append(logits_CV.gather(1, targets_CK) - lse_C1)
        if token_loss is None:
            continue
        terms.append(token_loss(logprobs[-1], _rows(inputs, start, end), task.config))
        if grad_SD is not None:
            grad_SD[start:end] = head.backward(logits_CV, lse_C1, targets_CK, terms[-1].slopes)
    return Sweep(torch.cat(logprobs), _joined(terms, logprobs), inputs, grad_SD)


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
        self, base: BaseModel, hidden_CD: Tensor, adapter: Adapter | None, gradient: Factors | None
    ) -> None:
        self._base, self._hidden_CD = base, hidden_CD
        rows = hidden_CD.shape[0]
        self._cut = Cut((Segment(0, rows, adapter, gradient),), rows)
        self._parts = self._cut.adapting(base.head_index)
        self._lows: list[Tensor] = []

    def logits(self) -> Tensor:
        """fp32 [C, V], soft-capped."""
        base = self._base
        (logits_CV,), self._lows = products(self._hidden_CD, base.head, self._cut, self._parts)
        return base.cap(logits_CV.float())

    def backward(
        self, logits_CV: Tensor, lse_C1: Tensor, targets_CK: Tensor, slopes_CK: Tensor
    ) -> Tensor:
        """Gradient of the rows [C, D], given d(loss)/d(logprob). With p the softmax,
        d(logprob_k)/d(logit_j) = [j = target_k] - p_j. Uses up `logits_CV`."""
        softcap = self._base.softcap
        uncapped = 1 - (logits_CV / softcap).square_() if softcap is not None else None
        grad_CV = logits_CV.sub_(lse_C1).exp_().mul_(-slopes_CK.sum(1, keepdim=True))
        grad_CV.scatter_add_(1, targets_CK, slopes_CK)
        if uncapped is not None:
            grad_CV.mul_(uncapped)
        grad_CD = products_backward(
            (grad_CV.to(self._hidden_CD.dtype),),
            self._hidden_CD,
            self._base.head,
            self._cut,
            self._parts,
            self._lows,
        )
        assert grad_CD is not None
        return grad_CD
