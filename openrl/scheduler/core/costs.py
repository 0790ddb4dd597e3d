"""What a pass costs: an estimate before it runs, learned from every pass that ran.

Seconds are a weighted sum of the pass's features (a fixed part, tokens, lanes …). Each weight
starts from a guess and is corrected by normalised least mean squares, features measured in
units of their guess, so that a wrong guess is mended within a few passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Features: TypeAlias = tuple[float, ...]

STEP = 0.3
"""How much of an error is believed at once: 1 is all of it, with its noise."""

SURPRISE = 5.0
"""A pass that took longer than this many times its estimate is believed this far only: the
first pass after a start or a page fault says little about the next."""


@dataclass(slots=True)
class CostModel:
    """`guess` and `weights` are seconds per unit of each feature, never negative."""

    guess: Features
    weights: Features = field(init=False)

    def __post_init__(self) -> None:
        self.weights = self.guess

    def estimate(self, features: Features) -> float:
        return sum(w * x for w, x in zip(self.weights, features, strict=True))

    def learn(self, features: Features, seconds: float) -> None:
        estimate = self.estimate(features)
        target = min(seconds, SURPRISE * estimate) if estimate > 0.0 else seconds
        error = target - estimate
        scaled = [
            g * x if error > 0.0 or w > 0.0 else 0.0  # what is at 0 cannot get less
            for g, x, w in zip(self.guess, features, self.weights, strict=True)
        ]
        power = sum(z * z for z in scaled)
        if power <= 0.0:
            return
        gain = STEP * error / power
        steps = [gain * z * g for z, g in zip(scaled, self.guess, strict=True)]
        self.weights = tuple(max(0.0, w + d) for w, d in zip(self.weights, steps, strict=True))

    def split(self, participants: Sequence[Features], seconds: float) -> list[float]:
        """The seconds of a pass, by what each participant's features are estimated at."""
        estimates = [self.estimate(features) for features in participants]
        total = sum(estimates)
        if total <= 0.0:
            return [seconds / len(participants)] * len(participants)
        return [seconds * estimate / total for estimate in estimates]


def train_features(share: float, tokens: int, lanes: float) -> Features:
    """`share` is the part of the pass's fixed cost, 1 for the whole pass."""
    return (share, float(tokens), lanes)


def optim_features(share: float, models: float) -> Features:
    return (share, models)


def decode_features(share: float, steps: float, row_steps: float, prefilled: float) -> Features:
    """`steps` is the participant's part of the steps, `prefilled` counts tokens."""
    return (share, steps, row_steps, prefilled)


def guesses() -> dict[str, CostModel]:
    """A small model on a CPU; any other machine is learned in a few passes."""
    return {
        "train": CostModel((0.01, 2e-4, 1e-3)),
        "optim": CostModel((2e-3, 1e-2)),
        "control": CostModel((0.05,)),
        "sample": CostModel((2e-3, 1e-2, 1e-3, 1e-4)),
    }
