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

from openrl.engines.pytorch.lora import Adapter, Factors, Joined

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

    @abstractmethod
    def add_joined(self, y_TN: Tensor, x_TD: Tensor, first: int) -> None:
        """The same for all linears that take one input; `y_TN` has their outputs side by side."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedInput:
    """Frozen linears that take one input: q, k and v, or gate and up, or one alone. `first` is
    the index of the first of them; `weights` are [N, D], each with its own N."""

    first: int
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A segment that adapts some linears: `place` is that of its rows in the cut. `into` None
    when nobody wants gradients."""

    place: int
    rows: int
    scale: float
    factors: Joined
    into: Joined | None


class Cut:
    """A batch's rows cut at the borders of its segments.

    Cutting a tensor is one call for all segments, and what a segment brings to some linears is
    looked up once for the forward and the backward pass.
    """

    def __init__(self, segments: Sequence[Segment], rows: int) -> None:
        """`segments` are disjoint and in row order, all within `rows`."""
        self._segments: list[tuple[int, Segment]] = []
        self._sizes: list[int] = []
        end = 0
        for segment in segments:
            if segment.start > end:
                self._sizes.append(segment.start - end)
            self._segments.append((len(self._sizes), segment))
            self._sizes.append(segment.end - segment.start)
            end = segment.end
        if rows > end:
            self._sizes.append(rows - end)

    def of(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        return x_TD.split_with_sizes(self._sizes)

    def adapting(self, first: int) -> list[_Part]:
        """What the segments bring to the linears that start at index `first`."""
        return [
            part
            for place, segment in self._segments
            if (part := _part(place, segment, first)) is not None
        ]


def _part(place: int, segment: Segment, first: int) -> _Part | None:
    adapter = segment.adapter
    factors = None if adapter is None else adapter.compute.joined[first]
    if adapter is None or factors is None:
        return None
    into = None if segment.gradient is None else segment.gradient.joined[first]
    return _Part(place, segment.end - segment.start, adapter.scale, factors, into)


def adapted_linears(
    x_TD: Tensor, linears: SharedInput, cut: Cut, anchor: Tensor
) -> tuple[Tensor, ...]:
    """For each linear, `x W^T + bias` plus each segment's low-rank product; [T, N].

    `anchor` is any tensor that requires grad: it makes the results require grad when the inputs
    (the embeddings, under the first layer) do not.
    """
    parts = cut.adapting(linears.first)
    if not torch.is_grad_enabled():
        return products(x_TD, linears, cut, parts)[0]
    apply = cast(Any, _AdaptedLinears).apply
    return cast("tuple[Tensor, ...]", apply(x_TD, anchor, linears, cut, parts))


def products(
    x_TD: Tensor, linears: SharedInput, cut: Cut, parts: Sequence[_Part]
) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """The products outside autograd, and each part's `x A^T` [S, R], R the sum of its ranks over
    the linears."""
    ys = tuple(F.linear(x_TD, w, b) for w, b in zip(linears.weights, linears.biases, strict=True))
    if not parts:
        return ys, []
    xs = cut.of(x_TD)
    ys_by_place = tuple(zip(*(cut.of(y_TN) for y_TN in ys), strict=True))
    return ys, [_add_low_rank(ys_by_place[p.place], xs[p.place], p) for p in parts]


def _add_low_rank(ys: Sequence[Tensor], x_SD: Tensor, part: _Part) -> Tensor:
    missing = MIN_ROWS - part.rows
    padded_SD = F.pad(x_SD, (0, 0, 0, missing)) if missing > 0 else x_SD
    low_SR = padded_SD @ part.factors.a_DR
    lows = _columns(low_SR, len(ys))
    for y_SN, low, b_RN in zip(ys, lows, part.factors.b_RN, strict=True):
        if missing > 0:
            y_SN.add_((low @ b_RN)[: part.rows], alpha=part.scale)
        else:
            y_SN.addmm_(low, b_RN, alpha=part.scale)
    return low_SR[: part.rows] if missing > 0 else low_SR


def _columns(low_SR: Tensor, count: int) -> tuple[Tensor, ...]:
    return (low_SR,) if count == 1 else low_SR.chunk(count, 1)


class _AdaptedLinears(torch.autograd.Function):
    """Adapter gradients go straight into each segment's own buffer, not through autograd: one
    buffer holds an atom's sum, and no tensor of the size of all adapters is ever made."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        anchor: Tensor,
        linears: SharedInput,
        cut: Cut,
        parts: Sequence[_Part],
    ) -> tuple[Tensor, ...]:
        ys, lows = products(x_TD, linears, cut, parts)
        if parts:  # without, the backward pass does not need the input
            ctx.save_for_backward(x_TD, *lows)
        ctx.linears, ctx.cut, ctx.parts = linears, cut, parts
        return ys

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, *lows = ctx.saved_tensors or (None,)
        wanted = ctx.needs_input_grad[0]
        grad_x_TD = products_backward(grads, x_TD, ctx.linears, ctx.cut, ctx.parts, lows, wanted)
        return grad_x_TD, None, None, None, None


def products_backward(
    grads: Sequence[Tensor],
    x_TD: Tensor | None,
    linears: SharedInput,
    cut: Cut,
    parts: Sequence[_Part],
    lows: Sequence[Tensor],
    grad_x_wanted: bool = True,
) -> Tensor | None:
    """Backward of `products`: adds to the segments' buffers and returns the gradient of `x_TD`,
    None when it is not wanted. `x_TD` may be None when there are no parts."""
    grad_x_TD = _grad_input(grads, linears) if grad_x_wanted else None
    if not parts:
        return grad_x_TD
    assert x_TD is not None
    xs = cut.of(x_TD)
    grads_by_place = tuple(zip(*(cut.of(grad_TN) for grad_TN in grads), strict=True))
    grad_xs = None if grad_x_TD is None else cut.of(grad_x_TD)
    for part, low_SR in zip(parts, lows, strict=True):
        grad_low_SR = _grad_low(part, xs[part.place], low_SR, grads_by_place[part.place])
        if grad_xs is not None:
            grad_xs[part.place].addmm_(grad_low_SR, part.factors.a_RD, alpha=part.scale)
    return grad_x_TD


def _grad_input(grads: Sequence[Tensor], linears: SharedInput) -> Tensor:
    grad_x_TD = grads[0] @ linears.weights[0]
    for grad_TN, weight_ND in zip(grads[1:], linears.weights[1:], strict=True):
        grad_x_TD.addmm_(grad_TN, weight_ND)
    return grad_x_TD


def _grad_low(part: _Part, x_SD: Tensor, low_SR: Tensor, grads: Sequence[Tensor]) -> Tensor:
    """Gradient of `x A^T`, before the scale; adds the factors' gradients to their buffer."""
    grad_low_SR = torch.empty_like(low_SR)
    columns = _columns(grad_low_SR, len(grads))
    for grad_SN, column, b_NR in zip(grads, columns, part.factors.b_NR, strict=True):
        torch.mm(grad_SN, b_NR, out=column)
    if part.into is not None:
        accumulate(part.into.a_RD, grad_low_SR.T, x_SD, part.scale)
        lows = _columns(low_SR, len(grads))
        for grad_SN, low, into_RN in zip(grads, lows, part.into.b_RN, strict=True):
            accumulate(into_RN, low.T, grad_SN, part.scale)
    return grad_low_SR


def accumulate(into_NM: Tensor, left_NS: Tensor, right_SM: Tensor, scale: float) -> None:
    """`into += scale * left @ right`, in place; `into` may have a wider dtype."""
    if into_NM.dtype == left_NS.dtype:
        into_NM.addmm_(left_NS, right_SM, alpha=scale)
    else:
        into_NM.add_(left_NS @ right_SM, alpha=scale)
