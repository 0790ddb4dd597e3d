"""Low-rank adapters, and the linear product that many of them share.

An adapter's factors lie in ONE flat fp32 buffer, with views per linear; a gradient or an
optimizer moment is another flat buffer of the same layout. So optimizing, clipping, copying
and saving an adapter are operations on one tensor.

A packed batch is cut into `Segment`s: runs of rows that belong to one atom of one request and so
to one adapter. A linear makes its base product once for all rows, then adds to each segment's
rows `(x A^T) B^T * alpha / rank`. Nothing of one segment's low-rank products depends on another
segment, so a job's numbers are the same to the bit in company and alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from openrl.errors import UserError
from openrl.types import LoraConfig

MIN_ROWS = 16
"""A product's rows do not depend on how many rows there are, from this many rows on."""

_ALIGN = 16
"""Views start at multiples of 64 bytes, as fresh tensors do."""

Group = Literal["attn", "mlp", "unembed"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A linear that can be adapted. `index` is its place in every list of factors; `name` is its
    path in the model, as PEFT's keys have it after `base_model.model.`."""

    index: int
    name: str
    group: Group
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """`a_RD` [rank, in_features] and `b_NR` [out_features, rank]: views into a flat buffer."""

    a_RD: Tensor
    b_NR: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A flat buffer and its views by linear index; None for a linear that is not adapted."""

    flat: Tensor
    by_linear: tuple[Factor | None, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    a: int
    b: int


class Layout:
    """Where each factor of an adapter lies in its flat buffer. Gaps stay zero."""

    def __init__(self, linears: Sequence[LinearSpec], config: LoraConfig) -> None:
        self.linears = tuple(linears)
        self.config = config
        self.rank = config.rank
        self.size = 0
        self._places = tuple(self._place(linear) for linear in self.linears)

    def _place(self, linear: LinearSpec) -> _Place | None:
        if not getattr(self.config, f"train_{linear.group}"):
            return None
        a = self._reserve(self.rank * linear.in_features)
        return _Place(a, self._reserve(linear.out_features * self.rank))

    def _reserve(self, count: int) -> int:
        start = self.size
        self.size += math.ceil(count / _ALIGN) * _ALIGN
        return start

    def view(self, flat: Tensor) -> Factors:
        """The factors that lie in `flat` [size]."""
        return Factors(flat, tuple(self._factor(flat, linear) for linear in self.linears))

    def _factor(self, flat: Tensor, linear: LinearSpec) -> Factor | None:
        place = self._places[linear.index]
        if place is None:
            return None
        r, d, n = self.rank, linear.in_features, linear.out_features
        return Factor(
            flat[place.a : place.a + r * d].view(r, d), flat[place.b : place.b + n * r].view(n, r)
        )

    def zeros(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Factors:
        return self.view(torch.zeros(self.size, device=device, dtype=dtype))


class Adapter:
    """The weights of one adapter: what a forward pass needs, and nothing of training.

    `weights` are the fp32 masters; `compute` are what products use: the masters themselves for
    an fp32 base model, else a copy in the base model's dtype that `refresh` renews after the
    masters changed. `scale` is alpha / rank.
    """

    def __init__(self, layout: Layout, weights: Factors, dtype: torch.dtype) -> None:
        self.layout = layout
        self.config = layout.config
        self.scale = layout.config.alpha / layout.rank
        self.weights = weights
        self.compute = weights
        if dtype != torch.float32:
            self.compute = layout.view(weights.flat.to(dtype))

    def refresh(self) -> None:
        if self.compute is not self.weights:
            self.compute.flat.copy_(self.weights.flat)

    def copy(self) -> Adapter:
        """An independent copy on the same device, for a version that must not change."""
        flat = self.weights.flat.clone()
        return Adapter(self.layout, self.layout.view(flat), self.compute.flat.dtype)


def fresh_adapter(
    linears: Sequence[LinearSpec], config: LoraConfig, device: torch.device, dtype: torch.dtype
) -> Adapter:
    """A drawn as peft draws it (Kaiming-uniform with a = sqrt(5), which is U(-1/sqrt(in),
    1/sqrt(in))), on the CPU from `config.seed` whatever the device; B zero.

    Raises `UserError` for a rank or a choice of targets that makes no adapter.
    """
    check_config(config)
    layout = Layout(linears, config)
    weights = layout.zeros(torch.device("cpu"))
    generator = torch.Generator()
    if config.seed is None:
        generator.seed()
    else:
        generator.manual_seed(config.seed)
    for factor in weights.by_linear:
        if factor is not None:
            bound = 1 / math.sqrt(factor.a_RD.shape[1])
            factor.a_RD.uniform_(-bound, bound, generator=generator)
    return Adapter(layout, layout.view(weights.flat.to(device)), dtype)


def check_config(config: LoraConfig) -> None:
    """Raises `UserError` for what is no LoRA at all; limits are the caller's to check."""
    if config.rank < 1:
        raise UserError(f"lora_config.rank must be positive, not {config.rank}")
    if not math.isfinite(config.alpha):
        raise UserError(f"lora_config.alpha must be finite, not {config.alpha}")
    if not (config.train_attn or config.train_mlp or config.train_unembed):
        raise UserError("at least one of train_unembed, train_mlp, or train_attn must be true")


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
