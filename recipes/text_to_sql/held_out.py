"""The test: greedy queries over schemas that nobody trains on, run in the sandbox."""

from __future__ import annotations

from itertools import islice

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import prompt_tokens
from recipes.kit.groups import accuracy
from recipes.tasks.sql import HELD_OUT, SCHEMAS, questions, reward

QUESTIONS = 96
MAX_TOKENS = 64


async def tests(
    model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase
) -> dict[str, float]:
    """The share of right rows over known schemas, with questions of another seed, and over new
    ones."""
    sampler = await model.save_weights_and_get_sampling_client()
    shares = {}
    for name, schemas in (("known schemas", SCHEMAS), ("new schemas", HELD_OUT)):
        asked = list(islice(questions("test", schemas), QUESTIONS))
        prompts = [prompt_tokens(tokenizer, each.messages) for each in asked]
        shares[name] = await accuracy(
            sampler,
            tokenizer,
            prompts,
            lambda i, text, asked=asked: reward(asked[i], text),
            max_tokens=MAX_TOKENS,
        )
    return shares
