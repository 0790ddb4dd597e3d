"""Training data. Position i of a loss input speaks of token i + 1, so tokens and targets are one
sequence, shifted by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tinker
from numpy.typing import ArrayLike


def supervised(prompt: Sequence[int], answer: Sequence[int], weight: float = 1.0) -> tinker.Datum:
    """For `cross_entropy`: the prompt's tokens are given, so they weigh nothing."""
    return datum(prompt, answer, weights=np.full(len(answer), weight))


def policy(
    prompt: Sequence[int], answer: Sequence[int], logprobs: ArrayLike, advantages: ArrayLike
) -> tinker.Datum:
    """For `importance_sampling`, `ppo` and `cispo`: `logprobs` are the sampler's; one advantage
    for each token of the answer, or one for all."""
    spread = np.broadcast_to(np.asarray(advantages, np.float32), len(answer))
    return datum(prompt, answer, logprobs=logprobs, advantages=spread)


def datum(prompt: Sequence[int], answer: Sequence[int], **inputs: ArrayLike) -> tinker.Datum:
    """`inputs` have a number for each token of the answer; over the prompt they are zero."""
    tokens = [*prompt, *answer]
    given = np.zeros(len(prompt) - 1, np.float32)
    shifted = {
        name: np.concatenate([given, np.asarray(values, np.float32)])
        for name, values in inputs.items()
    }
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": np.array(tokens[1:], dtype=np.int64), **shifted},
    )
