"""Activation functions whose every element is independent of what surrounds it, to the bit.

torch's fused CPU kernels work on 32 elements at a time and treat what is left over, at the end
of each thread's share, by scalar code that rounds otherwise. Where the left-overs fall depends
on the size of the batch. `exp` and `tanh` (vector maths throughout) and plain arithmetic have no
such left-overs, so on a CPU the functions are made of these; torch's own kernel stays wherever
it leaves nothing over: one thread and rows of a multiple of 32, or another device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_VECTOR = 32
_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


class Activation(nn.Module):
    """`fused` where it is exact, else `steady`; both take and return [..., N]."""

    def __init__(self, fused: Callable[[Tensor], Tensor], steady: type[torch.autograd.Function]):
        super().__init__()
        self._fused, self._steady = fused, cast(Any, steady).apply

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return self._fused(x)
        if torch.get_num_threads() == 1 and x.shape[-1] % _VECTOR == 0 and x.is_contiguous():
            return self._fused(x)
        return cast(Tensor, self._steady(x))


class _SiLU(torch.autograd.Function):
    """x / (1 + exp(-x))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        denominator = x.neg().exp_().add_(1)
        ctx.save_for_backward(x, denominator)
        return x / denominator

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """With s = 1 / (1 + exp(-x)): s * (1 + x * (1 - s))."""
        x, denominator = ctx.saved_tensors
        s = denominator.reciprocal()
        return (1 - s).mul_(x).add_(1).mul_(s).mul_(grads[0])


class _GELUTanh(torch.autograd.Function):
    """x / 2 * (1 + tanh(u)), u = sqrt(2 / pi) * (x + 0.044715 x^3)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        tanh = (x * x).mul_(_CUBIC).add_(1).mul_(x).mul_(_ROOT).tanh_()
        ctx.save_for_backward(x, tanh)
        return (tanh + 1).mul_(x).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """(1 + t) / 2 + x / 2 * (1 - t^2) * du/dx."""
        x, tanh = ctx.saved_tensors
        slope = (x * x).mul_(3 * _CUBIC * _ROOT).add_(_ROOT)
        inner = (1 - tanh * tanh).mul_(slope).mul_(x)
        return inner.add_(tanh).add_(1).mul_(0.5).mul_(grads[0])


def _fused_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[], Activation]] = {
    "silu": lambda: Activation(F.silu, _SiLU),
    "gelu_pytorch_tanh": lambda: Activation(_fused_gelu, _GELUTanh),
}
"""By the name that a model's configuration has for them."""


def activation_name(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None))
