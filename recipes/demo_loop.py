"""Group-relative policy optimisation through the `tinker` SDK, in one function.

Each step samples several answers to each question with the weights of that moment, scores them,
and raises the probability of the answers that are better than their group's mean.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import prompt_tokens
from recipes.kit.groups import Answer, group_data, mean_reward, sample_groups
from recipes.tasks.sql import Question, questions, reward

MAX_TOKENS = 48


@dataclass(frozen=True)
class Plan:
    """`samples` answers are drawn for each of `questions` in every step."""

    learning_rate: float = 2e-3
    steps: int = 30
    seed: int = 0
    rank: int = 16
    questions: int = 16
    samples: int = 8


@dataclass(frozen=True)
class Step:
    """`reward` is the mean over all answers, `solved` the share of questions with a right one.
    Tokens are counted as sampled, and as trained on (prompts included)."""

    step: int
    reward: float
    solved: float
    sampled_tokens: int
    trained_tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (self.sampled_tokens + self.trained_tokens) / self.seconds


async def grpo(
    model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> AsyncIterator[Step]:
    """Trains `model` on fresh questions, and reports each step as it ends."""
    asked = questions(plan.seed)
    adam = tinker.AdamParams(learning_rate=plan.learning_rate)
    for step in range(plan.steps):
        started = time.perf_counter()
        sampler = await model.save_weights_and_get_sampling_client()
        batch = list(islice(asked, plan.questions))
        seed = plan.seed * 1_000_000 + step * 1_000
        groups = await answers(sampler, tokenizer, batch, plan.samples, seed=seed)
        data = [
            datum
            for question, group in zip(batch, groups, strict=True)
            for datum in group_data(prompt_tokens(tokenizer, question.messages), group)
        ]
        if data:
            # Both are on their way before either is awaited: the server never waits for us.
            gradient = model.forward_backward(data, loss_fn="importance_sampling")
            update = model.optim_step(adam)
            await gradient
            await update
        yield Step(
            step=step,
            reward=mean_reward(groups),
            solved=float(np.mean([max(a.reward for a in group) for group in groups])),
            sampled_tokens=sum(len(answer.tokens) for group in groups for answer in group),
            trained_tokens=sum(datum.model_input.length for datum in data),
            seconds=time.perf_counter() - started,
        )


async def answers(
    sampler: tinker.SamplingClient,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[Question],
    samples: int,
    *,
    seed: int,
) -> list[list[Answer]]:
    """`samples` scored answers to each question, all sampled at once at temperature 1."""
    return await sample_groups(
        sampler,
        tokenizer,
        [prompt_tokens(tokenizer, question.messages) for question in asked],
        lambda i, text: reward(asked[i], text),
        samples=samples,
        max_tokens=MAX_TOKENS,
        seed=seed,
    )
