"""The experiment that `openrl research text_to_sql` varies: GRPO with settings, and a reward.

`research` trains and yields the path of its weights at each of `rungs` even points, the last one
included. How good they are is not its business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from itertools import islice

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import prompt_tokens
from recipes.kit.groups import data_of, sample_groups
from recipes.tasks.sandbox import Rejected, run_query
from recipes.tasks.sql import Question, database, questions, reward

MAX_TOKENS = 64


async def research(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, settings: dict
) -> AsyncIterator[str]:
    model = await service.create_lora_training_client(
        settings["model"], rank=settings["rank"], seed=settings["seed"]
    )
    adam = tinker.AdamParams(learning_rate=settings["learning_rate"])
    # The same count of samples whatever the size of a group: experiments cost alike.
    asked_at_once = settings["questions"] * 8 // settings["samples"]
    asked = questions(settings["seed"])
    steps, rungs = settings["steps"], settings["rungs"]
    for step in range(1, steps + 1):
        sampler = await model.save_weights_and_get_sampling_client()
        batch = list(islice(asked, asked_at_once))
        prompts = [prompt_tokens(tokenizer, question.messages) for question in batch]
        groups = await sample_groups(
            sampler,
            tokenizer,
            prompts,
            lambda i, text, batch=batch: shaped(settings["reward"], batch[i], text),
            samples=settings["samples"],
            max_tokens=MAX_TOKENS,
            seed=settings["seed"] * 1_000_000 + step * 1_000,
        )
        data = data_of(prompts, groups)
        if data:
            gradient = model.forward_backward(data, settings["loss"])
            update = model.optim_step(adam)
            await gradient
            await update
        if step * rungs % steps < rungs:
            saved = await model.save_weights_for_sampler(f"rung-{step}")
            yield saved.path


def shaped(name: str, question: Question, sql: str) -> float:
    """What the training is rewarded by; the judging has a reward of its own."""
    right = reward(question, sql)
    if name == "rows" or right:
        return right
    try:
        rows = run_query(database(question.schema), sql)
    except Rejected:
        return 0.0
    if name == "rows and validity":
        return 0.1
    wanted = Counter(run_query(database(question.schema), question.sql))
    common = (wanted & Counter(rows)).total()
    return 0.5 * common / max(wanted.total(), len(rows), 1)
