"""What an ideal scheduler would make of the same loops: a simulation fed with measured pass costs.

It knows every arrival at once, starts a pass in no time, puts everything compatible into it, and
of four orders of precedence takes the one that does best. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from utilization_timeline import Pass

ORDERS = (
    ("control", "optim", "train", "sample"),
    ("control", "optim", "sample", "train"),
    ("sample", "train", "optim", "control"),
    (),
)
"""Kinds of passes, most urgent first; of none the one whose work has waited longest goes first."""

ROUND_TRIPS = 3
"""Per step: for the sampler, the answers, the training."""
STEPS = 200
"""No simulation is longer than so many steps of each loop."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a pass by weights of: 1, decode steps, their rows, prompt tokens; 1, tokens,
    models; 1, models; 1."""

    sample: tuple[float, ...]
    train: tuple[float, ...]
    optim: tuple[float, ...]
    control: tuple[float, ...]

    def of(self, kind: str, *features: float) -> float:
        weights = getattr(self, kind)
        return float(sum(w * x for w, x in zip(weights, (1.0, *features), strict=True)))


def fit(passes: Sequence[Pass]) -> Costs:
    """By non-negative least squares over all passes of a run."""

    def of(kind: str, features: Callable[[Pass], tuple[float, ...]]) -> tuple[float, ...]:
        mine = [one for one in passes if one.kind == kind and one.seconds > 0.0]
        rows = [(1.0, *features(one)) for one in mine]
        return non_negative(rows, [one.seconds for one in mine], len(features(_NONE)) + 1)

    return Costs(
        of("sample", lambda p: (p.sampled / max(p.rows, 1), p.sampled, p.prefilled)),
        of("train", lambda p: (p.tokens, p.lanes)),
        of("optim", lambda p: (p.lanes,)),
        of("control", lambda p: ()),
    )


_NONE = Pass("none", 0.0, 0.0, 0.0, 0)


def non_negative(
    rows: Sequence[tuple[float, ...]], seconds: Sequence[float], width: int
) -> tuple[float, ...]:
    """Least squares without negative weights: what comes out negative is left out, worst first."""
    weights = np.zeros(width)
    if not rows:
        return tuple(weights)
    a, b = np.array(rows), np.array(seconds)
    kept = list(range(width))
    while kept:
        found = np.linalg.lstsq(a[:, kept], b, rcond=None)[0]
        if found.min() >= 0.0:
            weights[kept] = found
            break
        kept.pop(int(found.argmin()))
    return tuple(float(w) for w in weights)


@dataclass
class Loop:
    """One job. `answers` are lengths by step, used in turn, and `trained` the tokens trained on
    them; `prompts` are the prompt tokens of a step; `latency` is what a round trip
    costs the client beside the engine's time."""

    thinks: Iterator[float]
    answers: Sequence[tuple[int, ...]]
    trained: Sequence[int]
    prompts: int
    latency: float = 0.0
    step: int = 0
    kind: str = "control"
    at: float = 0.0
    left: list[int] = field(default_factory=list)
    joined: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return self.answers[self.step % len(self.answers)]


@dataclass(frozen=True)
class Done:
    """In `wall` seconds; tokens are of finished work."""

    wall: float
    busy: float
    sampled: int
    trained: int
    steps: int


def ideal(
    make: Callable[[], list[Loop]],
    costs: Costs,
    worth: Callable[[Done], float],
    seconds: float = 120.0,
    decode_steps: int = 16,
) -> Done:
    """The best of the orders, by `worth`."""
    runs = [Simulation(make(), costs, order, decode_steps).run(seconds) for order in ORDERS]
    return max(runs, key=worth)


@dataclass
class Simulation:
    loops: list[Loop]
    costs: Costs
    order: tuple[str, ...]
    decode_steps: int = 16
    now: float = 0.0
    busy: float = 0.0
    sampled: int = 0
    trained: int = 0
    steps: int = 0

    def run(self, seconds: float) -> Done:
        most = STEPS * len(self.loops)
        while self.now < seconds and self.steps < most:
            ready = [loop for loop in self.loops if loop.at <= self.now]
            if not ready:
                self.now = min(loop.at for loop in self.loops)
                continue
            kind = self._kind(ready)
            getattr(self, f"_{kind}")([loop for loop in ready if loop.kind == kind])
        return Done(self.now, self.busy, self.sampled, self.trained, self.steps)

    def _kind(self, ready: list[Loop]) -> str:
        if not self.order:
            return min(ready, key=lambda loop: loop.at).kind
        return min({loop.kind for loop in ready}, key=self.order.index)

    def _spend(self, kind: str, *features: float) -> None:
        seconds = max(self.costs.of(kind, *features), 1e-6)
        self.now += seconds
        self.busy += seconds

    def _control(self, loops: list[Loop]) -> None:
        """One model at a time, as the engine does it."""
        self._spend("control")
        self._next(loops[0], "sample", loops[0].latency)

    def _sample(self, loops: list[Loop]) -> None:
        prompts = sum(loop.prompts for loop in loops if not loop.joined)
        for loop in loops:
            if not loop.joined:
                loop.joined, loop.left = True, list(loop.lengths)
        rows = [left for loop in loops for left in loop.left]
        steps = min(self.decode_steps, max(rows))
        self._spend("sample", steps, sum(min(left, steps) for left in rows), prompts)
        for loop in loops:
            self.sampled += sum(min(left, steps) for left in loop.left)
            loop.left = [left - steps for left in loop.left if left > steps]
            if loop.left:
                loop.at = self.now
            else:
                loop.joined = False
                self._next(loop, "train", loop.latency + next(loop.thinks))

    def _train(self, loops: list[Loop]) -> None:
        tokens = sum(loop.trained[loop.step % len(loop.trained)] for loop in loops)
        self._spend("train", tokens, len(loops))
        self.trained += tokens
        for loop in loops:
            self._next(loop, "optim", 0.0)

    def _optim(self, loops: list[Loop]) -> None:
        self._spend("optim", len(loops))
        for loop in loops:
            loop.step += 1
            self.steps += 1
            self._next(loop, "control", loop.latency)

    def _next(self, loop: Loop, kind: str, after: float) -> None:
        loop.kind, loop.at = kind, self.now + after
