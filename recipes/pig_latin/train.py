"""Supervised fine-tuning, the hello-world: words become pig latin.

python -m recipes.pig_latin.train [--model Qwen/Qwen3-0.6B] [--base-url URL]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.data import supervised
from recipes.kit.groups import accuracy
from recipes.kit.running import Metrics, main
from recipes.tasks.pig_latin import TEST, questions, score


@dataclass(frozen=True)
class Plan:
    model: str
    seed: int
    rank: int
    learning_rate: float
    batch: int
    steps: int
    test_every: int


async def train(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> AsyncIterator[Metrics]:
    model = await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)
    adam = tinker.AdamParams(learning_rate=plan.learning_rate)
    asked = questions(plan.seed)
    for step in range(1, plan.steps + 1):
        data = [
            supervised(
                prompt_tokens(tokenizer, each.messages),
                answer_tokens(tokenizer, each.messages, each.answer),
                weight=1 / plan.batch,
            )
            for each in islice(asked, plan.batch)
        ]
        gradient = model.forward_backward(data, "cross_entropy")
        await model.optim_step(adam)
        metrics = {"step": step, "loss": (await gradient).metrics["nll:mean"]}
        if step % plan.test_every == 0:
            metrics["words right"] = await test(model, tokenizer)
        yield metrics


async def test(model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase) -> float:
    """On words that no training sentence has."""
    asked = list(islice(questions("test", TEST), 64))
    return await accuracy(
        await model.save_weights_and_get_sampling_client(),
        tokenizer,
        [prompt_tokens(tokenizer, each.messages) for each in asked],
        lambda i, text: score(asked[i], text),
        max_tokens=40,
    )


if __name__ == "__main__":
    raise SystemExit(main(train, Plan, __file__))
