"""Attention of the sampler: it writes the new keys and values, then reads the row's own cache.

Both forms keep the shape of every product a function of the row's own length, so that a row's
result is the same to the bit whoever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from openrl.engines.pytorch.attention import repeat_heads, softcapped_attention
from openrl.engines.pytorch.kvcache import Shelf

_HIDDEN = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class ShelfRows:
    """Batch rows `start … start + len(index_N)` are the rows of `shelf`, in its order.
    `position_N` is where each one's new token goes."""

    shelf: Shelf[Any]
    start: int
    index_N: Tensor
    position_N: Tensor


class DecodeAttention:
    """One new token per row; the batch's rows lie in the order of the shelves. Filler rows at
    the end get zeros."""

    def __init__(self, groups: Sequence[ShelfRows]) -> None:
        self._groups = groups
        self._masks: dict[tuple[int, int | None], Tensor] = {}

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
        parts = []
        for number, group in enumerate(self._groups):
            n = group.index_N.shape[0]
            rows = slice(group.start, group.start + n)
            keys, values = group.shelf.kv[layer]
            keys[group.index_N, :, group.position_N] = k_TKD[rows]
            values[group.index_N, :, group.position_N] = v_TKD[rows]
            mask = self._mask(number, group, sliding_window)
            q_NHD = q_THD[rows]
            out = _attend_grouped(q_NHD, keys[:n], values[:n], mask, scaling, softcap)
            parts.append(out)
        return _join(parts, q_THD)

    def _mask(self, number: int, group: ShelfRows, window: int | None) -> Tensor:
        """Additive [N, 1, 1, capacity]: 0 where the row's new token sees, else -inf."""
        if window is not None and window >= group.shelf.capacity:
            window = None
        mask = self._masks.get((number, window))
        if mask is None:
            at_C = torch.arange(group.shelf.capacity, device=group.position_N.device)
            position_N1 = group.position_N[:, None]
            hidden = at_C > position_N1
            if window is not None:
                hidden |= at_C <= position_N1 - window
            blank = torch.zeros(hidden.shape, dtype=group.shelf.kv.dtype, device=hidden.device)
            mask = blank.masked_fill_(hidden, _HIDDEN)[:, None, None]
            self._masks[number, window] = mask
        return mask


def _attend_grouped(
    q_NHD: Tensor,
    k_NKCD: Tensor,
    v_NKCD: Tensor,
    mask_N11C: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """[N, H, D]. The query heads of one kv head are treated as that head's queries, which reads
    every key once and repeats none."""
    n, heads, dim = q_NHD.shape
    kv_heads, capacity = k_NKCD.shape[1:3]
    q_NKGD = q_NHD.unflatten(1, (kv_heads, heads // kv_heads))
    if softcap is not None:
        out = softcapped_attention(q_NKGD, k_NKCD, v_NKCD, mask_N11C, scaling, softcap)
    else:
        mask = mask_N11C.expand(n, kv_heads, heads // kv_heads, capacity)
        out = F.scaled_dot_product_attention(q_NKGD, k_NKCD, v_NKCD, attn_mask=mask, scale=scaling)
    return out.reshape(n, heads, dim)


def _join(parts: list[Tensor], q_THD: Tensor) -> Tensor:
    missing = q_THD.shape[0] - sum(part.shape[0] for part in parts)
    if missing:
        parts = [*parts, q_THD.new_zeros(missing, *q_THD.shape[1:])]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Batch rows `start … start + size` are tokens `offset … offset + size` of a prompt whose
    keys and values are staged in `kv` [layers, 2, kv_heads, capacity, head_dim]."""

    start: int
    size: int
    offset: int
    kv: Tensor


class PrefillAttention:
    """Chunks of prompts. A prompt is always cut at the same places, whatever is in its cache
    already and whoever shares the pass; several chunks of one prompt may be in one batch."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

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
        for c in self._chunks:
            keys, values = c.kv[layer]
            rows = slice(c.start, c.start + c.size)
            keys[:, c.offset : c.offset + c.size] = k_TKD[rows].transpose(0, 1)
            values[:, c.offset : c.offset + c.size] = v_TKD[rows].transpose(0, 1)
        parts = []
        for c in self._chunks:
            q_HSD = q_THD[c.start : c.start + c.size].transpose(0, 1)
            end = c.offset + c.size
            keys, values = c.kv[layer][:, :, :end]
            mask_SE = self._mask(c, sliding_window, q_THD)
            parts.append(_attend_chunk(q_HSD, keys, values, mask_SE, scaling, softcap))
        return _join(parts, q_THD)

    def _mask(self, chunk: Chunk, window: int | None, like: Tensor) -> Tensor:
        """Additive [size, offset + size]."""
        end = chunk.offset + chunk.size
        if window is not None and window >= end:
            window = None
        mask = self._masks.get((chunk.offset, chunk.size, window))
        if mask is None:
            at_E = torch.arange(end, device=like.device)
            query_S1 = torch.arange(chunk.offset, end, device=like.device)[:, None]
            hidden = at_E > query_S1
            if window is not None:
                hidden |= at_E <= query_S1 - window
            mask = like.new_zeros(hidden.shape).masked_fill_(hidden, _HIDDEN)
            self._masks[chunk.offset, chunk.size, window] = mask
        return mask


def _attend_chunk(
    q_HSD: Tensor,
    k_KED: Tensor,
    v_KED: Tensor,
    mask_SE: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    """[S, H, D]."""
    if softcap is not None:
        groups = q_HSD.shape[0] // k_KED.shape[0]
        k, v = (repeat_heads(x[None], groups) for x in (k_KED, v_KED))
        out = softcapped_attention(q_HSD[None], k, v, mask_SE, scaling, softcap)
    else:
        out = F.scaled_dot_product_attention(
            q_HSD[None],
            k_KED[None],
            v_KED[None],
            attn_mask=mask_SE,
            scale=scaling,
            enable_gqa=q_HSD.shape[0] != k_KED.shape[0],
        )
    return out[0].transpose(0, 1)
