"""Verifiable rewards: sums, checked by a line of Python.

python -m recipes.rlvr_arithmetic.train [--model Qwen/Qwen3-0.6B --warm-up 0] [--base-url URL]

A model that never saw a digit has nothing to reward: `warm_up` steps of supervised training come
first, in which a share `noise` of the answers is wrong, so that it is sometimes right and never
sure. Instruct models need none.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.data import supervised
from recipes.kit.groups import accuracy, data_of, mean_reward, sample_groups
from recipes.kit.running import Metrics, main
from recipes.tasks.arithmetic import Question, questions, reward

MAX_TOKENS = 16


@dataclass(frozen=True)
class Plan:
    model: str
    seed: int
    rank: int
    largest: int
    warm_up: int
    noise: float
    warm_up_rate: float
    learning_rate: float
    questions: int
    samples: int
    steps: int
    test_every: int


async def train(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> AsyncIterator[Metrics]:
    model = await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)
    await warm_up(model, tokenizer, plan)
    adam = tinker.AdamParams(learning_rate=plan.learning_rate)
    asked = questions(plan.seed, plan.largest)
    yield {"step": 0, "test": await test(model, tokenizer, plan)}
    for step in range(1, plan.steps + 1):
        sampler = await model.save_weights_and_get_sampling_client()
        batch = list(islice(asked, plan.questions))
        prompts = [prompt_tokens(tokenizer, each.messages) for each in batch]
        groups = await sample_groups(
            sampler,
            tokenizer,
            prompts,
            lambda i, text, batch=batch: reward(batch[i], text),
            samples=plan.samples,
            max_tokens=MAX_TOKENS,
            seed=plan.seed * 1_000_000 + step * 1_000,
        )
        data = data_of(prompts, groups)
        if data:
            gradient = model.forward_backward(data, "importance_sampling")
            update = model.optim_step(adam)
            await gradient
            await update
        metrics = {"step": step, "reward": mean_reward(groups)}
        if step % plan.test_every == 0:
            metrics["test"] = await test(model, tokenizer, plan)
        yield metrics


async def warm_up(
    model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> None:
    rng = random.Random(plan.seed)
    asked = questions(f"warm-up {plan.seed}", plan.largest)

    def shown(question: Question) -> str:
        return next(asked).answer if rng.random() < plan.noise else question.answer

    for _ in range(plan.warm_up):
        data = [
            supervised(
                prompt_tokens(tokenizer, each.messages),
                answer_tokens(tokenizer, each.messages, shown(each)),
                weight=1 / 64,
            )
            for each in islice(asked, 64)
        ]
        gradient = model.forward_backward(data, "cross_entropy")
        await model.optim_step(tinker.AdamParams(learning_rate=plan.warm_up_rate))
        await gradient


async def test(
    model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> float:
    """The likeliest answers to sums that are never trained on."""
    asked = list(islice(questions("test", plan.largest), 96))
    return await accuracy(
        await model.save_weights_and_get_sampling_client(),
        tokenizer,
        [prompt_tokens(tokenizer, each.messages) for each in asked],
        lambda i, text: reward(asked[i], text),
        max_tokens=MAX_TOKENS,
    )


if __name__ == "__main__":
    raise SystemExit(main(train, Plan, __file__))
