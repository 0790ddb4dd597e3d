"""The loops on a real server, and their formulas beside autograd or a sum written out."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

import openrl
from openrl import demo
from recipes.algorithms import cispo, dpo, grpo, p3o, ppo, sft
from recipes.algorithms.rollouts import Rollout, z_scores
from recipes.kit.server import local_server

LOOPS = (sft, dpo, grpo, cispo, p3o, ppo)


@pytest.mark.slow
async def test_each_loop_runs(tmp_path, monkeypatch):
    for loop in LOOPS:
        for name, small in (("QUESTIONS", 6), ("SAMPLES", 4), ("BATCH", 8)):
            if hasattr(loop, name):
                monkeypatch.setattr(loop, name, small)

    def run(url):
        with openrl.connect(url, "tml-test") as client:
            return {loop: list(loop.train(client, demo.NAME, 2, 0)) for loop in LOOPS}

    async with local_server(tmp_path) as server:
        done = await asyncio.to_thread(run, server.url)
    assert {len(steps) for steps in done.values()} == {2}
    assert 0 < done[sft][1]["loss"] < 1
    assert done[dpo][0]["loss"] == pytest.approx(np.log(2))  # nothing has been gained yet
    assert 0 < abs(done[dpo][1]["loss"] - np.log(2)) < 0.05  # on other pairs
    for loop in (grpo, cispo, p3o, ppo):
        assert 0 < done[loop][0]["reward"] < 1


def test_every_loop_is_short():
    for loop in LOOPS:
        assert len(Path(loop.__file__).read_text().splitlines()) < 80, loop.__file__


def random_answers(seed, shift):
    rng = np.random.default_rng(seed)
    sampled = [rng.uniform(-3, -0.1, size) for size in (3, 5, 1)]
    now = [each + rng.normal(0, shift, each.shape) for each in sampled]
    return now, sampled, rng.normal(size=3)


@pytest.mark.parametrize("shift", [0.0, 0.1, 1.0])
def test_p3o_weights_are_the_slope_of_its_loss(shift):
    now, sampled, advantages = random_answers(1, shift)
    weights, ess = p3o.p3o_weights(now, sampled, advantages)
    lp = torch.tensor(np.concatenate(now), requires_grad=True)
    q = torch.tensor(np.concatenate(sampled))
    A = torch.tensor(np.repeat(advantages, [3, 5, 1]))
    r = torch.exp(lp - q)
    factor = (r.sum() ** 2 / (r**2).sum() / len(r)).detach()
    kl = lp - q + torch.exp(q - lp) - 1
    loss = -(torch.minimum(r, factor).detach() * A * lp).sum() + (1 - factor) * kl.sum()
    loss.backward()
    assert ess == pytest.approx(float(factor))
    np.testing.assert_allclose(np.concatenate(weights), -lp.grad.numpy(), atol=1e-12)


def test_dpo_slopes_are_those_of_its_loss():
    chosen, rejected = np.array([0.5, -2.0, 30.0]), np.array([-0.5, 3.0, 0.0])
    gains = torch.tensor(chosen, requires_grad=True)
    margins = dpo.BETA * (gains - torch.tensor(rejected))
    (-torch.nn.functional.logsigmoid(margins)).sum().backward()
    np.testing.assert_allclose(dpo.dpo_slopes(chosen, rejected), -gains.grad.numpy(), rtol=1e-6)


def test_generalised_advantages_are_a_sum_of_surprises():
    values = np.array([0.2, 0.5, 0.1])
    surprises = [0.3, -0.4, 0.9]  # of the reward 1.0, seen from 0.1, at the end
    expected = [sum(ppo.LAMBDA ** (k - t) * surprises[k] for k in range(t, 3)) for t in range(3)]
    np.testing.assert_allclose(ppo.gae(1.0, values), expected)


def test_z_scores_are_of_the_group():
    rollouts = [
        Rollout(group, [1], np.array([2]), np.array([-1.0]), reward)
        for group, reward in [(0, 1.0), (0, 0.0), (1, 1.0), (1, 1.0)]
    ]
    np.testing.assert_allclose(z_scores(rollouts), [1, -1, 0, 0], atol=1e-5)
