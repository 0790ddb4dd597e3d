"""The linear product that many adapters share.

A packed batch is cut into `Segment`s: runs of rows that belong to one atom of one request and so
to one adapter. A linear makes its base product once for all rows, then adds to each segment's
rows `(x A^T) B^T * alpha / rank`. Nothing of one segment's low-rank products depends on another
segment, so a job's numbers are the same to the bit in company and alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from openrl.engines.pytorch.lora import Adapter, Factor, Factors

MIN_ROWS = 16
"""A product's rows do not depend on how many rows there are, from this many rows on."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Rows `start … end` of a packed batch, all of one adapter (None: the plain base model).

    `gradient` receives, in the backward pass, the sum of this segment's gradients; None when
    nobody wants them.
    """

    start: int
    end: int
    adapter: Adapter | None
    gradient: Factors | None = None


class StackedAdapters(ABC):
    """The form for batches without gradients whose rows mix adapters (sampling): may stand
    wherever `Sequence[Segment]` does."""

    @abstractmethod
    def add_to(self, y_TN: Tensor, x_TD: Tensor, index: int) -> None:
        """Adds each row's low-rank product of linear `index` to `y_TN`, in place."""


def adapted_linear(
    x_TD: Tensor,
    weight_ND: Tensor,
    bias_N: Tensor | None,
    index: int,
    segments: Sequence[Segment] | StackedAdapters,
    anchor: Tensor,
) -> Tensor:
    """`x W^T + bias` plus each segment's low-rank product; [T, N].

    `anchor` is any tensor that requires grad: it makes the result require grad when the inputs
    (the embeddings, under the first layer) do not.
    """
    if isinstance(segments, StackedAdapters):
        y_TN = F.linear(x_TD, weight_ND, bias_N)
        segments.add_to(y_TN, x_TD, index)
        return y_TN
    active = adapting(segments, index)
    if not active:
        return F.linear(x_TD, weight_ND, bias_N)
    if not torch.is_grad_enabled():
        return product(x_TD, weight_ND, bias_N, index, active)[0]
    apply = cast(Any, _AdaptedLinear).apply
    return cast(Tensor, apply(x_TD, anchor, weight_ND, bias_N, index, tuple(active)))


def adapting(segments: Sequence[Segment], index: int) -> list[Segment]:
    """The segments whose adapter adapts linear `index`."""
    return [s for s in segments if s.adapter and s.adapter.compute.by_linear[index]]


def _factor(segment: Segment, index: int) -> tuple[Factor, float]:
    adapter = segment.adapter
    assert adapter is not None
    factor = adapter.compute.by_linear[index]
    assert factor is not None
    return factor, adapter.scale


def _rows(x_TD: Tensor, segment: Segment) -> Tensor:
    """The segment's rows, padded with zero rows up to `MIN_ROWS`."""
    x_SD = x_TD[segment.start : segment.end]
    missing = MIN_ROWS - x_SD.shape[0]
    return F.pad(x_SD, (0, 0, 0, missing)) if missing > 0 else x_SD


def product(
    x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, index: int, active: Sequence[Segment]
) -> tuple[Tensor, list[Tensor]]:
    """The product outside autograd, and each active segment's `x A^T` [S, R]."""
    y_TN = F.linear(x_TD, weight_ND, bias_N)
    lows = []
    for segment in active:
        factor, scale = _factor(segment, index)
        size = segment.end - segment.start
        low_SR = _rows(x_TD, segment) @ factor.a_RD.T
        if size >= MIN_ROWS:
            y_TN[segment.start : segment.end].addmm_(low_SR, factor.b_NR.T, alpha=scale)
        else:
            delta_SN = low_SR @ factor.b_NR.T
            y_TN[segment.start : segment.end].add_(delta_SN[:size], alpha=scale)
        lows.append(low_SR[:size])
    return y_TN, lows


class _AdaptedLinear(torch.autograd.Function):
    """Adapter gradients go straight into each segment's own buffer, not through autograd: one
    buffer holds an atom's sum, and no tensor of the size of all adapters is ever made."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        anchor: Tensor,
        weight_ND: Tensor,
        bias_N: Tensor | None,
        index: int,
        active: tuple[Segment, ...],
    ) -> Tensor:
        y_TN, lows = product(x_TD, weight_ND, bias_N, index, active)
        ctx.save_for_backward(x_TD, weight_ND, *lows)
        ctx.index, ctx.active = index, active
        return y_TN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TN,) = grads
        x_TD, weight_ND, *lows = ctx.saved_tensors
        wanted = ctx.needs_input_grad[0]
        grad_x_TD = product_backward(grad_TN, x_TD, weight_ND, ctx.index, ctx.active, lows, wanted)
        return grad_x_TD, None, None, None, None, None


def product_backward(
    grad_TN: Tensor,
    x_TD: Tensor,
    weight_ND: Tensor,
    index: int,
    active: Sequence[Segment],
    lows: Sequence[Tensor],
    grad_x_wanted: bool = True,
) -> Tensor | None:
    """Backward of `product`: adds to the active segments' buffers and returns the gradient of
    `x_TD`, None when it is not wanted."""
    grad_x_TD = grad_TN @ weight_ND if grad_x_wanted else None
    for segment, low_SR in zip(active, lows, strict=True):
        _segment_backward(segment, index, x_TD, low_SR, grad_TN, grad_x_TD)
    return grad_x_TD


def _segment_backward(
    segment: Segment,
    index: int,
    x_TD: Tensor,
    low_SR: Tensor,
    grad_TN: Tensor,
    grad_x_TD: Tensor | None,
) -> None:
    factor, scale = _factor(segment, index)
    grad_SN = grad_TN[segment.start : segment.end]
    grad_low_SR = (grad_SN @ factor.b_NR).mul_(scale)
    if segment.gradient is not None:
        into = segment.gradient.by_linear[index]
        assert into is not None
        accumulate(into.b_NR, grad_SN.T, low_SR, scale)
        accumulate(into.a_RD, grad_low_SR.T, x_TD[segment.start : segment.end])
    if grad_x_TD is not None:
        grad_x_TD[segment.start : segment.end].addmm_(grad_low_SR, factor.a_RD)


def accumulate(into_NM: Tensor, left_NS: Tensor, right_SM: Tensor, scale: float = 1.0) -> None:
    """`into += scale * left @ right`, in place; `into` may have a wider dtype."""
    if into_NM.dtype == left_NS.dtype:
        into_NM.addmm_(left_NS, right_SM, alpha=scale)
    else:
        into_NM.add_(left_NS @ right_SM, alpha=scale)
