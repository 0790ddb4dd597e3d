"""A question to an agent with a database: it queries, sees what went wrong, tries again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tinker
from transformers import PreTrainedTokenizerBase

from recipes.kit.chat import Message, prompt_tokens
from recipes.kit.data import datum
from recipes.tasks.sandbox import Rejected, run_query
from recipes.tasks.sql import Question, database, reward

MAX_TOKENS = 64
MARK = "@@"


@dataclass
class Episode:
    """`tokens` follow `prompt`: what the agent said, and what it was told in between. `logprobs`
    and `said` are zero over what it was told."""

    question: Question
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    said: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """Of the last query."""
        return self.rewards[-1]

    def data(self, advantage: float) -> tinker.Datum:
        """For `importance_sampling`: only what the agent said has an advantage."""
        advantages = [advantage * mine for mine in self.said]
        return datum(self.prompt, self.tokens, logprobs=self.logprobs, advantages=advantages)

    def agent(self, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        self.tokens += tokens
        self.logprobs += logprobs
        self.said += [1.0] * len(tokens)

    def told(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logprobs += [0.0] * len(tokens)
        self.said += [0.0] * len(tokens)


async def play(
    sampler: tinker.SamplingClient,
    tokenizer: PreTrainedTokenizerBase,
    question: Question,
    *,
    turns: int,
    seed: int,
    temperature: float = 1.0,
) -> Episode:
    """Ends with a query that runs, or with the last turn. The prompt of a turn is the dialogue so
    far, so each begins with all tokens of the one before and the server need not read them
    again."""
    episode = Episode(question, prompt_tokens(tokenizer, question.messages))
    for turn in range(turns):
        params = tinker.SamplingParams(
            max_tokens=MAX_TOKENS, temperature=temperature, seed=seed + turn
        )
        so_far = tinker.ModelInput.from_ints(episode.prompt + episode.tokens)
        response = await sampler.sample(so_far, num_samples=1, sampling_params=params)
        sequence = response.sequences[0]
        episode.agent(sequence.tokens, sequence.logprobs)
        sql = tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()
        episode.rewards.append(reward(question, sql))
        complaint = complaint_about(question, sql)
        if complaint is None or turn == turns - 1:
            break
        episode.told(told_tokens(tokenizer, complaint, ended=sequence.stop_reason == "stop"))
    return episode


def complaint_about(question: Question, sql: str) -> str | None:
    """What the database says; None when the query ran. Whether its rows are right, only the reward
    knows."""
    try:
        run_query(database(question.schema), sql)
    except Rejected as error:
        return f"error: {error}"
    return None


def told_tokens(tokenizer: PreTrainedTokenizerBase, text: str, *, ended: bool) -> list[int]:
    """A user's turn in the middle of a dialogue, up to where the assistant speaks again: what the
    chat template puts after the words of an assistant, less the token that ends its turn where
    that was sampled (`ended`)."""
    dialogue: list[Message] = [
        {"role": "user", "content": "."},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": text},
    ]
    rendered = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
    after = rendered[rendered.index(MARK) + len(MARK) :]
    tokens = tokenizer.encode(after, add_special_tokens=False)
    return tokens[1:] if ended else tokens
