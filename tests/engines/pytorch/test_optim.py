from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from openrl.engines.pytorch.optim import AdamW, Step, gradient_norms, step_all
from openrl.errors import OutOfMemory, UserError
from openrl.types import AdamParams

SHAPES = ((7, 5), (3,), (4, 6))


def _flat(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors])


def test_ten_steps_equal_torch_on_separate_tensors_with_clipping():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator) for shape in SHAPES]
    weights = _flat(parts)
    ours = AdamW(weights)
    parameters = [torch.nn.Parameter(part.clone()) for part in parts]
    reference = torch.optim.AdamW(parameters, foreach=False, fused=False)
    for step in range(10):
        adam = AdamParams(
            learning_rate=1e-2 / (step + 1),
            beta1=0.8 + 0.01 * step,
            beta2=0.95,
            eps=1e-10,
            weight_decay=0.1 * (step % 3),
            grad_clip_norm=0.5 * (step % 2),
        )
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        gradient = _flat([parameter.grad for parameter in parameters])
        expected_norm = float(gradient.norm())
        kept = gradient.clone()
        metrics = ours.step(gradient, adam)
        assert torch.equal(gradient, kept)
        assert metrics["grad_norm"] == pytest.approx(expected_norm, rel=1e-5)
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip_norm)
        reference.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        reference.step()
        torch.testing.assert_close(
            weights, _flat([p.detach() for p in parameters]), rtol=1e-5, atol=1e-6
        )
    assert ours.moments is not None
    assert ours.moments.step == 10


@pytest.mark.parametrize(
    ("gradient", "rate"), [(1.0, 3e38), (float("nan"), 1e-3), (float("inf"), 1e-3)]
)
def test_a_step_that_is_not_finite_changes_nothing(gradient, rate):
    weights = torch.full((8,), 2.0)
    optimizer = AdamW(weights)
    optimizer.step(torch.arange(8.0), AdamParams(learning_rate=1e-2))
    moments = optimizer.moments
    assert moments is not None
    before = weights.clone(), moments.exp_avg.clone(), moments.exp_avg_sq.clone()
    bad = torch.full((8,), gradient)
    with pytest.raises(UserError, match="not finite"):
        optimizer.step(bad, AdamParams(learning_rate=rate, weight_decay=10.0))
    after = optimizer.moments
    assert after is not None
    assert torch.equal(weights, before[0])
    assert torch.equal(after.exp_avg, before[1])
    assert torch.equal(after.exp_avg_sq, before[2])
    assert after.step == 1
    optimizer.step(torch.ones(8), AdamParams(learning_rate=1e-2))
    assert bool(weights.isfinite().all())


def test_the_first_step_can_fail_too():
    weights = torch.ones(4)
    optimizer = AdamW(weights)
    with pytest.raises(UserError):
        optimizer.step(torch.ones(4), AdamParams(learning_rate=3e38, weight_decay=3e38))
    assert optimizer.moments is None
    assert torch.equal(weights, torch.ones(4))


class _NoRoomForProducts(TorchDispatchMode):
    """No memory for products of so many elements, such as a clipped gradient."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "mul" in str(func) and out.numel() == self._elements:
            raise torch.OutOfMemoryError("out of memory")
        return out


def test_a_step_without_memory_fails_alone_and_the_others_are_made_once():
    adam = AdamParams(learning_rate=1e-2)
    optimizers = [AdamW(torch.ones(size)) for size in (8, 16, 4)]
    gradients = [torch.arange(1.0, size + 1) for size in (8, 16, 4)]
    alone = AdamW(torch.ones(8))
    alone.step(gradients[0], adam)
    steps = [
        Step(optimizer, gradient, replace(adam, grad_clip_norm=0.1) if size == 16 else adam)
        for optimizer, gradient, size in zip(optimizers, gradients, (8, 16, 4), strict=True)
    ]
    with _NoRoomForProducts(16):
        done = step_all(steps)
    assert isinstance(done[1], OutOfMemory)
    assert torch.equal(optimizers[1].weights, torch.ones(16))
    assert isinstance(done[0], dict)
    assert isinstance(done[2], dict)
    assert torch.equal(optimizers[0].weights, alone.weights)
    assert [each.moments.step for each in (optimizers[0], optimizers[2])] == [1, 1]


def test_the_norm_survives_overflowing_squares():
    gradient = torch.tensor([3e25, 4e25])
    infinite = torch.tensor([1.0, float("inf")])
    assert gradient_norms([gradient, infinite]) == [pytest.approx(5e25, rel=1e-6), np.inf]
    assert np.isnan(gradient_norms([torch.tensor([1.0, float("nan")])])[0])
