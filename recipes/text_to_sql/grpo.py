"""Text to SQL by reinforcement: a query is rewarded when it gives the rows of the right one.

python -m recipes.text_to_sql.grpo [--model google/gemma-3-270m-it] [--base-url URL]
    [--start tinker://…/weights/sft-0]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import prompt_tokens
from recipes.kit.groups import data_of, mean_reward, sample_groups
from recipes.kit.running import Metrics, main
from recipes.tasks.sql import questions, reward
from recipes.text_to_sql.held_out import MAX_TOKENS, tests


@dataclass(frozen=True)
class Plan:
    model: str
    seed: int
    start: str
    rank: int
    learning_rate: float
    questions: int
    samples: int
    steps: int
    test_every: int


async def train(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> AsyncIterator[Metrics]:
    model = await begin(service, plan)
    adam = tinker.AdamParams(learning_rate=plan.learning_rate)
    asked = questions(plan.seed)
    yield {"step": 0, **await tests(model, tokenizer)}
    for step in range(1, plan.steps + 1):
        sampler = await model.save_weights_and_get_sampling_client()
        batch = list(islice(asked, plan.questions))
        prompts = [prompt_tokens(tokenizer, question.messages) for question in batch]
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
            # Both are on their way before either is awaited: the server never waits for us.
            gradient = model.forward_backward(data, "importance_sampling")
            update = model.optim_step(adam)
            await gradient
            await update
        metrics = {"step": step, "reward": mean_reward(groups)}
        if step % plan.test_every == 0:
            metrics |= await tests(model, tokenizer)
        yield metrics


async def begin(service: tinker.ServiceClient, plan: Plan) -> tinker.TrainingClient:
    if plan.start:
        return await service.create_training_client_from_state(plan.start)
    return await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)


if __name__ == "__main__":
    raise SystemExit(main(train, Plan, __file__))
