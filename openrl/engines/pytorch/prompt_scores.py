"""What a sample asks about its prompt: log-probabilities at temperature 1, and tokens drawn.

Row t of the logits scores the token at t + 1; position 0 has no score.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openrl.engines.pytorch.sampling import EMPTY_LOGPROB, draw, draw_rules, stream_of, uniforms
from openrl.engines.scores import first_scored
from openrl.types import (
    AltTokens,
    Cells,
    FloatArray,
    Sample,
    SampleOutput,
    SamplingParams,
    TopLogprobs,
)

_ALT_STREAM = 1 << 40  # far from the numbers of a request's samples


class PromptScores:
    """Collects the scores of one prompt as its chunks are computed, from token `first` on."""

    def __init__(self, sample: Sample) -> None:
        length, k = len(sample.prompt), sample.topk_prompt_logprobs
        self._sample = sample
        self.first = first_scored(sample) or 0
        last_n = sample.prompt_logprobs_last_n or length - 1
        self._first_logprob = length - 1 - last_n
        self._logprobs: FloatArray = np.full(length, np.nan, dtype=np.float32)
        self._top_ids = np.zeros((length, k), dtype=np.int32)
        self._top_logprobs = np.full((length, k), EMPTY_LOGPROB, dtype=np.float32)
        self._targets = _Targets(sample.target_prompt_logprobs)
        self._alt = _Alternatives(sample)

    def add(self, offset: int, logits_SV: Tensor) -> None:
        """`logits_SV` fp32 of the prompt's tokens `offset … offset + S`."""
        count = min(logits_SV.shape[0], len(self._sample.prompt) - 1 - offset)
        if count < 1:
            return
        logprobs_SV = torch.log_softmax(logits_SV[:count], dim=-1)
        self._targets.add(offset, logprobs_SV)
        self._alt.add(offset, logits_SV[:count], logprobs_SV)
        hidden = max(0, self._first_logprob - offset)
        if hidden < count:
            self._add_own(offset + hidden, logprobs_SV[hidden:])

    def _add_own(self, offset: int, logprobs_SV: Tensor) -> None:
        scored = slice(offset + 1, offset + 1 + logprobs_SV.shape[0])
        targets = torch.from_numpy(self._sample.prompt[scored].astype(np.int64))
        chosen = logprobs_SV.gather(1, targets.to(logprobs_SV.device)[:, None])[:, 0]
        self._logprobs[scored] = chosen.cpu().numpy()
        k = min(self._top_ids.shape[1], logprobs_SV.shape[1])
        if k:
            best = logprobs_SV.topk(k, dim=-1)
            self._top_ids[scored, :k] = best.indices.cpu().numpy()
            self._top_logprobs[scored, :k] = best.values.cpu().numpy()

    def output(self) -> SampleOutput:
        sample = self._sample
        top = None
        if sample.topk_prompt_logprobs > 0:
            top = TopLogprobs(self._top_ids, self._top_logprobs)
        return SampleOutput(
            (),
            prompt_logprobs=self._logprobs if sample.prompt_logprobs else None,
            topk_prompt_logprobs=top,
            target_prompt_logprobs=self._targets.output(),
            prompt_alt_tokens=self._alt.output(),
        )


class _Targets:
    """Log-probabilities of named tokens."""

    def __init__(self, asked: Cells | None) -> None:
        self._asked = asked
        if asked is not None:
            self._rows_N = asked.rows()
            self._logprobs_N = np.zeros(len(asked.values), dtype=np.float32)

    def add(self, offset: int, logprobs_SV: Tensor) -> None:
        if self._asked is None:
            return
        start, stop = np.searchsorted(self._rows_N, (offset, offset + logprobs_SV.shape[0]))
        ids_N = self._asked.values[start:stop].astype(np.int64)
        rows_N = self._rows_N[start:stop] - offset
        device = logprobs_SV.device
        rows, ids = (torch.from_numpy(x).to(device) for x in (rows_N, ids_N.clip(min=0)))
        values_N = logprobs_SV[rows, ids].cpu().numpy()
        self._logprobs_N[start:stop] = np.where(ids_N < 0, 0.0, values_N)

    def output(self) -> Cells | None:
        asked = self._asked
        if asked is None:
            return None
        return Cells(self._logprobs_N, asked.shape, asked.crow, asked.col)


class _Alternatives:
    """Draws, with replacement and at the request's temperature, without its cuts. Draw j has a
    random stream of its own, so that it does not depend on how many there are."""

    def __init__(self, sample: Sample) -> None:
        k, length = sample.prompt_alt_tokens_k, len(sample.prompt)
        self._params = SamplingParams(temperature=sample.params.temperature)
        self._streams_K: NDArray[np.uint64] = np.array(
            [stream_of(sample.params.seed, _ALT_STREAM + j) for j in range(k)], dtype=np.uint64
        )
        self._ids = np.zeros((length - 1, k), dtype=np.int32)
        self._logprobs = np.zeros((length - 1, k), dtype=np.float32)

    def add(self, offset: int, logits_SV: Tensor, logprobs_SV: Tensor) -> None:
        count, vocab = logits_SV.shape
        positions_S = np.arange(offset, offset + count)
        rules = draw_rules([self._params] * count, vocab, logits_SV.device)
        for j, stream in enumerate(self._streams_K):
            numbers_S = uniforms(np.full(count, stream), positions_S)
            tokens_S = draw(logits_SV, rules, numbers_S).tokens_R
            chosen_S = logprobs_SV.gather(1, tokens_S[:, None])[:, 0]
            self._ids[offset : offset + count, j] = tokens_S.cpu().numpy()
            self._logprobs[offset : offset + count, j] = chosen_S.cpu().numpy()

    def output(self) -> AltTokens | None:
        return AltTokens(self._ids, self._logprobs) if len(self._streams_K) else None
