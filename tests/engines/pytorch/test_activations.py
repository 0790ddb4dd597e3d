from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from openrl.engines.pytorch.activations import ACTIVATIONS

REFERENCES = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def _values_and_gradients(function, x, weight):
    x = x.clone().requires_grad_()
    y = function(x)
    (y * weight).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [80, 81])
def test_values_and_gradients_are_those_of_torch(name, width):
    x = torch.randn(50, width, generator=torch.Generator().manual_seed(0)) * 4
    weight = torch.randn(50, width)
    ours = _values_and_gradients(ACTIVATIONS[name](), x, weight)
    theirs = _values_and_gradients(REFERENCES[name], x, weight)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("width", [64, 80, 33])
def test_a_row_has_the_same_bits_in_any_batch(name, width, threads):
    function = ACTIVATIONS[name]()
    x = torch.randn(2000, width, generator=torch.Generator().manual_seed(1)) * 4
    weight = torch.randn(2000, width)
    whole = _values_and_gradients(function, x, weight)
    for start, end in ((0, 17), (3, 40), (100, 1371), (1999, 2000)):
        part = _values_and_gradients(function, x[start:end], weight[start:end])
        for mine, other in zip(part, whole, strict=True):
            assert torch.equal(mine, other[start:end])


def test_very_negative_values_stay_finite():
    value, gradient = _values_and_gradients(ACTIVATIONS["silu"](), torch.full((3, 7), -500.0), 1.0)
    assert torch.equal(value.abs(), torch.zeros(3, 7))
    assert bool(gradient.isfinite().all())
