"""Text to SQL by supervised fine-tuning.

python -m recipes.text_to_sql.sft [--model google/gemma-3-270m-it] [--base-url URL]
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from itertools import islice

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.data import supervised
from recipes.kit.running import Metrics, main
from recipes.tasks.sql import questions
from recipes.text_to_sql.held_out import tests


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
    yield {"step": 0, **await tests(model, tokenizer)}
    for step in range(1, plan.steps + 1):
        data = [
            supervised(
                prompt_tokens(tokenizer, each.messages),
                answer_tokens(tokenizer, each.messages, each.sql),
                weight=1 / plan.batch,
            )
            for each in islice(asked, plan.batch)
        ]
        gradient = model.forward_backward(data, "cross_entropy")
        await model.optim_step(adam)
        metrics = {"step": step, "loss": (await gradient).metrics["nll:mean"]}
        if step % plan.test_every == 0:
            metrics |= await tests(model, tokenizer)
        yield metrics
    saved = await model.save_state(f"sft-{plan.seed}")
    print(f"saved {saved.path}; it is what --start of recipes.text_to_sql.grpo wants")


if __name__ == "__main__":
    raise SystemExit(main(train, Plan, __file__))
