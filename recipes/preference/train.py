"""Direct preference optimisation, with the loss in this file: the right query over one with a
mistake in it.

python -m recipes.preference.train [--model Qwen/Qwen3-0.6B] [--base-url URL]

The loss is −log σ(β ((lp_c − ref_c) − (lp_r − ref_r))), summed over pairs; lp and ref are the
log-probabilities of the chosen and the rejected answer under the model and under the one it began
as (https://arxiv.org/abs/2305.18290, equation 7).
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import tinker
import torch
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.data import supervised
from recipes.kit.groups import mean_reward, sample_groups
from recipes.kit.running import Metrics, main
from recipes.tasks.sql import corrupt, questions, reward


@dataclass(frozen=True)
class Plan:
    model: str
    seed: int
    rank: int
    learning_rate: float
    beta: float
    batch: int
    steps: int
    test_every: int


async def train(
    service: tinker.ServiceClient, tokenizer: PreTrainedTokenizerBase, plan: Plan
) -> AsyncIterator[Metrics]:
    model = await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)
    # A fresh adapter changes nothing, so its log-probabilities are the base model's.
    base = await service.create_lora_training_client(plan.model, rank=plan.rank, seed=plan.seed)
    adam = tinker.AdamParams(learning_rate=plan.learning_rate)
    shown = pairs(tokenizer, plan.seed)
    held_out = list(islice(pairs(tokenizer, "test"), 64))
    yield {"step": 0, **await tests(model, tokenizer, held_out)}
    for step in range(1, plan.steps + 1):
        data = flat(islice(shown, plan.batch))
        loss = dpo(await answer_logprobs(base, data), plan.beta)
        gradient = model.forward_backward_custom(data, loss)
        update = model.optim_step(adam)
        metrics = {"step": step, "loss": (await gradient).metrics["loss"]}
        await update
        if step % plan.test_every == 0:
            metrics |= await tests(model, tokenizer, held_out)
        yield metrics


Pair = tuple[tinker.Datum, tinker.Datum]


def pairs(tokenizer: PreTrainedTokenizerBase, seed: int | str) -> Iterator[Pair]:
    """The right query to a question, and a wrong one."""
    rng = random.Random(f"pairs:{seed}")
    for question in questions(f"pairs:{seed}"):
        if (wrong := corrupt(question, rng)) != question.sql:
            prompt = prompt_tokens(tokenizer, question.messages)
            chosen, rejected = (
                answer_tokens(tokenizer, question.messages, sql) for sql in (question.sql, wrong)
            )
            yield supervised(prompt, chosen), supervised(prompt, rejected)


def flat(some: Iterator[Pair]) -> list[tinker.Datum]:
    return [datum for pair in some for datum in pair]


def dpo(reference: Sequence[float], beta: float):
    """The loss of pairs that lie side by side: chosen, rejected, chosen, …"""

    def loss(
        data: Sequence[tinker.Datum], logprobs: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        summed = [
            (lp * datum.loss_fn_inputs["weights"].to_torch()).sum()
            for lp, datum in zip(logprobs, data, strict=True)
        ]
        gains = torch.stack(summed) - torch.tensor(reference)
        margins = beta * (gains[0::2] - gains[1::2])
        total = -torch.nn.functional.logsigmoid(margins).sum()
        return total, {"loss": float(total.detach()) / len(margins)}

    return loss


async def answer_logprobs(
    model: tinker.TrainingClient, data: Sequence[tinker.Datum]
) -> list[float]:
    """Of each answer as a whole."""
    output = await model.forward(list(data), "cross_entropy")
    return [
        float((each["logprobs"].to_numpy() * datum.loss_fn_inputs["weights"].to_numpy()).sum())
        for each, datum in zip(output.loss_fn_outputs, data, strict=True)
    ]


async def tests(
    model: tinker.TrainingClient, tokenizer: PreTrainedTokenizerBase, held_out: Sequence[Pair]
) -> dict[str, float]:
    """The share of unseen pairs whose chosen answer is the likelier, and of sampled queries
    (temperature 1) that give the right rows."""
    scores = await answer_logprobs(model, flat(iter(held_out)))
    wins = [chosen > rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
    asked = list(islice(questions("test"), 64))
    groups = await sample_groups(
        await model.save_weights_and_get_sampling_client(),
        tokenizer,
        [prompt_tokens(tokenizer, question.messages) for question in asked],
        lambda i, text: reward(asked[i], text),
        samples=4,
        max_tokens=64,
        seed=0,
    )
    return {"likelier": sum(wins) / len(wins), "sampled right": mean_reward(groups)}


if __name__ == "__main__":
    raise SystemExit(main(train, Plan, __file__))
