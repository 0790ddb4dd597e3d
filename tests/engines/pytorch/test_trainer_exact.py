"""A job cannot tell whether it has company: equal to the bit, in fp32 on a CPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from support.torch_cases import (
    DEFAULTS,
    KEY,
    VOCAB,
    add_job,
    gradient_of,
    piece,
    random_datum,
    run,
    succeeded,
)

from openrl.engines.base import OptimPass, OptimPiece
from openrl.engines.pytorch.base_model import BaseModel
from openrl.engines.pytorch.trainer import Trainer
from openrl.scheduler.core.packing import cut_atoms
from openrl.types import AdamParams, Failed, LoraConfig, ModelId, RequestId

LOSSES = tuple(DEFAULTS)
STEPS = 20


@dataclass(frozen=True)
class Job:
    """All that it does follows from `number`: adapter, data, losses, settings of its steps."""

    number: int

    @property
    def name(self) -> str:
        return f"job{self.number}"

    def config(self) -> LoraConfig:
        rng = np.random.default_rng([1, self.number])
        groups = ((1, 1, 1), (1, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 1), (1, 0, 0))
        attn, mlp, unembed = groups[rng.integers(len(groups))]
        return LoraConfig(
            rank=int(rng.choice([1, 2, 4, 8, 16])),
            seed=self.number,
            train_attn=bool(attn),
            train_mlp=bool(mlp),
            train_unembed=bool(unembed),
            alpha=float(rng.choice([8, 16, 32])),
        )

    def request(self, step: int):
        """A loss and datums; now and then of one token, or of many targets."""
        rng = np.random.default_rng([2, self.number, step])
        loss = LOSSES[rng.integers(len(LOSSES))]
        lengths = rng.integers(1, 24, rng.integers(1, 4))
        many = 3 if loss == "cross_entropy" and rng.random() < 0.3 else None
        return loss, [random_datum(rng, int(n), loss, many) for n in lengths]

    def pieces(self, step: int, atom_tokens: int = 24):
        loss, data = self.request(step)
        return [
            piece(
                self.name,
                data[start:stop],
                loss,
                request=f"{self.name}:{step}",
                start=start,
                last=stop == len(data),
            )
            for start, stop in cut_atoms([len(datum.tokens) for datum in data], atom_tokens)
        ]

    def adam(self, step: int) -> AdamParams:
        rng = np.random.default_rng([3, self.number, step])
        return AdamParams(
            learning_rate=float(rng.choice([1e-3, 1e-2])),
            weight_decay=float(rng.choice([0, 0.1])),
            grad_clip_norm=float(rng.choice([0, 1.0])),
        )


def _optimize(trainer, step, jobs):
    work = [OptimPiece(RequestId("o"), ModelId(job.name), job.adam(step)) for job in jobs]
    return trainer.optimize(OptimPass(KEY, tuple(work))).outcomes


def _train(base, jobs, steps=STEPS, *, mixed=False):
    """Per job: every log-probability, gradient and norm, and its last weights. `mixed` lets each
    pass hold a random few of the jobs' atoms, so that no two passes have the same company."""
    trainer = Trainer(base, "test")
    rng = np.random.default_rng(99)
    seen = {job: [] for job in jobs}
    for job in jobs:
        add_job(trainer, job.name, job.config())
    for step in range(steps):
        waiting = {job: job.pieces(step) for job in jobs}
        while any(waiting.values()):
            ready = [job for job in jobs if waiting[job]]
            chosen = [job for job in ready if not mixed or rng.random() < 0.5] or ready[:1]
            taken = []
            for job in chosen:
                count = int(rng.integers(1, len(waiting[job]) + 1)) if mixed else None
                taken += [(job, one) for one in waiting[job][:count]]
                waiting[job] = [] if count is None else waiting[job][count:]
            outcomes = run(trainer, *(one for _, one in taken))
            for (job, _), outcome in zip(taken, outcomes, strict=True):
                seen[job] += [record["logprobs"] for record in succeeded(outcome).outputs]
        for job in jobs:
            seen[job].append(gradient_of(trainer, job.name).numpy().copy())
        for job, done in zip(jobs, _optimize(trainer, step, jobs), strict=True):
            seen[job].append(np.array(done.metrics["grad_norm"]))
    for job in jobs:
        seen[job].append(trainer.job(ModelId(job.name)).adapter.weights.flat.numpy())
    return seen


def _require_same(mine, other):
    assert len(mine) == len(other)
    for one, another in zip(mine, other, strict=True):
        assert np.array_equal(one, another)
        assert np.isfinite(one).all()


@pytest.mark.parametrize(
    ("family", "numbers", "mixed"),
    [
        ("llama", (3, 0), False),
        ("qwen3", (4, 1, 7, 2, 6, 5, 8, 9), False),
        ("gemma3", (5, 2, 0, 11), True),
    ],
)
def test_twenty_steps_in_company_equal_those_alone(family, numbers, mixed, base_model):
    """Log-probabilities, gradients and weights."""
    base = base_model(family)
    jobs = [Job(number) for number in numbers]
    together = _train(base, jobs, mixed=mixed)
    for job in jobs:
        _require_same(_train(base, [job])[job], together[job])


def test_runs_of_other_sizes_change_nothing(base_model, monkeypatch):
    """A pass may be cut at any atom."""
    base = base_model("qwen3")
    jobs = [Job(number) for number in range(4)]
    whole = _train(base, jobs, steps=3)
    for rows in (1, 60):
        monkeypatch.setattr(BaseModel, "fused_rows", rows)
        cut = _train(base, jobs, steps=3)
        for job in jobs:
            _require_same(whole[job], cut[job])


def test_a_split_into_atoms_is_invisible_but_for_the_order_of_sums(base_model):
    """The same atoms, in one pass or in many, are the same to the bit (above); another cut gives
    the same log-probabilities and, but for rounding, the same gradient."""
    job = Job(2)
    results = []
    for atom_tokens in (1, 1000):
        trainer = Trainer(base_model("llama"), "test")
        add_job(trainer, job.name, job.config())
        outcomes = run(trainer, *job.pieces(0, atom_tokens))
        logprobs = [r["logprobs"] for outcome in outcomes for r in succeeded(outcome).outputs]
        results.append((logprobs, gradient_of(trainer, job.name)))
    for mine, other in zip(results[0][0], results[1][0], strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
    scale = float(results[1][1].abs().max())
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-4, atol=1e-5 * scale)


def test_a_step_touches_its_own_job_alone(base_model):
    """forward_backward(A), forward_backward(B), optim_step(A); then B's step is as if A had
    never been there."""
    a, b = Job(1), Job(4)
    trainer = Trainer(base_model("qwen3"), "test")
    for job in (a, b):
        add_job(trainer, job.name, job.config())
    run(trainer, *a.pieces(0))
    run(trainer, *b.pieces(0))
    before = {name: t.clone() for name, t in trainer.job(ModelId(b.name)).tensors().items()}
    _optimize(trainer, 0, [a])
    after = trainer.job(ModelId(b.name)).tensors()
    assert before.keys() == after.keys() == {"weights", "gradient"}
    assert all(torch.equal(before[name], after[name]) for name in before)
    _optimize(trainer, 0, [b])
    alone = _train(base_model("qwen3"), [b], steps=1)[b]
    assert np.array_equal(alone[-1], trainer.job(ModelId(b.name)).adapter.weights.flat.numpy())


def test_four_copies_of_one_datum_get_equal_logprobs_also_with_fillers(base_model):
    for length in (1, 5, 21):
        rng = np.random.default_rng(length)
        datum = random_datum(rng, length, "cross_entropy")
        trainer = Trainer(base_model("gemma3"), "test")
        add_job(trainer, "a")
        add_job(trainer, "b", LoraConfig(rank=2, seed=5))
        (outcome, _) = run(
            trainer,
            piece("a", [datum] * 4),
            piece("b", [random_datum(rng, 9, "ppo")], "ppo"),
        )
        first, *others = succeeded(outcome).outputs
        for other in others:
            assert np.array_equal(first["logprobs"], other["logprobs"])


def test_neighbours_that_fail_or_explode_change_nothing(base_model):
    """NaN weights, huge weights, a datum whose loss is infinite, one whose gradient is, a step
    with a huge learning rate, a model that is not there; over several steps."""
    base, job = base_model("qwen3"), Job(7)
    alone = _train(base, [job], steps=3)[job]
    trainer = Trainer(base, "test")
    add_job(trainer, job.name, job.config())
    for name in ("nan", "huge", "infinite", "steep", "fast"):
        add_job(trainer, name, LoraConfig(rank=4, seed=3))
    trainer.job(ModelId("nan")).adapter.weights.flat.fill_(float("nan"))
    trainer.job(ModelId("huge")).adapter.weights.flat.mul_(1e30)
    rng = np.random.default_rng(21)
    infinite = random_datum(rng, 9, "importance_sampling")
    infinite.loss_inputs["logprobs"][5], infinite.loss_inputs["advantages"][5] = -500, 1
    steep = random_datum(rng, 6, "cross_entropy")
    steep.loss_inputs["weights"][:] = 3e37
    plain = random_datum(rng, 14, "cross_entropy")
    failing = {
        "nan": piece("nan", [plain]),
        "huge": piece("huge", [plain]),
        "infinite": piece("infinite", [infinite], "importance_sampling"),
        "steep": piece("steep", [steep]),
        "nobody": piece("nobody", [plain]),
    }
    seen = []
    for step in range(3):
        mine = job.pieces(step)
        order = [failing["nan"], *mine[:1], piece("fast", [plain], request=f"fast:{step}")]
        order += [failing["huge"], failing["infinite"], *mine[1:]]
        order += [failing["steep"], failing["nobody"]]
        for one, outcome in zip(order, run(trainer, *order), strict=True):
            if one.model_id == job.name:
                seen += [record["logprobs"] for record in succeeded(outcome).outputs]
            elif one.model_id in ("nan", "infinite", "steep", "nobody"):
                assert isinstance(outcome, Failed)
        seen.append(gradient_of(trainer, job.name).numpy().copy())
        fast = AdamParams(learning_rate=3e38, weight_decay=10.0)
        steps = (
            OptimPiece(RequestId("o"), ModelId("fast"), fast),
            OptimPiece(RequestId("o"), ModelId(job.name), job.adam(step)),
        )
        exploded, done = trainer.optimize(OptimPass(KEY, steps)).outcomes
        assert isinstance(exploded, Failed)
        seen.append(np.array(done.metrics["grad_norm"]))
    seen.append(trainer.job(ModelId(job.name)).adapter.weights.flat.numpy())
    _require_same(alone, seen)


def test_the_jobs_of_these_tests_differ():
    """What the tests above are worth depends on it."""
    configs = [Job(number).config() for number in range(12)]
    assert len({config.rank for config in configs}) >= 4
    assert len({(c.train_attn, c.train_mlp, c.train_unembed) for c in configs}) >= 4
    losses = {Job(number).request(step)[0] for number in range(4) for step in range(STEPS)}
    assert losses == set(LOSSES)
    assert max(len(Job(n).pieces(s)) for n in range(4) for s in range(STEPS)) >= 3
    assert VOCAB > 100
