"""A packed batch: sequences laid end to end, with no padding between them.

Rows are ordered by the caller so that each adapter's rows are together. At the end there may be
a few filler rows that belong to nobody: see `filler_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrl.engines.pytorch.attention import Attend, BucketedAttention, Span
from openrl.engines.pytorch.segments import MIN_ROWS, Segment, StackedAdapters


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What one forward pass of a base model takes.

    `token_ids_T`, `position_ids_T` int64 [T] on the model's device, T >= MIN_ROWS; a position
    counts from 0 within its sequence. `segments` are disjoint and in row order; rows outside all
    of them see the plain base model. `attend` does the attention of all layers.
    """

    token_ids_T: Tensor
    position_ids_T: Tensor
    segments: tuple[Segment, ...] | StackedAdapters
    attend: Attend


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Sequences laid end to end. `spans` has one entry per sequence; `all_spans` has one more
    when filler rows were needed, and covers every row."""

    token_ids_T: Tensor
    position_ids_T: Tensor
    spans: tuple[Span, ...]
    all_spans: tuple[Span, ...]


def filler_rows(rows: int) -> int:
    """How many rows to add for a multiple of `MIN_ROWS`. No product then has fewer rows, and no
    elementwise kernel (all have an even number of columns) ends in the middle of a vector: there
    torch takes scalar code, whose SiLU and GELU differ from the vector code's in the last bit,
    so that a row would depend on whether it is the last of its batch."""
    return -rows % MIN_ROWS


def lay_out(sequences: Sequence[NDArray[np.int32]], device: torch.device) -> Rows:
    """`sequences`: int32 [N_i], each with N_i >= 1."""
    lengths = [len(sequence) for sequence in sequences]
    filler = filler_rows(sum(lengths))
    parts = [np.asarray(sequence, dtype=np.int64) for sequence in sequences]
    if filler:
        parts.append(np.zeros(filler, dtype=np.int64))
        lengths.append(filler)
    ends = np.cumsum(lengths).tolist()
    spans = tuple(Span(end - n, end) for n, end in zip(lengths, ends, strict=True))
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    return Rows(
        token_ids_T=torch.from_numpy(np.concatenate(parts)).to(device),
        position_ids_T=torch.from_numpy(positions).to(device),
        spans=spans[: len(sequences)],
        all_spans=spans,
    )


def training_batch(rows: Rows, segments: Sequence[Segment]) -> Batch:
    """Whole sequences attend to themselves."""
    attend = BucketedAttention(rows.all_spans, rows.token_ids_T.device)
    return Batch(rows.token_ids_T, rows.position_ids_T, tuple(segments), attend)
