"""Reinforcement-learning loops through the unmodified `tinker` SDK, with an environment that only
takes time."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import tinker
from tinker import types

TAIL = 1.5
"""Exponent of the Pareto distribution of heavy-tailed think times: its variance is infinite."""
DRAWS = 32


@dataclass(frozen=True)
class Workload:
    """What one step of a loop is: `samples` answers of at most `answer` tokens to each of
    `prompts` prompts, then training on all of them."""

    prompts: int = 2
    samples: int = 8
    prompt: int = 32
    answer: int = 32
    rank: int = 8
    first_token: int = 100
    last_token: int = 500


@dataclass(frozen=True)
class Step:
    """Times on this process's monotonic clock: the sampler asked for, there, all answers there,
    the environment done, the weights updated. `lengths` are of the answers."""

    job: int
    asked: float
    ready: float
    sampled: float
    thought: float
    updated: float
    lengths: tuple[int, ...]
    trained: int

    @property
    def seconds(self) -> float:
        return self.updated - self.asked

    def tokens_in(self, begin: float, end: float) -> tuple[float, float]:
        """Sampled and trained tokens as a client can tell: spread evenly over its wait."""
        sampled = sum(self.lengths) * _part(self.ready, self.sampled, begin, end)
        return sampled, self.trained * _part(self.thought, self.updated, begin, end)


def _part(start: float, stop: float, begin: float, end: float) -> float:
    return max(0.0, min(stop, end) - max(start, begin)) / max(stop - start, 1e-9)


def thinks(mean: float, heavy: bool, seed: int) -> Iterator[float]:
    """Think times for ever. Heavy-tailed ones are the same 32 quantiles in an order of the job's
    own, so that their mean is exact however few are drawn."""
    if not heavy:
        while True:
            yield mean
    quantiles = [(1.0 - (i + 0.5) / DRAWS) ** (-1.0 / TAIL) for i in range(DRAWS)]
    scale = mean * DRAWS / sum(quantiles)
    shuffle = random.Random(seed)
    while True:
        shuffle.shuffle(quantiles)
        yield from (scale * each for each in quantiles)


@dataclass
class Job:
    """One tenant: an owner, a session and a model of its own."""

    number: int
    url: str
    key: str
    model: str
    workload: Workload
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        service = tinker.ServiceClient(base_url=self.url, api_key=self.key)
        self._training = service.create_lora_training_client(
            base_model=self.model, rank=self.workload.rank, seed=self.number
        )
        self._chance = np.random.default_rng(self.number)

    def loop(self, thinking: Iterator[float], stop: threading.Event) -> None:
        """Until `stop`, which also ends a thought."""
        while not stop.is_set():
            if step := self.step(next(thinking), stop):
                self.steps.append(step)

    def step(self, think: float, stop: threading.Event) -> Step | None:
        asked = time.monotonic()
        sampler = self._training.save_weights_and_get_sampling_client()
        ready = time.monotonic()
        prompts = self.prompts()
        answers = self.sample(sampler, prompts)
        sampled = time.monotonic()
        if think and stop.wait(think):
            return None
        thought = time.monotonic()
        data = self.data(prompts, answers)
        self.train(data)
        lengths = tuple(len(s.tokens) for answer in answers for s in answer.sequences)
        trained = sum(datum.model_input.length for datum in data)
        updated = time.monotonic()
        return Step(self.number, asked, ready, sampled, thought, updated, lengths, trained)

    def sampler(self) -> tinker.SamplingClient:
        return self._training.save_weights_and_get_sampling_client()

    def prompts(self) -> list[list[int]]:
        w = self.workload
        drawn = self._chance.integers(w.first_token, w.last_token, (w.prompts, w.prompt))
        return [[int(token) for token in row] for row in drawn]

    def sample(
        self, sampler: tinker.SamplingClient, prompts: Sequence[list[int]]
    ) -> list[types.SampleResponse]:
        params = types.SamplingParams(max_tokens=self.workload.answer, temperature=1.0)
        futures = [
            sampler.sample(types.ModelInput.from_ints(prompt), self.workload.samples, params)
            for prompt in prompts
        ]
        return [future.result() for future in futures]

    def train(self, data: list[types.Datum]) -> None:
        gradient = self._training.forward_backward(data, "importance_sampling")
        update = self._training.optim_step(types.AdamParams(learning_rate=1e-6))
        gradient.result()
        update.result()

    def data(
        self, prompts: Sequence[list[int]], answers: Sequence[types.SampleResponse]
    ) -> list[types.Datum]:
        """The rewards are noise: what counts here is the work."""
        return [
            self._datum(prompt, sequence)
            for prompt, answer in zip(prompts, answers, strict=True)
            for sequence in answer.sequences
        ]

    def _datum(self, prompt: list[int], sequence: types.SampledSequence) -> types.Datum:
        tokens = [*prompt, *sequence.tokens]
        given = [0.0] * (len(prompt) - 1)
        advantage = float(self._chance.standard_normal())
        inputs = {
            "target_tokens": np.array(tokens[1:], dtype=np.int64),
            "logprobs": np.array([*given, *(sequence.logprobs or ())], dtype=np.float32),
            "advantages": np.array([*given, *[advantage] * len(sequence.tokens)], dtype=np.float32),
        }
        return types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={k: types.TensorData.from_numpy(v) for k, v in inputs.items()},
        )
