"""Sequences in the fake engine's batch, and what it says about prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from openrl.engines.base import RowStart
from openrl.engines.fake_model import F64, draw, logprobs_NV
from openrl.types import SampledSequence, SampleOutput, StopReason, TopLogprobs


@dataclass(slots=True, eq=False)
class Row:
    """A sequence in the batch, or taken out of it with its tokens kept."""

    start: RowStart
    bias_V: F64
    uniforms: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
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

    def sequence(self, reason: StopReason) -> SampledSequence:
        tokens, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return SampledSequence(tokens, logprobs, reason)


def prompt_output(start: RowStart, bias_V: F64) -> SampleOutput:
    sample = start.sample
    k = sample.topk_prompt_logprobs
    if not (sample.prompt_logprobs or k):
        return SampleOutput(())
    rows_NV = logprobs_NV(sample.prompt[:-1], bias_V)
    logprobs_P = np.full(len(sample.prompt), np.nan, np.float32)
    logprobs_P[1:] = np.take_along_axis(rows_NV, sample.prompt[1:, None], axis=1)[:, 0]
    return SampleOutput(
        (),
        prompt_logprobs=logprobs_P if sample.prompt_logprobs else None,
        topk_prompt_logprobs=_top(rows_NV, k) if k else None,
    )


def _top(rows_NV: F64, k: int) -> TopLogprobs:
    """Row 0 is empty: nothing comes before the first token."""
    ids_PK = np.zeros((len(rows_NV) + 1, k), np.int32)
    logprobs_PK = np.full(ids_PK.shape, -99999.0, np.float32)
    best = np.argsort(-rows_NV, axis=1, kind="stable")[:, :k]
    ids_PK[1:, : best.shape[1]] = best
    logprobs_PK[1:, : best.shape[1]] = np.take_along_axis(rows_NV, best, axis=1)
    return TopLogprobs(ids_PK, logprobs_PK)
