"""One decode step over all running rows: plan, forward, draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.decode_attention import DecodeAttention, ShelfRows
from openrl.engines.pytorch.kvcache import KVMemory, Shelf
from openrl.engines.pytorch.lowrank import Banks, RowAdapters
from openrl.engines.pytorch.packing import Batch
from openrl.engines.pytorch.rows import Row
from openrl.engines.pytorch.sampling import DrawRules, draw, draw_rules, uniforms
from openrl.engines.pytorch.segments import MIN_ROWS
from openrl.errors import ServerError
from openrl.types import Failed


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """What stays the same from step to step while no row joins, leaves or moves.

    `filler` rows at the end belong to nobody.
    """

    rows: list[Row]
    filler: int
    shelves: list[tuple[Shelf[Row], int, Tensor]]  # shelf, its first batch row, 0 … n - 1
    adapters: RowAdapters
    rules: DrawRules
    streams_R: NDArray[np.uint64]


class DecodeStep:
    def __init__(
        self,
        base: BaseModel,
        forward: Callable[[Batch], Tensor],
        banks: Banks,
        raw_logprobs: bool,
    ) -> None:
        """`forward` is `base.hidden`, or a faster form of it."""
        self._base = base
        self._hidden = forward
        self._banks = banks
        self._raw = raw_logprobs
        self._plan: _Plan | None = None

    def changed(self) -> None:
        """Rows joined, left or moved."""
        self._plan = None

    def run(self, memory: KVMemory[Row]) -> list[Row]:
        """One step of every row that has a slot with room for a token; the rows that ended."""
        plan = self._plan = self._plan or self._make_plan(memory)
        logits_RV = self._forward(plan)
        for row in plan.rows:
            row.filled += 1
        return self._accept(plan.rows, logits_RV, plan.rules, plan.streams_R)

    def draw(self, rows: Sequence[Row], logits_RV: Tensor) -> list[Row]:
        """The tokens after the prompts of rows that just got a slot; the rows that ended."""
        return self._accept(rows, logits_RV, *self._rules(rows))

    def _rules(self, rows: Sequence[Row]) -> tuple[DrawRules, NDArray[np.uint64]]:
        params = [row.request.sample.params for row in rows]
        streams_R = np.array([row.stream for row in rows], dtype=np.uint64)
        tops = [row.request.sample.topk_sample_logprobs for row in rows]
        return draw_rules(params, self._base.vocab_size, self._base.device, tops), streams_R

    def _make_plan(self, memory: KVMemory[Row]) -> _Plan:
        rows: list[Row] = []
        shelves = []
        for shelf in memory.shelves():
            if shelf.slots:
                index_N = torch.arange(len(shelf.slots), device=self._base.device)
                shelves.append((shelf, len(rows), index_N))
                rows += [slot.owner for slot in shelf.slots]
        filler = max(0, MIN_ROWS - len(rows))
        versions = [row.request.version for row in rows]
        adapters = self._banks.rows(versions, len(rows) + filler)
        return _Plan(rows, filler, shelves, adapters, *self._rules(rows))

    def _forward(self, plan: _Plan) -> Tensor:
        """fp32 logits [R, V]."""
        fill = [0] * plan.filler
        device = self._base.device
        tokens_T = torch.tensor([row.next_input for row in plan.rows] + fill, device=device)
        places_T = torch.tensor([row.filled for row in plan.rows] + fill, device=device)
        groups = [
            ShelfRows(shelf, start, index_N, places_T[start : start + index_N.shape[0]])
            for shelf, start, index_N in plan.shelves
        ]
        batch = Batch(tokens_T, places_T, plan.adapters, DecodeAttention(groups))
        hidden_TD = self._hidden(batch)
        return self._base.logits(hidden_TD, plan.adapters)[: len(plan.rows)]

    def _accept(
        self,
        rows: Sequence[Row],
        logits_RV: Tensor,
        rules: DrawRules,
        streams_R: NDArray[np.uint64],
    ) -> list[Row]:
        positions_R = np.array([len(row.tokens) for row in rows], dtype=np.int64)
        drawn = draw(logits_RV, rules, uniforms(streams_R, positions_R), raw=self._raw)
        ended = []
        values = zip(rows, drawn.tokens_R.tolist(), drawn.logprobs_R.tolist(), strict=True)
        for number, (row, token, logprob) in enumerate(values):
            if row.filled < row.length:
                continue  # a row whose memory was taken catches up with its own tokens
            if not np.isfinite(logprob):
                row.ended = Failed(_not_finite(row))
            else:
                row.accept(token, logprob, drawn.tops.get(number))
            if row.ended is not None:
                ended.append(row)
        return ended


def _not_finite(row: Row) -> ServerError:
    whose = "this version of the adapter" if row.request.version else "the base model"
    return ServerError(
        f"sample {row.id.sample}: the logits of token {len(row.tokens)} are not finite numbers: "
        f"{whose} does not work on this prompt"
    )
