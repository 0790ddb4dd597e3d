"""Direct preference optimisation (https://arxiv.org/abs/2305.18290, equation 7).
python -m recipes.algorithms.dpo

The loss of a pair is −log σ(m) with the margin m = β ((lp_c − ref_c) − (lp_r − ref_r)). Its slope
in lp_c is −β σ(−m), and the opposite in lp_r: `cross_entropy` with these weights has that gradient.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

import openrl
from openrl.client.blocking import BlockingClient, BlockingModel
from recipes.algorithms.rollouts import Steps, example, main
from recipes.tasks.sql import Question, corrupt, questions

BATCH, BETA = 32, 0.1
ADAM = openrl.AdamParams(learning_rate=5e-4)
Pair = tuple[Question, str]


def train(client: BlockingClient, base_model: str, steps: int, seed: int) -> Steps:
    model = client.create_model(base_model, rank=16, seed=seed)
    reference = client.create_model(base_model, rank=16, seed=seed)  # a fresh adapter is the base
    shown = pairs(seed)
    for _ in range(steps):
        batch = list(islice(shown, BATCH))
        data = examples(base_model, batch, np.ones(BATCH))
        gains = logprobs(model, data) - logprobs(reference, data)
        slopes = dpo_slopes(gains[0::2], gains[1::2])
        gradient = model.forward_backward(examples(base_model, batch, slopes), "cross_entropy")
        model.optim_step(ADAM).result()
        gradient.result()
        margins = BETA * (gains[0::2] - gains[1::2])
        yield {"loss": float(np.logaddexp(0, -margins).mean()), "won": float((margins > 0).mean())}


def dpo_slopes(chosen: NDArray[np.float64], rejected: NDArray[np.float64]) -> NDArray[np.float64]:
    """β σ(−m) for each pair, from gains over the reference. [B]"""
    return BETA / (1 + np.exp(BETA * (chosen - rejected)))


def pairs(seed: int) -> Iterator[Pair]:
    """A question, and a query with a mistake in it."""
    rng = random.Random(seed)
    for question in questions(f"pairs:{seed}"):
        if (wrong := corrupt(question, rng)) != question.sql:
            yield question, wrong


def examples(
    base_model: str, batch: Sequence[Pair], weights: NDArray[np.float64]
) -> list[openrl.Datum]:
    """Chosen, rejected, chosen, …"""
    return [
        example(base_model, question, sql, sign * weight)
        for (question, wrong), weight in zip(batch, weights, strict=True)
        for sql, sign in ((question.sql, 1), (wrong, -1))
    ]


def logprobs(model: BlockingModel, data: Sequence[openrl.Datum]) -> NDArray[np.float64]:
    """Of each answer as a whole. [B]"""
    outputs = model.forward(data, "cross_entropy").result().outputs
    return np.array(
        [
            np.sum(output["logprobs"] * (each.loss_inputs["weights"] != 0), dtype=np.float64)
            for output, each in zip(outputs, data, strict=True)
        ]
    )


if __name__ == "__main__":
    main(train)
