"""Groups of answers to one prompt, scored, and what they teach."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.data import policy


@dataclass(frozen=True)
class Answer:
    """`tokens` and their `logprobs` under the weights that sampled them."""

    text: str
    tokens: Sequence[int]
    logprobs: Sequence[float]
    reward: float


async def sample_groups(
    sampler: tinker.SamplingClient,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    score: Callable[[int, str], float],
    *,
    samples: int,
    max_tokens: int,
    seed: int,
    temperature: float = 1.0,
) -> list[list[Answer]]:
    """`samples` answers to each prompt, all asked for at once. `score(i, text)` rates an answer to
    prompt i."""

    async def group(i: int, prompt: Sequence[int]) -> list[Answer]:
        params = tinker.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed + i
        )
        model_input = tinker.ModelInput.from_ints(list(prompt))
        response = await sampler.sample(model_input, num_samples=samples, sampling_params=params)
        return [answer(i, sequence) for sequence in response.sequences]

    def answer(i: int, sequence: tinker.SampledSequence) -> Answer:
        text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
        logprobs = sequence.logprobs
        assert logprobs is not None, "the server sends logprobs with every sample"
        return Answer(text, sequence.tokens, logprobs, score(i, text))

    return await asyncio.gather(*(group(i, prompt) for i, prompt in enumerate(prompts)))


async def accuracy(
    sampler: tinker.SamplingClient,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    score: Callable[[int, str], float],
    *,
    max_tokens: int,
) -> float:
    """The mean score of the likeliest answers (temperature 0)."""
    groups = await sample_groups(
        sampler, tokenizer, prompts, score,
        samples=1, max_tokens=max_tokens, seed=0, temperature=0.0,
    )  # fmt: skip
    return mean_reward(groups)


def mean_reward(groups: Sequence[Sequence[Answer]]) -> float:
    rewards = [answer.reward for group in groups for answer in group]
    return sum(rewards) / len(rewards)


def group_data(prompt: Sequence[int], group: Sequence[Answer]) -> list[tinker.Datum]:
    """Training data from the answers to one prompt: the advantage of an answer is its reward less
    the group's mean. A group that agrees teaches nothing and gives none."""
    mean = sum(answer.reward for answer in group) / len(group)
    return [
        policy(prompt, answer.tokens, answer.logprobs, answer.reward - mean)
        for answer in group
        if answer.reward != mean
    ]


def data_of(
    prompts: Sequence[Sequence[int]], groups: Sequence[Sequence[Answer]]
) -> list[tinker.Datum]:
    """`group_data` of all groups of a batch, in order."""
    pairs = zip(prompts, groups, strict=True)
    return [datum for prompt, group in pairs for datum in group_data(prompt, group)]
