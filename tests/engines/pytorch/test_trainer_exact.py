"""A job cannot tell whether it has company: equal to the bit, in fp32 on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.torch_cases import (
    DEFAULTS,
    KEY,
    add_job,
    gradient_of,
    piece,
    random_datum,
    run,
    succeeded,
)

from openrl.engines.base import OptimPass, OptimPiece
from openrl.engines.pytorch.trainer import Trainer
from openrl.types import AdamParams, LoraConfig, ModelId, RequestId

LOSSES = tuple(DEFAULTS)
CONFIGS = (
    LoraConfig(rank=4, seed=1),
    LoraConfig(rank=1, seed=2, train_unembed=False),
    LoraConfig(rank=16, seed=3, train_attn=False, alpha=8),
    LoraConfig(rank=8, seed=4, train_mlp=False),
    LoraConfig(rank=2, seed=5, train_attn=False, train_mlp=False),
)


def _job_batches(number: int, rounds: int):
    """Each round: a loss and datums of job `number`, some rounds with a single token."""
    rng = np.random.default_rng(number)
    for _ in range(rounds):
        loss = LOSSES[rng.integers(len(LOSSES))]
        lengths = rng.integers(1, 50, rng.integers(1, 4))
        yield loss, [random_datum(rng, int(n), loss) for n in lengths]


def _train(base, numbers, rounds):
    """Several rounds of forward_backward and a step, with these jobs in each pass; per job its
    log-probabilities, gradients and last weights."""
    trainer = Trainer(base, "test")
    batches = {n: list(_job_batches(n, rounds)) for n in numbers}
    seen = {n: [] for n in numbers}
    for n in numbers:
        add_job(trainer, f"job{n}", CONFIGS[n])
    for round_ in range(rounds):
        pieces = [
            piece(
                f"job{n}",
                batches[n][round_][1],
                batches[n][round_][0],
                request=f"job{n}:{round_}",
            )
            for n in numbers
        ]
        for n, outcome in zip(numbers, run(trainer, *pieces), strict=True):
            seen[n] += [torch.from_numpy(r["logprobs"]) for r in succeeded(outcome).outputs]
            seen[n].append(gradient_of(trainer, f"job{n}").clone())
        steps = tuple(
            OptimPiece(RequestId("o"), ModelId(f"job{n}"), AdamParams(learning_rate=1e-2))
            for n in numbers
        )
        trainer.optimize(OptimPass(KEY, steps))
    for n in numbers:
        seen[n].append(trainer.job(ModelId(f"job{n}")).adapter.weights.flat)
    return seen


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_logprobs_gradients_and_weights_in_company_equal_those_alone(family, base_model):
    base = base_model(family)
    together = _train(base, (3, 0, 4, 1, 2), rounds=4)
    for n in range(5):
        alone = _train(base, (n,), rounds=4)[n]
        assert len(alone) == len(together[n])
        for mine, other in zip(alone, together[n], strict=True):
            assert torch.equal(mine, other)


def test_atoms_have_the_same_sum_in_one_pass_or_in_several_with_company(base_model):
    rng = np.random.default_rng(20)
    data = [random_datum(rng, n, "cross_entropy") for n in (12, 5, 30, 7)]
    atoms = [(0, data[:2]), (2, data[2:3]), (3, data[3:])]

    def pieces(model):
        return [piece(model, some, start=start, last=start == 3) for start, some in atoms]

    alone = Trainer(base_model("qwen3"), "test")
    add_job(alone, "m")
    run(alone, *pieces("m"))
    company = Trainer(base_model("qwen3"), "test")
    add_job(company, "other", LoraConfig(rank=8, seed=8))
    add_job(company, "m")
    for number, mine in enumerate(pieces("m")):
        neighbour = [random_datum(rng, 9 + number, "ppo")]
        run(company, piece("other", neighbour, "ppo", request=f"other:{number}"), mine)
    assert torch.equal(gradient_of(alone, "m"), gradient_of(company, "m"))


def test_a_neighbour_that_fails_or_explodes_changes_nothing(base_model):
    rng = np.random.default_rng(21)
    data = [random_datum(rng, n, "cross_entropy") for n in (14, 3)]

    def gradient(*, with_neighbours):
        trainer = Trainer(base_model("gemma3"), "test")
        add_job(trainer, "m")
        pieces = [piece("m", data)]
        if with_neighbours:
            nan = add_job(trainer, "nan")
            nan.weights.flat.fill_(float("nan"))
            huge = add_job(trainer, "huge")
            huge.weights.flat.mul_(1e30)
            pieces = [piece("nan", data), *pieces, piece("huge", data), piece("nobody", data)]
        run(trainer, *pieces)
        return gradient_of(trainer, "m").clone()

    assert torch.equal(gradient(with_neighbours=False), gradient(with_neighbours=True))
