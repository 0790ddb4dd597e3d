"""The sampler's log-probabilities are the trainer's: on the same weights an RL step starts with a
ratio of 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.torch_cases import KEY, add_job, piece

from openrl.engines.base import AdapterSource, RowId, TrainPass
from openrl.engines.pytorch.trainer import Trainer
from openrl.types import (
    Datum,
    Failed,
    ForwardBackwardOutput,
    LoraConfig,
    SampledSequence,
    VersionId,
)

JOBS = {
    "a": LoraConfig(rank=4, seed=1),
    "b": LoraConfig(rank=8, seed=2, train_unembed=False),
    "c": LoraConfig(rank=1, seed=3, train_mlp=False),
    "d": LoraConfig(rank=4, seed=4),
}


def shifted(prompt: list[int], row: SampledSequence) -> Datum:
    """As RL code makes it: inputs and targets one apart, zeros where the prompt is."""
    tokens = np.concatenate([np.asarray(prompt, np.int32), row.tokens])
    before = len(prompt) - 1
    logprobs = np.concatenate([np.zeros(before, np.float32), row.logprobs])
    advantages = np.zeros(len(logprobs), np.float32)
    advantages[before:] = np.where(np.arange(len(row.tokens)) % 2, 1.0, -1.0)
    inputs = {
        "target_tokens": tokens[1:].astype(np.int64),
        "logprobs": logprobs,
        "advantages": advantages,
    }
    return Datum(tokens[:-1], inputs)


@pytest.fixture
def gaps(drive: Any, start: Any, prompt: Any, base_model: Any) -> Any:
    """`gaps(family, n, tokens)`: sampled less recomputed log-probabilities, of four jobs whose
    rows shared every batch, `n` rows of `tokens` tokens each."""

    def measure(family: str, n: int, tokens: int) -> NDArray[np.float64]:
        base = base_model(family)
        trainer, d = Trainer(base, "base"), drive(family, kv_tokens=1 << 17, steps=64)
        for name, config in JOBS.items():
            d.sampler.pin(VersionId(name), add_job(trainer, name, config))
        prompts = {name: prompt(i, 9 + 30 * i) for i, name in enumerate(JOBS)}
        source = {name: AdapterSource(VersionId(name)) for name in JOBS}
        rows = d.all(
            *(
                start(name, prompts[name], n=n, max_tokens=tokens, version=source[name])
                for name in JOBS
            )
        )
        found = []
        for name in JOBS:
            for i in range(n):
                datum = shifted(prompts[name], rows[RowId(name, i)])
                (got,) = trainer.train(
                    TrainPass(KEY, (piece(name, [datum], "importance_sampling", request=f"{i}"),))
                ).outcomes
                assert not isinstance(got, Failed)
                found.append(_gap(got, datum, len(prompts[name])))
        return np.concatenate(found)

    return measure


def _gap(got: ForwardBackwardOutput, datum: Datum, prompt: int) -> NDArray[np.float64]:
    trained = got.outputs[0]["logprobs"].astype(np.float64)
    return (datum.loss_inputs["logprobs"] - trained)[prompt - 1 :]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("tokens", [24, pytest.param(320, marks=pytest.mark.slow)])
def test_sampled_logprobs_are_the_trainers(family: str, tokens: int, gaps: Any) -> None:
    """The slow one over more than ten thousand tokens."""
    gap = gaps(family, 8, tokens)
    assert len(gap) == 32 * tokens
    assert np.abs(gap).mean() <= 1e-5
    assert np.quantile(np.abs(gap), 0.999) <= 1e-4
    # As the cookbook's metrics `kl_sample_train_v1` and `_v2` are computed.
    assert abs(gap.mean()) < 1e-5
    assert 0.5 * (gap**2).mean() < 1e-5


def test_alone_and_among_a_hundred_others(
    drive: Any, start: Any, prompt: Any, trained: Any, base_model: Any
) -> None:
    def sampler() -> Any:
        d = drive("qwen3", kv_tokens=1 << 16)
        for i, rank in enumerate((4, 8, 1)):
            d.sampler.pin(VersionId(f"v{i}"), trained(base_model("qwen3"), i, rank))
        return d

    versions = [None, *(AdapterSource(VersionId(f"v{i}")) for i in range(3))]
    crowd = [
        start(f"r{i}", prompt(i, 1 + i % 70), n=1, max_tokens=24, seed=i, version=versions[i % 4])
        for i in range(101)
    ]
    together = sampler().all(*crowd)
    for one in crowd[:8]:
        for row, alone in sampler().all(one).items():
            assert np.array_equal(alone.tokens, together[row].tokens)
            assert np.array_equal(alone.logprobs, together[row].logprobs)
