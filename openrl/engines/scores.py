"""What a sample may ask about its prompt and its tokens, and what may not be asked. Pure."""

from __future__ import annotations

import numpy as np

from openrl.config import Limits
from openrl.errors import UserError
from openrl.types import Cells, Sample


def check_scores(sample: Sample, vocab_size: int, limits: Limits) -> None:
    """Raises `UserError` that names the option."""
    most = limits.topk_prompt_logprobs
    _check_k("topk_prompt_logprobs", sample.topk_prompt_logprobs, most)
    _check_k("prompt_alt_tokens_k", sample.prompt_alt_tokens_k, most)
    _check_k("topk_sample_logprobs", sample.topk_sample_logprobs, limits.topk_sample_logprobs)
    if sample.target_prompt_logprobs is not None:
        _check_targets(sample.target_prompt_logprobs, len(sample.prompt), vocab_size, most)
    if sample.prompt_logprobs_last_n is not None:
        _check_last_n(sample, sample.prompt_logprobs_last_n)


def _check_k(name: str, k: int, most: int) -> None:
    if not 0 <= k <= most:
        raise UserError(f"{name} must be from 0 to {most}, got {k}")


def _check_last_n(sample: Sample, last_n: int) -> None:
    if not sample.prompt_logprobs:
        raise UserError("prompt_logprobs_last_n needs prompt_logprobs")
    if not 1 <= last_n <= len(sample.prompt) - 1:
        raise UserError(
            f"prompt_logprobs_last_n must be from 1 to {len(sample.prompt) - 1}, one less than the "
            f"prompt's length, got {last_n}"
        )


def _check_targets(targets: Cells, prompt: int, vocab_size: int, most: int) -> None:
    name, ids = "target_prompt_logprobs", targets.values
    if targets.shape[0] != prompt - 1:
        raise UserError(
            f"{name}: {targets.shape[0]} rows for a prompt of {prompt} tokens; there must be "
            f"{prompt - 1}, one for each position after the first"
        )
    outside = (ids < -1) | (ids >= vocab_size)
    if outside.any():
        raise UserError(
            f"{name}: token {int(ids[int(np.argmax(outside))])} is outside the vocabulary of "
            f"{vocab_size}; -1 asks for nothing"
        )
    named = targets.rows()[ids >= 0]
    if not named.size:
        raise UserError(f"{name}: at least one cell must name a token")
    widest = int(np.bincount(named).max())
    if widest > most:
        raise UserError(f"{name}: {widest} tokens at one position, at most {most}")


def first_scored(sample: Sample) -> int | None:
    """The first prompt token whose logits are asked for, counted from 0 (it scores the next one);
    None when nothing is asked about the prompt."""
    length, starts = len(sample.prompt), []
    if sample.prompt_logprobs or sample.topk_prompt_logprobs:
        starts.append(length - 1 - (sample.prompt_logprobs_last_n or length - 1))
    if sample.target_prompt_logprobs is not None:
        targets = sample.target_prompt_logprobs
        starts.append(int(targets.rows()[targets.values >= 0].min()))
    if sample.prompt_alt_tokens_k:
        starts.append(0)
    return min(starts, default=None)
