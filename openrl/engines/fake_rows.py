"""Sequences in the fake engine's batch, and what it says about prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from openrl.engines.base import RowStart
from openrl.engines.fake_model import F64, draw, logprobs_NV
from openrl.engines.scores import first_scored
from openrl.types import (
    AltTokens,
    Cells,
    SampledSequence,
    SampleOutput,
    SamplingParams,
    StopReason,
    TopLogprobs,
)

_EMPTY = -99999.0


@dataclass(slots=True, eq=False)
class Row:
    """A sequence in the batch, or taken out of it with its tokens kept."""

    start: RowStart
    bias_V: F64
    uniforms: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rows: list[F64] = field(default_factory=list)  # [V] before each token, when its best are asked
    preempted: bool = False

    def length(self) -> int:
        return len(self.start.sample.prompt) + len(self.tokens)

    def ended(self, eos: Sequence[int]) -> StopReason | None:
        stop = self.start.sample.params.stop
        last = self.tokens[-1]
        text = "".join(map(chr, self.tokens)) if stop.strings else ""
        stopped = (stop.eos and last in eos) or last in stop.tokens
        if stopped or any(string in text for string in stop.strings):
            return "stop"
        return "length" if len(self.tokens) == self.start.max_new_tokens else None

    def grow(self) -> None:
        params = self.start.sample.params
        last = self.tokens[-1] if self.tokens else int(self.start.sample.prompt[-1])
        row_V = logprobs_NV(np.array([last]), self.bias_V, params.temperature)[0]
        token = draw(row_V, params, self.uniforms.random())
        self.tokens.append(token)
        self.logprobs.append(float(row_V[token]))
        if self.start.sample.topk_sample_logprobs:
            self.rows.append(row_V)

    def sequence(self, reason: StopReason) -> SampledSequence:
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        k = self.start.sample.topk_sample_logprobs
        return SampledSequence(
            tokens, logprobs, reason, _best(np.stack(self.rows), k) if k else None
        )


def prompt_output(start: RowStart, bias_V: F64) -> SampleOutput:
    sample = start.sample
    if first_scored(sample) is None:
        return SampleOutput(())
    length, k = len(sample.prompt), sample.topk_prompt_logprobs
    rows_NV = logprobs_NV(sample.prompt[:-1], bias_V)
    logprobs_P = np.full(length, np.nan, np.float32)
    logprobs_P[1:] = np.take_along_axis(rows_NV, sample.prompt[1:, None], axis=1)[:, 0]
    first = length - (sample.prompt_logprobs_last_n or length)
    logprobs_P[:first] = np.nan
    targets = sample.target_prompt_logprobs
    return SampleOutput(
        (),
        prompt_logprobs=logprobs_P if sample.prompt_logprobs else None,
        topk_prompt_logprobs=_top(rows_NV, k, first) if k else None,
        target_prompt_logprobs=None if targets is None else _scored(targets, rows_NV),
        prompt_alt_tokens=_alternatives(start, bias_V) if sample.prompt_alt_tokens_k else None,
    )


def _top(rows_NV: F64, k: int, first: int) -> TopLogprobs:
    """Row 0 is empty: nothing comes before the first token; so are those before `first`."""
    best = _best(rows_NV, k)
    ids_PK = np.concatenate([np.zeros((1, k), np.int32), best.token_ids])
    logprobs_PK = np.concatenate([np.full((1, k), _EMPTY, np.float32), best.logprobs])
    ids_PK[:first], logprobs_PK[:first] = 0, _EMPTY
    return TopLogprobs(ids_PK, logprobs_PK)


def _best(rows_NV: F64, k: int) -> TopLogprobs:
    ids_NK = np.zeros((len(rows_NV), k), np.int32)
    logprobs_NK = np.full(ids_NK.shape, _EMPTY, np.float32)
    best = np.argsort(-rows_NV, axis=1, kind="stable")[:, :k]
    ids_NK[:, : best.shape[1]] = best
    logprobs_NK[:, : best.shape[1]] = np.take_along_axis(rows_NV, best, axis=1)
    return TopLogprobs(ids_NK, logprobs_NK)


def _scored(targets: Cells, rows_NV: F64) -> Cells:
    ids = targets.values
    found = rows_NV[targets.rows(), ids.clip(min=0)]
    values = np.where(ids < 0, 0.0, found).astype(np.float32)
    return Cells(values, targets.shape, targets.crow, targets.col)


def _alternatives(start: RowStart, bias_V: F64) -> AltTokens:
    sample = start.sample
    params = SamplingParams(temperature=sample.params.temperature)
    heated_NV = logprobs_NV(sample.prompt[:-1], bias_V, params.temperature)
    numbers = np.random.default_rng([(sample.params.seed or 0) % 2**64, 1 << 40])
    uniforms_NK = numbers.random((len(heated_NV), sample.prompt_alt_tokens_k))
    ids_NK = np.array(
        [
            [draw(row_V, params, u) for u in us]
            for row_V, us in zip(heated_NV, uniforms_NK, strict=True)
        ],
        np.int32,
    ).reshape(uniforms_NK.shape)
    cold_NV = logprobs_NV(sample.prompt[:-1], bias_V)
    return AltTokens(ids_NK, np.take_along_axis(cold_NV, ids_NK, axis=1).astype(np.float32))
