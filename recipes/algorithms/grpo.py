"""Group-relative policy optimisation: PPO's clipped ratio, advantages from a group's rewards
(https://arxiv.org/abs/2402.03300). python -m recipes.algorithms.grpo
"""

from __future__ import annotations

from itertools import islice

import openrl
from openrl.client.blocking import BlockingClient
from recipes.algorithms.rollouts import Steps, batches, datum, main, mean_reward, roll_out, z_scores

QUESTIONS, SAMPLES, UPDATES = 16, 8, 2
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}
ADAM = openrl.AdamParams(learning_rate=1e-3)


def train(client: BlockingClient, base_model: str, steps: int, seed: int) -> Steps:
    model = client.create_model(base_model, rank=16, seed=seed)
    for step, batch in enumerate(islice(batches(seed, QUESTIONS), steps)):
        rollouts = roll_out(model, batch, SAMPLES, seed=seed * 1_000_000 + step)
        data = [
            datum(each.prompt, each.tokens, logprobs=each.logprobs, advantages=score)
            for each, score in zip(rollouts, z_scores(rollouts), strict=True)
            if score
        ]
        clipped = 0.0
        for _ in range(UPDATES if data else 0):
            gradient = model.forward_backward(data, "ppo", CLIP)
            model.optim_step(ADAM).result()
            clipped = gradient.result().metrics["clip_fraction:mean"]
        yield {"reward": mean_reward(rollouts), "clipped": clipped}


if __name__ == "__main__":
    main(train)
