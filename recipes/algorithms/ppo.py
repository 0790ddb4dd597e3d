"""Proximal policy optimisation with generalised advantages (https://arxiv.org/abs/1506.02438).

python -m recipes.algorithms.ppo

The critic is the laptop's: a ridge regression of the final reward on what is known at each token,
fitted anew on the last batches. It needs no second model, and costs no time of the server.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import numpy as np
from numpy.typing import NDArray

import openrl
from openrl.client.blocking import BlockingClient
from recipes.algorithms.rollouts import Rollout, Steps, batches, datum, main, mean_reward, roll_out

QUESTIONS, SAMPLES, UPDATES, LAMBDA = 16, 8, 2, 0.95
ADAM = openrl.AdamParams(learning_rate=1e-3)


def train(client: BlockingClient, base_model: str, steps: int, seed: int) -> Steps:
    model = client.create_model(base_model, rank=16, seed=seed)
    memory: deque[list[Rollout]] = deque(maxlen=4)
    for step, batch in enumerate(islice(batches(seed, QUESTIONS), steps)):
        rollouts = roll_out(model, batch, SAMPLES, seed=seed * 1_000_000 + step)
        memory.append(rollouts)
        critic = fitted([each for batch in memory for each in batch])
        advantages = [gae(each.reward, features(each) @ critic) for each in rollouts]
        spread = np.concatenate(advantages).std() + 1e-6
        data = [
            datum(each.prompt, each.tokens, logprobs=each.logprobs, advantages=a / spread)
            for each, a in zip(rollouts, advantages, strict=True)
        ]
        for _ in range(UPDATES):
            gradient = model.forward_backward(data, "ppo")
            model.optim_step(ADAM).result()
            gradient.result()
        errors = [each.reward - (features(each) @ critic)[0] for each in rollouts]
        yield {"reward": mean_reward(rollouts), "critic's error": float(np.std(errors))}


def features(rollout: Rollout) -> NDArray[np.float64]:
    """What is known before each token: how far it is, how sure the sampler was so far, and how long
    the question is. [T, 4]"""
    before = np.concatenate([[0.0], rollout.logprobs[:-1]])
    ones = np.ones(len(before))
    progress = np.arange(len(before)) / 48
    doubt = np.cumsum(before) / 10
    return np.stack([ones, progress, doubt, ones * len(rollout.prompt) / 100], axis=1)


def fitted(rollouts: list[Rollout], ridge: float = 1.0) -> NDArray[np.float64]:
    """The critic's coefficients. [4]"""
    X = np.concatenate([features(each) for each in rollouts])
    y = np.concatenate([np.full(len(each.tokens), each.reward) for each in rollouts])
    return np.linalg.solve(X.T @ X + ridge * np.eye(X.shape[1]), X.T @ y)


def gae(reward: float, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Without discount; the reward comes with the last token: A_t = δ_t + λ A_{t+1}, where
    δ_t = V_{t+1} − V_t, and the reward stands for the value after the end. [T]"""
    deltas = np.diff(np.append(values, reward))
    advantages = np.zeros(len(deltas))
    ahead = 0.0
    for t in reversed(range(len(deltas))):
        advantages[t] = ahead = deltas[t] + LAMBDA * ahead
    return advantages


if __name__ == "__main__":
    main(train)
