"""Reinforcement learning with OpenRL's own async client. With `openrl serve` running:

python -m recipes.rl_openrl_client http://127.0.0.1:8000
"""

import asyncio
import sys
from collections.abc import Sequence
from itertools import islice

import numpy as np
from transformers import AutoTokenizer

import openrl
from openrl import demo
from recipes.tasks.sql import Question, questions, reward

tokenizer = AutoTokenizer.from_pretrained(demo.model_directory())


def prompt(question: Question) -> list[int]:
    return tokenizer.encode(
        tokenizer.apply_chat_template(question.messages, tokenize=False, add_generation_prompt=True)
    )


def group_data(
    question: Question, sampled: Sequence[openrl.SampledSequence]
) -> tuple[list[openrl.Datum], float]:
    """What one question's answers teach: each by its reward less the group's mean."""
    texts = [tokenizer.decode(each.tokens, skip_special_tokens=True) for each in sampled]
    rewards = [reward(question, text.strip()) for text in texts]
    mean = sum(rewards) / len(rewards)
    given = np.array(prompt(question), np.int32)
    zeros = np.zeros(len(given) - 1, np.float32)
    data = []
    for answer, got in zip(sampled, rewards, strict=True):
        tokens = np.concatenate([given, answer.tokens])
        advantages = np.full(len(answer.tokens), got - mean, np.float32)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": np.concatenate([zeros, answer.logprobs]),
            "advantages": np.concatenate([zeros, advantages]),
        }
        data.append(openrl.Datum(tokens[:-1], inputs))
    return data, mean


async def main(url: str, steps: int = 20) -> None:
    asked = questions("client")
    async with openrl.connect(url, "tml-local") as client:
        model = await client.create_model(demo.NAME, rank=16, seed=0)
        for step in range(steps):
            sampler = await model.sampler()
            batch = list(islice(asked, 16))
            samples = (sampler.sample(prompt(each), 8, max_tokens=48) for each in batch)
            outputs = await asyncio.gather(*samples)
            groups = [group_data(q, o.sequences) for q, o in zip(batch, outputs, strict=True)]
            data = [datum for group, _ in groups for datum in group]
            gradient = await model.forward_backward(data, "importance_sampling")
            update = await model.optim_step(openrl.AdamParams(learning_rate=2e-3))
            await gradient, await update
            print(f"step {step + 1}: reward {np.mean([mean for _, mean in groups]):.3f}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
