"""An agent that queries a database, sees its errors, and tries again, trained by reinforcement.

python -m recipes.multi_turn.train [--model Qwen/Qwen3-0.6B --warm-up 0] [--base-url URL]

The demo model has never seen a dialogue with a second answer: `warm_up` steps show it some, in
which a query that failed is followed by the right one. Instruct models need none.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.data import supervised
from recipes.kit.running import Metrics, main
from recipes.multi_turn.episode import Episode, complaint_about, play, told_tokens
from recipes.tasks.sql import Question, corrupt, questions


@dataclass(frozen=True)
class Plan:
    model: str
    seed: int
    rank: int
    warm_up: int
    learning_rate: float
    questions: int
    samples: int
    turns: int
    steps: int
    test_every: int


async def train(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> AsyncIterator[Metrics]:
    model = await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)
    adam = tinker.AdamParams(learning_rate=plan.learning_rate)
    asked = questions(plan.seed)
    await warm_up(model, tokenizer, plan)
    yield {"step": 0, **await test(model, tokenizer, plan)}
    for step in range(1, plan.steps + 1):
        sampler = await model.save_weights_and_get_sampling_client()
        groups = await asyncio.gather(
            *(
                group(sampler, tokenizer, question, plan, seed=(plan.seed, step, i))
                for i, question in enumerate(islice(asked, plan.questions))
            )
        )
        data = [datum for episodes in groups for datum in group_data(episodes)]
        if data:
            gradient = model.forward_backward(data, "importance_sampling")
            update = model.optim_step(adam)
            await gradient
            await update
        metrics = {"step": step, **shares([each for episodes in groups for each in episodes])}
        if step % plan.test_every == 0:
            metrics |= await test(model, tokenizer, plan)
        yield metrics


async def warm_up(
    model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> None:
    shown = second_attempts(tokenizer, f"warm-up {plan.seed}")
    for _ in range(plan.warm_up):
        gradient = model.forward_backward(list(islice(shown, 32)), "cross_entropy")
        await model.optim_step(tinker.AdamParams(learning_rate=1e-3))
        await gradient


def second_attempts(tokenizer: PreTrainedTokenizerBase, seed: str) -> Iterator[tinker.Datum]:
    """A query that failed, the complaint, and the right query, which alone is learnt."""
    rng = random.Random(seed)
    for question in questions(seed):
        wrong = corrupt(question, rng)
        complaint = complaint_about(question, wrong)
        if complaint is not None:
            prompt = prompt_tokens(tokenizer, question.messages)
            failed = answer_tokens(tokenizer, question.messages, wrong)
            told = told_tokens(tokenizer, complaint, ended=True)
            right = answer_tokens(tokenizer, question.messages, question.sql)
            yield supervised(prompt + failed + told, right, weight=1 / 32)


async def group(
    sampler: tinker.SamplingClient,
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    plan: Plan,
    seed: tuple[int, int, int],
) -> Sequence[Episode]:
    """Several attempts at one question. Each is a request of its own, since their dialogues part;
    the server reads the common prompt once."""
    run, step, number = seed
    first = ((run * 1_000 + step) * 100 + number) * 1_000
    return await asyncio.gather(
        *(
            play(sampler, tokenizer, question, turns=plan.turns, seed=first + 10 * i)
            for i in range(plan.samples)
        )
    )


def group_data(episodes: Sequence[Episode]) -> list[tinker.Datum]:
    mean = sum(each.reward for each in episodes) / len(episodes)
    return [each.data(each.reward - mean) for each in episodes if each.reward != mean]


async def test(
    model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> Metrics:
    """The likeliest queries to questions of another seed."""
    sampler = await model.save_weights_and_get_sampling_client()
    asked = islice(questions("test"), 96)
    playing = (
        play(sampler, tokenizer, each, turns=plan.turns, seed=0, temperature=0.0) for each in asked
    )
    return {f"test {name}": share for name, share in shares(await asyncio.gather(*playing)).items()}


def shares(episodes: Sequence[Episode]) -> dict[str, float]:
    """`first` is right at once, `reward` right in the end."""
    first = [each.rewards[0] for each in episodes]
    last = [each.reward for each in episodes]
    return {"first": sum(first) / len(first), "reward": sum(last) / len(last)}


if __name__ == "__main__":
    raise SystemExit(main(train, Plan, __file__))
