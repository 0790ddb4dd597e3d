"""On-policy distillation: the student answers, and the teacher says of each token how likely it
would have been to say it.

python -m recipes.distill.train [--model Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B] [--base-url URL]

A token's advantage is log p_teacher − log p_student, whose expectation is the negative KL
divergence of the student from the teacher. Without `--teacher` the teacher is another adapter of
the same model, taught by examples first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.data import policy, supervised
from recipes.kit.groups import Answer, mean_reward, sample_groups
from recipes.kit.running import Metrics, main
from recipes.tasks.sql import questions, reward

MAX_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    model: str
    seed: int
    teacher: str
    rank: int
    teacher_steps: int
    teacher_rate: float
    learning_rate: float
    questions: int
    samples: int
    steps: int


async def train(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> AsyncIterator[Metrics]:
    teacher = await make_teacher(service, tokenizer, plan)
    model = await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)
    adam = tinker.AdamParams(learning_rate=plan.learning_rate)
    asked = questions(plan.seed)
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
        said = [(p, answer) for p, group in zip(prompts, groups, strict=True) for answer in group]
        judged = await asyncio.gather(*(judge(teacher, *each) for each in said))
        advantages = [
            j - np.asarray(answer.logprobs) for j, (_, answer) in zip(judged, said, strict=True)
        ]
        data = [
            policy(prompt, answer.tokens, answer.logprobs, advantage)
            for (prompt, answer), advantage in zip(said, advantages, strict=True)
        ]
        gradient = model.forward_backward(data, "importance_sampling")
        update = model.optim_step(adam)
        await gradient
        await update
        yield {
            "step": step,
            "KL to the teacher, a token": -float(np.concatenate(advantages).mean()),
            "sampled right": mean_reward(groups),
        }


async def judge(
    teacher: tinker.SamplingClient, prompt: Sequence[int], answer: Answer
) -> np.ndarray:
    """The teacher's log-probability of each token of the answer."""
    tokens = [*prompt, *answer.tokens]
    logprobs = await teacher.compute_logprobs(tinker.ModelInput.from_ints(tokens))
    return np.array(logprobs[len(prompt) :], dtype=np.float32)


async def make_teacher(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> tinker.SamplingClient:
    if plan.teacher:
        return await service.create_sampling_client(base_model=plan.teacher)
    model = await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)
    asked = questions("teacher")
    for _ in range(plan.teacher_steps):
        data = [
            supervised(
                prompt_tokens(tokenizer, each.messages),
                answer_tokens(tokenizer, each.messages, each.sql),
                weight=1 / 32,
            )
            for each in islice(asked, 32)
        ]
        gradient = model.forward_backward(data, "cross_entropy")
        await model.optim_step(tinker.AdamParams(learning_rate=plan.teacher_rate))
        await gradient
    return await model.save_weights_and_get_sampling_client()


if __name__ == "__main__":
    raise SystemExit(main(train, Plan, __file__))
