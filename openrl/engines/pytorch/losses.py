"""The losses, token by token: the term that each target adds and its slope d(loss)/d(logprob).

Formulas and defaults stand in `openrl.engines.losses`; every loss is the plain sum of its terms.
All tensors are fp32 of one shape, [N] or [N, K]. A token whose weight or advantage is zero adds
exactly zero (dro's quadratic part apart), whatever its log-probabilities are: masked positions
carry no sampling log-probability, and 0 * inf would be NaN.

`gspo` needs the log-probabilities of a whole sequence before any slope is known: `sequence_ratio`
makes its ratio from a first sweep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]


@dataclass(frozen=True, slots=True, eq=False)
class Terms:
    """`terms` sum to the loss; `slopes` are d(loss)/d(logprob); `clipped` is true where a bound
    cut the ratio."""

    terms: Tensor
    slopes: Tensor
    clipped: Tensor | None = None


TokenLoss = Callable[[Tensor, Inputs, Config], Terms]


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-w * lp."""
    weights = inputs["weights"]
    return Terms(-_masked(weights, weights * logprobs), -weights)


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-r * A; d(r)/d(lp) = r."""
    advantages = inputs["advantages"]
    surrogate = _ratio(logprobs, inputs) * advantages
    return Terms(-surrogate, -surrogate)


def ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-min(r * A, clamp(r) * A): no slope where the clamped product is the smaller."""
    return _clipped_surrogate(_ratio(logprobs, inputs), inputs, config)


def gspo(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """ppo's form with the sequence's ratio (`sequence_ratio`, held constant but for the token's
    own log-probability) in place of the token's."""
    return _clipped_surrogate(inputs["sequence_ratio"], inputs, config)


def cispo(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-clamp(r) * lp * A with the clamped ratio held constant."""
    ratio = _ratio(logprobs, inputs)
    clamped = _clamp(ratio, inputs, config)
    weights = clamped * inputs["advantages"]
    return Terms(-_masked(weights, weights * logprobs), -weights, clamped != ratio)


def dro(logprobs: Tensor, inputs: Inputs, config: Config) -> Terms:
    """-(lp * A - beta / 2 * (lp - q)^2)."""
    advantages, beta = inputs["advantages"], config["beta"]
    gap = logprobs - inputs["logprobs"]
    terms = 0.5 * beta * gap * gap - _masked(advantages, logprobs * advantages)
    return Terms(terms, beta * gap - advantages)


TOKEN_LOSSES: Mapping[str, TokenLoss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
SEQUENCE_LOSSES = frozenset({"gspo"})


def sequence_ratio(logprobs_N: Tensor, inputs: Inputs) -> Tensor:
    """exp of the mean of lp - q over the positions of one sequence whose `sequence_ratio_mask` is
    not zero, for each of its tokens [N]; 1 when there are none."""
    mask_N = inputs["sequence_ratio_mask"] != 0
    gap_N = torch.where(mask_N, logprobs_N - inputs["logprobs"], 0.0)
    mean = gap_N.sum() / mask_N.sum().clamp(min=1)
    return mean.exp().expand_as(logprobs_N)


def _clipped_surrogate(ratio: Tensor, inputs: Inputs, config: Config) -> Terms:
    advantages = inputs["advantages"]
    free = _masked(advantages, ratio * advantages)
    bound = _clamp(ratio, inputs, config) * advantages
    clipped = bound < free
    return Terms(-torch.minimum(free, bound), torch.where(clipped, 0.0, -free), clipped)


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    """exp(lp - q), and 1 where the advantage is zero."""
    return _masked(inputs["advantages"], logprobs - inputs["logprobs"]).exp()


def _masked(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask == 0, 0.0, values)


def _clamp(ratio: Tensor, inputs: Inputs, config: Config) -> Tensor:
    low = inputs.get("clip_low_threshold", config["clip_low_threshold"])
    high = inputs.get("clip_high_threshold", config["clip_high_threshold"])
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low = torch.as_tensor(low, dtype=ratio.dtype, device=ratio.device)
        high = torch.as_tensor(high, dtype=ratio.dtype, device=ratio.device)
        return ratio.clamp(low, high)
    return ratio.clamp(low, high)
