"""AdamW for one adapter: torch's own, on one flat tensor, with the hyper-parameters of each call.

A step that would leave weights or moments that are not finite fails and changes nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.errors import UserError
from openrl.types import AdamParams


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """`exp_avg`, `exp_avg_sq` fp32 [size]; `step` counts the steps they come from."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int


class AdamW:
    """Owns the moments of `weights`, a flat fp32 tensor that it changes in place.

    Decoupled weight decay; moments start at zero with the first step.
    """

    def __init__(self, weights: Tensor, moments: Moments | None = None) -> None:
        self._weights = weights
        # The fused kernel passes over memory once; every value it needs comes with the step.
        self._optimizer = torch.optim.AdamW([weights], fused=True)
        if moments is not None:
            self._restore(moments)

    @property
    def moments(self) -> Moments | None:
        """None before the first step. The tensors are the live ones."""
        state = self._optimizer.state.get(self._weights)
        if not state:
            return None
        return Moments(state["exp_avg"], state["exp_avg_sq"], int(state["step"]))

    def step(self, gradient: Tensor, adam: AdamParams) -> dict[str, float]:
        """One step on `gradient`, which is left as it is. Returns metrics: the norm of the
        gradient before clipping and the learning rate.

        `adam` has been checked at the door. Raises `UserError`, with nothing changed, for a
        gradient that is not finite or a step that does not end in finite numbers.
        """
        norm = gradient_norm(gradient)
        if not math.isfinite(norm):
            raise UserError("the accumulated gradient is not finite: nothing was changed")
        clipped = _clip(gradient, norm, adam.grad_clip_norm)
        before = (self._weights.clone(), self._copy_of_moments())
        self._apply(clipped, adam)
        if not self._finite():
            self._weights.copy_(before[0])
            self._restore(before[1])
            raise UserError(
                f"a step with learning rate {adam.learning_rate:g} and weight decay "
                f"{adam.weight_decay:g} makes weights that are not finite: nothing was changed"
            )
        return {"grad_norm": norm, "learning_rate": adam.learning_rate}

    def _apply(self, gradient: Tensor, adam: AdamParams) -> None:
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
        )
        self._weights.grad = gradient
        try:
            self._optimizer.step()
        finally:
            self._weights.grad = None

    def _finite(self) -> bool:
        moments = self.moments
        assert moments is not None
        tensors = (self._weights, moments.exp_avg, moments.exp_avg_sq)
        return all(all_finite(tensor) for tensor in tensors)

    def _copy_of_moments(self) -> Moments | None:
        moments = self.moments
        if moments is None:
            return None
        return Moments(moments.exp_avg.clone(), moments.exp_avg_sq.clone(), moments.step)

    def _restore(self, moments: Moments | None) -> None:
        state = self._optimizer.state
        state.pop(self._weights, None)
        if moments is not None:
            state[self._weights] = {
                "step": torch.tensor(float(moments.step), device=self._weights.device),
                "exp_avg": moments.exp_avg,
                "exp_avg_sq": moments.exp_avg_sq,
            }


def all_finite(tensor: Tensor) -> bool:
    """One pass without a copy where all is well: a sum is finite only if its terms are."""
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def gradient_norm(gradient: Tensor) -> float:
    """The 2-norm; finite whenever all elements and the norm itself are, though squares overflow."""
    norm = float(torch.linalg.vector_norm(gradient))
    peak = float(gradient.abs().max()) if not math.isfinite(norm) else 0.0
    if math.isfinite(peak) and peak > 0:
        return peak * float(torch.linalg.vector_norm(gradient / peak))
    return norm


def _clip(gradient: Tensor, norm: float, limit: float) -> Tensor:
    """As `torch.nn.utils.clip_grad_norm_` does it, into a new tensor; 0 switches it off."""
    if limit == 0 or limit / (norm + 1e-6) >= 1:
        return gradient
    return gradient * (limit / (norm + 1e-6))
