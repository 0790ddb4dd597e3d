"""The table of losses: what each takes, so that a request can be refused before an engine sees it.

N is a datum's number of tokens, and position i predicts `target_tokens[i]`: the caller shifts.
Every loss is a *sum* over tokens and datums. Write lp for the learner's log-probability of the
target, q for the input `logprobs`, A for `advantages`, r = exp(lp - q):

    cross_entropy         - sum w * lp
    importance_sampling   - sum r * A
    ppo                   - sum min(r * A, clamp(r, low, high) * A)
    cispo                 - sum stop_gradient(clamp(r, low, high)) * lp * A
    dro                   - sum (lp * A - beta / 2 * (lp - q)^2)
    gspo                  - sum min(s * A, clamp(s, low, high) * A), where s is one ratio for the
                            whole datum: exp(mean of lp - q where sequence_ratio_mask is not 0),
                            held constant but for the token's own lp

Clip thresholds are bounds of the ratio itself, not distances from 1. Given as inputs [N], they
hold token by token and win over the configuration's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["int64", "float32"]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """`like_targets`: has the shape of `target_tokens`; else [N]."""

    name: str
    dtype: Dtype
    required: bool = True
    like_targets: bool = False


@dataclass(frozen=True, slots=True)
class LossSpec:
    """`config` holds every key that the loss knows, with its default. `many_targets`:
    `target_tokens` may be [N, K], K targets for each position."""

    name: str
    inputs: tuple[InputSpec, ...]
    config: Mapping[str, float] = field(default_factory=dict)
    many_targets: bool = False

    def configured(self, given: Mapping[str, float | str]) -> dict[str, float]:
        """Every key with the given value or its default; `given` has been checked."""
        return {key: float(given.get(key, default)) for key, default in self.config.items()}


_TARGETS = InputSpec("target_tokens", "int64")
_POLICY = (_TARGETS, InputSpec("logprobs", "float32"), InputSpec("advantages", "float32"))
_CLIPPED = (
    *_POLICY,
    InputSpec("clip_low_threshold", "float32", required=False),
    InputSpec("clip_high_threshold", "float32", required=False),
)


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


_ALL = (
    LossSpec(
        "cross_entropy",
        (_TARGETS, InputSpec("weights", "float32", like_targets=True)),
        many_targets=True,
    ),
    LossSpec("importance_sampling", _POLICY),
    LossSpec("ppo", _CLIPPED, _clip(0.8, 1.2)),
    # One-sided by default: a ratio is never raised.
    LossSpec("cispo", _CLIPPED, _clip(0.0, 4.0)),
    LossSpec("dro", _POLICY, {"beta": 0.05}),
    # Sequence ratios hardly move: the thresholds of the paper (arXiv 2507.18071).
    LossSpec(
        "gspo",
        (*_CLIPPED, InputSpec("sequence_ratio_mask", "float32")),
        _clip(0.9997, 1.0004),
    ),
)

LOSSES: Mapping[str, LossSpec] = {spec.name: spec for spec in _ALL}
