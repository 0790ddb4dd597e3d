"""What the loops of this folder share: questions, sampled answers with rewards, datums."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import ArrayLike, NDArray
from transformers import PreTrainedTokenizerBase

import openrl
from openrl import demo
from openrl.client.blocking import BlockingClient, BlockingModel
from recipes.kit.chat import answer_tokens, prompt_tokens
from recipes.kit.running import Model
from recipes.tasks.sql import Question, questions, reward

Steps = Iterator[dict[str, float]]


@dataclass(frozen=True)
class Rollout:
    """An answer's tokens with the sampler's log-probabilities, each [T]; `group` is the place of
    its question in the batch."""

    group: int
    prompt: Sequence[int]
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    reward: float


@functools.cache
def tokenizer_of(base_model: str) -> PreTrainedTokenizerBase:
    return Model.parse(base_model).tokenizer


def roll_out(
    model: BlockingModel, batch: Sequence[Question], samples: int, seed: int
) -> list[Rollout]:
    """`samples` answers to each question, under the weights as they are now."""
    tokenizer = tokenizer_of(model.base_model)
    prompts = [prompt_tokens(tokenizer, question.messages) for question in batch]
    outputs = model.sampler().sample_many(prompts, samples, max_tokens=48, seed=seed)
    rollouts = []
    for place, output in sorted(outputs, key=lambda pair: pair[0]):
        for sequence in output.sequences:
            text = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
            score = reward(batch[place], text)
            logprobs = np.asarray(sequence.logprobs)
            rollouts.append(Rollout(place, prompts[place], sequence.tokens, logprobs, score))
    return rollouts


def datum(prompt: Sequence[int], answer: ArrayLike, **inputs: ArrayLike) -> openrl.Datum:
    """`inputs` have a number for each token of the answer; over the prompt they are zero."""
    tokens = np.concatenate([np.asarray(prompt), np.asarray(answer)]).astype(np.int64)
    given = np.zeros(len(prompt) - 1)
    shifted = {
        name: np.concatenate([given, np.broadcast_to(values, np.shape(answer))])
        for name, values in inputs.items()
    }
    return openrl.Datum(tokens[:-1], {"target_tokens": tokens[1:], **shifted})


def example(base_model: str, question: Question, sql: str, weight: float = 1.0) -> openrl.Datum:
    """For `cross_entropy`: this answer to that question."""
    tokenizer = tokenizer_of(base_model)
    prompt = prompt_tokens(tokenizer, question.messages)
    return datum(prompt, answer_tokens(tokenizer, question.messages, sql), weights=weight)


def z_scores(rollouts: Sequence[Rollout]) -> NDArray[np.float64]:
    """Each answer's advantage in its group: its reward less the mean, over the deviation. [B]"""
    rewards = np.array([each.reward for each in rollouts])
    groups = np.array([each.group for each in rollouts])
    scores = np.zeros(len(rollouts))
    for group in set(groups):
        mine = rewards[groups == group]
        scores[groups == group] = (mine - mine.mean()) / (mine.std() + 1e-6)
    return scores


def mean_reward(rollouts: Sequence[Rollout]) -> float:
    return float(np.mean([each.reward for each in rollouts]))


def batches(seed: int | str, size: int) -> Iterator[list[Question]]:
    asked = questions(seed)
    while True:
        yield list(islice(asked, size))


def main(train: Callable[[BlockingClient, str, int, int], Steps]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="a running server")
    parser.add_argument("--model", default=demo.NAME, help="a name that the server knows")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with openrl.connect(options.base_url, "tml-local") as client:
        for i, numbers in enumerate(train(client, options.model, options.steps, options.seed), 1):
            said = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items())
            print(f"step {i}  {said}", flush=True)
