"""AdamW for many adapters at once: torch's own, each adapter one flat tensor, with the
hyper-parameters of each call.

A step that would leave weights or moments that are not finite fails and changes nothing. Copies
for that case are made only when it can happen at all: a few numbers bound what a step can reach
(see `_Bounds`), and in practice every step stays far below what fp32 holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from openrl.errors import Diverged, OpenRLError, OutOfMemory
from openrl.types import AdamParams

_LARGE = 1e36
"""Bounds below this leave fp32, which ends at 3e38, room for rounding."""
_SMALL_EPS = 1e-30


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """`exp_avg`, `exp_avg_sq` fp32 [size]; `step` counts the steps they come from."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: int


@dataclass(frozen=True, slots=True)
class _Bounds:
    """No element of the weights, the first or the second moment is larger than this."""

    weight: float
    first: float
    second: float

    @property
    def safe(self) -> bool:
        """False for NaN too."""
        return all(value < _LARGE for value in (self.weight, self.first, self.second))

    def after(self, norm: float, step: int, adam: AdamParams) -> _Bounds:
        """After step number `step` with a gradient of this norm, which no element exceeds.

        Moments are weighted means of what they were and the gradient; a weight moves by at most
        lr * m / ((1 - beta1^t) * eps).
        """
        first, second = max(self.first, norm), max(self.second, norm * norm)
        if adam.eps < _SMALL_EPS or norm > _LARGE:
            return _Bounds(math.inf, first, second)
        most = first / (adam.eps * (1 - adam.beta1**step))
        decay = abs(1 - adam.learning_rate * adam.weight_decay)
        moved = self.weight * decay + max(adam.learning_rate, 1.0) * most
        return _Bounds(moved, first, second)


class AdamW:
    """Owns the moments of `weights`, a flat fp32 tensor that it changes in place.

    Decoupled weight decay; moments start at zero with the first step.
    """

    def __init__(self, weights: Tensor, moments: Moments | None = None) -> None:
        self.weights = weights
        self.moments = moments
        self._steps = torch.tensor(float(moments.step if moments else 0), device=weights.device)
        self.bounds = self.measured()

    def measured(self) -> _Bounds:
        moments = self.moments
        tensors = [self.weights] if moments is None else [self.weights, *_tensors(moments)]
        peaks = torch.stack([t.abs().max() for t in tensors]).tolist()
        return _Bounds(*peaks) if moments else _Bounds(peaks[0], 0.0, 0.0)

    def begin(self) -> Moments:
        """The moments, zero before the first step."""
        if self.moments is None:
            w = self.weights
            self.moments = Moments(torch.zeros_like(w), torch.zeros_like(w), step=0)
        return self.moments

    def step(self, gradient: Tensor, adam: AdamParams) -> dict[str, float]:
        """One step alone; see `step_all`. Raises `OpenRLError`, with nothing changed."""
        (done,) = step_all([Step(self, gradient, adam)])
        if isinstance(done, OpenRLError):
            raise done
        return done

    def copy(self) -> tuple[Tensor, Moments | None]:
        """Of the weights and the moments, for `restore`."""
        moments = self.moments
        if moments is not None:
            moments = Moments(moments.exp_avg.clone(), moments.exp_avg_sq.clone(), moments.step)
        return self.weights.clone(), moments

    def restore(self, weights: Tensor, moments: Moments | None) -> None:
        self.weights.copy_(weights)
        self.moments = moments
        self._steps.fill_(moments.step if moments else 0)

    @property
    def steps(self) -> Tensor:
        """The count of steps as the kernel wants it, which raises it."""
        return self._steps


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """`gradient` [size] is left as it is. `adam` has been checked at the door."""

    optimizer: AdamW
    gradient: Tensor
    adam: AdamParams


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """A step with all memory that it needs; its gradient is clipped. `before` is what to go back
    to when it ends in numbers that are not finite, None where it cannot."""

    step: Step
    bounds: _Bounds
    before: tuple[Tensor, Moments | None] | None


Done = dict[str, float] | OpenRLError


def step_all(steps: Sequence[Step]) -> list[Done]:
    """One step of each optimizer, which are different ones: one kernel call for all that have
    the same hyper-parameters.

    Returns metrics, the norm of the gradient before clipping and the learning rate, or the
    reason why nothing of that optimizer was changed: a gradient that is not finite, a step that
    does not end in finite numbers, no memory for it.
    """
    try:
        norms = gradient_norms([step.gradient for step in steps])
        ready = [_ready(step, norm) for step, norm in zip(steps, norms, strict=True)]
    except (RuntimeError, MemoryError) as error:
        problem = OutOfMemory(f"no memory for this step: nothing was changed ({error})")
    else:
        return _all_done(ready, norms)
    if len(steps) == 1:
        return [problem]
    return [done for step in steps for done in step_all([step])]


def _ready(step: Step, norm: float) -> _Ready | Diverged:
    """Whatever can fail for lack of memory comes before anything is changed."""
    if not math.isfinite(norm):
        return Diverged(
            "the accumulated gradient is not finite: it is dropped, the weights are unchanged"
        )
    optimizer = step.optimizer
    used = min(norm, step.adam.grad_clip_norm or norm)
    bounds = optimizer.bounds.after(used, _next(optimizer), step.adam)
    before = None if bounds.safe else optimizer.copy()
    optimizer.begin()
    return _Ready(_clipped(step, norm), bounds, before)


def _all_done(ready: Sequence[_Ready | Diverged], norms: Sequence[float]) -> list[Done]:
    done: list[Done] = []
    together: dict[AdamParams, list[_Ready]] = {}
    for one, norm in zip(ready, norms, strict=True):
        if isinstance(one, Diverged):
            done.append(one)
            continue
        adam = one.step.adam
        done.append({"grad_norm": norm, "learning_rate": adam.learning_rate})
        if one.before is None:
            together.setdefault(replace(adam, grad_clip_norm=0.0), []).append(one)
        elif not _step_with_care(one.step, *one.before):
            done[-1] = Diverged(
                f"a step with learning rate {adam.learning_rate:g} and weight decay "
                f"{adam.weight_decay:g} makes weights that are not finite: "
                "the accumulated gradient is dropped, the weights are unchanged"
            )
    for adam, alike in together.items():
        _apply([one.step for one in alike], adam)
        for one in alike:
            one.step.optimizer.bounds = one.bounds
    return done


def _next(optimizer: AdamW) -> int:
    return 1 + (optimizer.moments.step if optimizer.moments else 0)


def _step_with_care(step: Step, weights: Tensor, moments: Moments | None) -> bool:
    """A step that may overflow; false when it did, and everything is as it was."""
    optimizer = step.optimizer
    _apply([step], step.adam)
    if all(all_finite(t) for t in (optimizer.weights, *_tensors(optimizer.begin()))):
        optimizer.bounds = optimizer.measured()
        return True
    optimizer.restore(weights, moments)
    return False


def _apply(steps: Sequence[Step], adam: AdamParams) -> None:
    moments = [step.optimizer.begin() for step in steps]
    adamw(
        [step.optimizer.weights for step in steps],
        [step.gradient for step in steps],
        [one.exp_avg for one in moments],
        [one.exp_avg_sq for one in moments],
        [],
        [step.optimizer.steps for step in steps],
        fused=True,  # passes over memory once
        amsgrad=False,
        beta1=adam.beta1,
        beta2=adam.beta2,
        lr=adam.learning_rate,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        maximize=False,
    )
    for step, before in zip(steps, moments, strict=True):
        step.optimizer.moments = replace(before, step=before.step + 1)


def _tensors(moments: Moments) -> tuple[Tensor, Tensor]:
    return moments.exp_avg, moments.exp_avg_sq


def all_finite(tensor: Tensor) -> bool:
    """One pass without a copy where all is well: a sum is finite only if its terms are."""
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def gradient_norms(gradients: Sequence[Tensor]) -> list[float]:
    """The 2-norms, finite whenever they can be: also where squares overflow."""
    if not gradients:
        return []
    norms = torch.stack([torch.linalg.vector_norm(g) for g in gradients]).tolist()
    return [
        norm if math.isfinite(norm) and norm > 0 else _scaled_norm(gradient)
        for norm, gradient in zip(norms, gradients, strict=True)
    ]


def _scaled_norm(gradient: Tensor) -> float:
    peak = float(gradient.abs().max())
    if not math.isfinite(peak) or peak == 0:
        return peak
    return peak * float(torch.linalg.vector_norm(gradient / peak))


def _clipped(step: Step, norm: float) -> Step:
    """As `torch.nn.utils.clip_grad_norm_` does it, into a new tensor; 0 switches it off."""
    limit = step.adam.grad_clip_norm
    if limit == 0 or limit / (norm + 1e-6) >= 1:
        return step
    return replace(step, gradient=step.gradient * (limit / (norm + 1e-6)))
