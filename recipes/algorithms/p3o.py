"""Policy-on policy-off policy optimisation (https://arxiv.org/abs/1905.01756), as it is used for
language models: the ratio r = exp(lp − q) is cut at the batch's effective sample size,
ess = (Σ r)² / (n Σ r²), and what the cut leaves is held near the sampler:

    L = −Σ stop(min(r, ess)) A lp + (1 − ess) Σ (lp − q + exp(q − lp) − 1)

python -m recipes.algorithms.p3o

No loss of the server says this, but its slope in lp is a function of lp alone: `forward` gives lp,
and `cross_entropy` with weights −dL/dlp has L's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

import openrl
from openrl.client.blocking import BlockingClient
from recipes.algorithms.rollouts import Steps, batches, datum, main, mean_reward, roll_out, z_scores

QUESTIONS, SAMPLES, UPDATES = 16, 8, 2
ADAM = openrl.AdamParams(learning_rate=1e-3)


def train(client: BlockingClient, base_model: str, steps: int, seed: int) -> Steps:
    model = client.create_model(base_model, rank=16, seed=seed)
    for step, batch in enumerate(islice(batches(seed, QUESTIONS), steps)):
        rollouts = roll_out(model, batch, SAMPLES, seed=seed * 1_000_000 + step)
        scores = z_scores(rollouts)
        plain = [datum(each.prompt, each.tokens, weights=1.0) for each in rollouts]
        ess = 1.0
        for _ in range(UPDATES):
            outputs = model.forward(plain, "cross_entropy").result().outputs
            now = [
                output["logprobs"][-len(each.tokens) :]
                for output, each in zip(outputs, rollouts, strict=True)
            ]
            weights, ess = p3o_weights(now, [each.logprobs for each in rollouts], scores)
            data = [
                datum(each.prompt, each.tokens, weights=w)
                for each, w in zip(rollouts, weights, strict=True)
            ]
            gradient = model.forward_backward(data, "cross_entropy")
            model.optim_step(ADAM).result()
            gradient.result()
        yield {"reward": mean_reward(rollouts), "ess": ess}


def p3o_weights(
    now: Sequence[NDArray[np.float32]],
    sampled: Sequence[NDArray[np.float32]],
    advantages: NDArray[np.float64],
) -> tuple[list[NDArray[np.float64]], float]:
    """−dL/dlp for each token of each answer, and the effective sample size of all, in (0, 1]."""
    gaps = [np.subtract(lp, q, dtype=np.float64) for lp, q in zip(now, sampled, strict=True)]
    ratios = np.exp(np.concatenate(gaps))
    ess = float(ratios.sum() ** 2 / (ratios.size * np.square(ratios).sum()))
    return [
        np.minimum(np.exp(gap), ess) * advantage - (1 - ess) * (1 - np.exp(-gap))
        for gap, advantage in zip(gaps, advantages, strict=True)
    ], ess


if __name__ == "__main__":
    main(train)
