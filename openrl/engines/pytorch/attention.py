"""Attention over a packed batch: the only place where sequences leave the packed form.

An `Attend` object travels with a batch and is called once per layer with the packed queries,
keys and values. Training uses `BucketedAttention`; sampling brings its own, which writes and
reads a cache of keys and values.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

_CLASSES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_LONG_STEP = 256


class Span(NamedTuple):
    """Rows `start … end` of a packed batch hold one sequence."""

    start: int
    end: int


class Attend(Protocol):
    """What a batch brings for its attention layers.

    `layer` counts from 0. `q_THD` [rows, heads, head_dim]; `k_TKD`, `v_TKD` [rows, kv_heads,
    head_dim], already rotated, may be strided views. `sliding_window` w: row i sees rows j with
    0 <= i - j < w of its own sequence; None: all before it and itself. `softcap` c: scores
    become c * tanh(score / c). Returns [rows, heads, head_dim].

    Result rows must not depend on which other sequences are in the batch, to the bit on CPU.
    """

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor: ...


def length_class(length: int) -> int:
    """The padded length of a sequence, by its own length alone: what else is in the batch never
    changes the shape of its product."""
    if length <= _CLASSES[-1]:
        return _CLASSES[bisect_left(_CLASSES, length)]
    return -(-length // _LONG_STEP) * _LONG_STEP


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Padded rows `start … start + sequences * length`."""

    start: int
    sequences: int
    length: int


class BucketedAttention:
    """Causal self-attention in right-padded buckets, one bucket per length class.

    A sequence is padded with its own last row. No mask is needed: padded keys come after every
    real query. The padded rows' results are dropped, so that their gradient is zero and the
    gather's backward is a gather too.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        """`spans` cover all rows of the batch, in order."""
        by_class: dict[int, list[Span]] = defaultdict(list)
        for span in spans:
            by_class[length_class(span.end - span.start)].append(span)
        padded: list[Tensor] = []
        place_T = torch.empty(spans[-1].end, dtype=torch.long)
        self._buckets: list[_Bucket] = []
        start = 0
        for length, members in sorted(by_class.items()):
            self._buckets.append(_Bucket(start, len(members), length))
            offsets_L = torch.arange(length)
            for span in members:
                padded.append((offsets_L + span.start).clamp_(max=span.end - 1))
                rows = span.end - span.start
                place_T[span.start : span.end] = offsets_L[:rows] + start
                start += length
        self._source_P = torch.cat(padded).to(device)
        self._place_T = place_T.to(device)
        self._masks: dict[tuple[int, int], Tensor] = {}

    def __call__(
        self,
        layer: int,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        q, k, v = (self._to_buckets(x) for x in (q_THD, k_TKD, v_TKD))
        out = []
        for bucket in self._buckets:
            q_BHLD, k_BKLD, v_BKLD = (self._of(bucket, x) for x in (q, k, v))
            mask_LL = self._mask(bucket.length, sliding_window)
            out_BHLD = causal_attention(q_BHLD, k_BKLD, v_BKLD, scaling, mask_LL, softcap)
            out.append(out_BHLD.transpose(1, 2).flatten(0, 1))
        out_PHD = torch.cat(out) if len(out) > 1 else out[0]
        return self._from_buckets(out_PHD)

    def _to_buckets(self, x_THD: Tensor) -> Tensor:
        return _gather(x_THD, self._source_P, self._place_T, False)

    def _from_buckets(self, x_PHD: Tensor) -> Tensor:
        return _gather(x_PHD, self._place_T, self._source_P, True)

    @staticmethod
    def _of(bucket: _Bucket, x_PHD: Tensor) -> Tensor:
        rows = x_PHD.narrow(0, bucket.start, bucket.sequences * bucket.length)
        return rows.view(bucket.sequences, bucket.length, *rows.shape[1:]).transpose(1, 2)

    def _mask(self, length: int, window: int | None) -> Tensor | None:
        if window is None or window >= length:
            return None
        key = (length, window)
        if key not in self._masks:
            self._masks[key] = window_mask(length, window, self._place_T.device)
        return self._masks[key]


def _gather(x: Tensor, index: Tensor, inverse: Tensor, pads: bool) -> Tensor:
    """Rows `index` of x, differentiable."""
    return cast(Tensor, cast(Any, _Gather).apply(x, index, inverse, pads))


class _Gather(torch.autograd.Function):
    """Rows `index` of x. Backward gathers by `inverse`; with `pads`, rows of x that `index` does
    not name get zero. (`index_select`'s own backward is a slow scatter-add.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor, pads: bool) -> Tensor:
        ctx.save_for_backward(index, inverse)
        ctx.pads, ctx.rows = pads, x.shape[0]
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        index, inverse = ctx.saved_tensors
        if ctx.pads:
            grad_x = grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad)
        else:
            grad_x = grad.index_select(0, inverse)
        return grad_x, None, None, None


def window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """[length, length] bool: true where row i sees row j, 0 <= i - j < window."""
    i = torch.arange(length, device=device)
    distance = i[:, None] - i[None, :]
    return (distance >= 0) & (distance < window)


def causal_attention(
    q_BHLD: Tensor,
    k_BKLD: Tensor,
    v_BKLD: Tensor,
    scaling: float,
    mask_LL: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """[B, H, L, D] from queries and keys of equal length; `mask_LL` None is causal."""
    repeats = q_BHLD.shape[1] // k_BKLD.shape[1]
    k_BHLD, v_BHLD = repeat_heads(k_BKLD, repeats), repeat_heads(v_BKLD, repeats)
    if softcap is not None:
        return _softcapped(q_BHLD, k_BHLD, v_BHLD, scaling, mask_LL, softcap)
    return F.scaled_dot_product_attention(
        q_BHLD, k_BHLD, v_BHLD, attn_mask=mask_LL, is_causal=mask_LL is None, scale=scaling
    )


def repeat_heads(x_BKLD: Tensor, repeats: int) -> Tensor:
    """[B, K * repeats, L, D]: each kv head beside its query heads."""
    if repeats == 1:
        return x_BKLD
    b, k, length, d = x_BKLD.shape
    return x_BKLD[:, :, None].expand(b, k, repeats, length, d).reshape(b, k * repeats, length, d)


def _softcapped(
    q_BHLD: Tensor,
    k_BHLD: Tensor,
    v_BHLD: Tensor,
    scaling: float,
    mask_LL: Tensor | None,
    softcap: float,
) -> Tensor:
    length = q_BHLD.shape[2]
    if mask_LL is None:
        mask_LL = window_mask(length, length, q_BHLD.device)
    blank_LL = q_BHLD.new_zeros(mask_LL.shape)
    hidden_LL = blank_LL.masked_fill_(~mask_LL, float("-inf"))
    return softcapped_attention(q_BHLD, k_BHLD, v_BHLD, hidden_LL, scaling, softcap)


def softcapped_attention(
    q_BHLD: Tensor,
    k_BHMD: Tensor,
    v_BHMD: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float,
) -> Tensor:
    """[B, H, L, D], written out, since no fused kernel caps scores. `mask` is added to them: 0
    where a query sees, else -inf."""
    scores = torch.tanh(q_BHLD @ k_BHMD.transpose(2, 3) * (scaling / softcap)) * softcap + mask
    return scores.softmax(-1, dtype=torch.float32).to(v_BHMD.dtype) @ v_BHMD
