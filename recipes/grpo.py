"""Group-relative policy optimisation through the `tinker` SDK, in one function.

Each step samples several answers to each question with the weights of that moment, scores them,
and raises the probability of the answers that are better than their group's mean.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import tinker
from text_to_sql import Question, questions, reward
from transformers import PreTrainedTokenizerBase

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


@dataclass(frozen=True)
class Answer:
    """`tokens` and their `logprobs` under the weights that sampled them."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reward: float


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
            for datum in group_data(prompt_tokens(tokenizer, question), group)
        ]
        if data:
            # Both are on their way before either is awaited: the server never waits for us.
            gradient = model.forward_backward(data, loss_fn="importance_sampling")
            update = model.optim_step(adam)
            await gradient
            await update
        yield Step(
            step=step,
            reward=float(np.mean([answer.reward for group in groups for answer in group])),
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

    async def group(number: int, question: Question) -> list[Answer]:
        prompt = tinker.ModelInput.from_ints(prompt_tokens(tokenizer, question))
        sampling = tinker.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=seed + number)
        response = await sampler.sample(prompt, num_samples=samples, sampling_params=sampling)
        return [_scored(question, tokenizer, sequence) for sequence in response.sequences]

    return await asyncio.gather(*(group(i, question) for i, question in enumerate(asked)))


def _scored(
    question: Question, tokenizer: PreTrainedTokenizerBase, sequence: tinker.SampledSequence
) -> Answer:
    text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
    logprobs = sequence.logprobs
    assert logprobs is not None, "the server sends logprobs with every sample"
    return Answer(text, sequence.tokens, logprobs, reward(question, text))


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, question: Question) -> list[int]:
    text = tokenizer.apply_chat_template(
        question.messages, tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def group_data(prompt: Sequence[int], group: Sequence[Answer]) -> list[tinker.Datum]:
    """Training data from the answers to one question: the advantage of an answer is its reward
    less the group's mean. A group that agrees teaches nothing and gives none."""
    mean = sum(answer.reward for answer in group) / len(group)
    return [
        _datum(prompt, answer, answer.reward - mean) for answer in group if answer.reward != mean
    ]


def _datum(prompt: Sequence[int], answer: Answer, advantage: float) -> tinker.Datum:
    """Position i predicts token i + 1. Prompt tokens are given, not chosen: advantage zero."""
    tokens = [*prompt, *answer.tokens]
    given = len(prompt) - 1
    chosen = len(answer.tokens)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "logprobs": np.array([0.0] * given + list(answer.logprobs), dtype=np.float32),
            "advantages": np.array([0.0] * given + [advantage] * chosen, dtype=np.float32),
        },
    )
