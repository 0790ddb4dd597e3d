"""Supervised fine-tuning. python -m recipes.algorithms.sft"""

from __future__ import annotations

from itertools import islice

import openrl
from openrl.client.blocking import BlockingClient
from recipes.algorithms.rollouts import Steps, batches, example, main

BATCH = 32
ADAM = openrl.AdamParams(learning_rate=1e-3)


def train(client: BlockingClient, base_model: str, steps: int, seed: int) -> Steps:
    model = client.create_model(base_model, rank=16, seed=seed)
    for batch in islice(batches(seed, BATCH), steps):
        data = [example(base_model, question, question.sql, weight=1 / BATCH) for question in batch]
        gradient = model.forward_backward(data, "cross_entropy")
        model.optim_step(ADAM).result()
        yield {"loss": gradient.result().metrics["nll:mean"]}


if __name__ == "__main__":
    main(train)
