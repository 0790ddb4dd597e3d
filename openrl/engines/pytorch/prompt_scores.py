"""Log-probabilities of a prompt's own tokens, at temperature 1."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from openrl.types import FloatArray, Sample, SampleOutput, TopLogprobs

EMPTY_LOGPROB = -99999.0


class PromptScores:
    """Collects the scores of one prompt as its chunks are computed. Row t of the hidden states
    scores the token at t + 1; position 0 has no score."""

    def __init__(self, sample: Sample) -> None:
        length, k = len(sample.prompt), sample.topk_prompt_logprobs
        self._sample = sample
        self._logprobs: FloatArray = np.full(length, np.nan, dtype=np.float32)
        self._top_ids = np.zeros((length, k), dtype=np.int32)
        self._top_logprobs = np.full((length, k), EMPTY_LOGPROB, dtype=np.float32)

    def add(self, offset: int, logits_SV: Tensor) -> None:
        """`logits_SV` fp32 of the prompt's tokens `offset … offset + S`."""
        prompt = self._sample.prompt
        count = min(logits_SV.shape[0], len(prompt) - 1 - offset)
        if count < 1:
            return
        logprobs_SV = torch.log_softmax(logits_SV[:count], dim=-1)
        scored = slice(offset + 1, offset + 1 + count)
        targets = torch.from_numpy(prompt[scored].astype(np.int64)).to(logits_SV.device)
        chosen = logprobs_SV.gather(1, targets[:, None])[:, 0]
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
        return SampleOutput((), self._logprobs if sample.prompt_logprobs else None, top)
