"""In which order candidates are asked to lead the next pass.

By need, but for this: what ends an operation, or goes on with one, comes before what begins a long
one. An optim_step and a sampler's weights take the engine a moment, and a model that waits for
them behind others' training waits for nothing; sequences that are decoded between two passes of
training all end later, and loops that are kept waiting together think together, and leave the
engine idle. The rules, each held by a test:

- only whoever is within the slack of the neediest comes before it, in virtual seconds;
- such passes take the slack together, and what the last of them was longer, before the neediest
  leads;
- they are charged like any other, and virtual time stands still meanwhile: the neediest keeps its
  place, and shares are as they were.

Rejected, by `benchmarks/policies.py`: training passes of one model unless company pays by the
learned costs. It gains with many jobs that think for long, and loses more near saturation, where
jobs that train together also sample together.
"""

from __future__ import annotations

from collections.abc import Iterator

from openrl.scheduler.core.packing import PassKind
from openrl.scheduler.core.passes import Candidate, Flight

RANK: dict[PassKind, int] = {"optim": 0, "control": 1, "sample": 2, "train": 3}
_LAST = len(RANK)


class Turns:
    def __init__(self, slack: float) -> None:
        """In seconds of service."""
        self._slack = slack
        self._spent = 0.0

    def need(self, one: Candidate) -> tuple[float, bool, tuple[float, ...]]:
        """Sort key: who has waited for the batch of its own owner is needier than that batch, which
        would come first for ever otherwise, having no needs below the owner's."""
        owner = round(one.need[0], 9)  # a batch's is a mean, with the last bits of one
        return (owner, one.leaf is None and self._slack > 0.0, one.need)

    def order(self, candidates: list[Candidate]) -> Iterator[Candidate]:
        """`candidates` are sorted by need. Each is told the neediest that it comes before."""
        left = list(candidates)
        while left:
            lead = min(left, key=lambda one: (self._rank(one, candidates[0]), self.need(one)))
            lead.before = left[0] if lead is not left[0] else None
            yield lead
            left.remove(lead)

    def took(self, flight: Flight, seconds: float) -> None:
        """A pass has ended."""
        self._spent = self._spent + seconds if flight.jumped else 0.0

    def _rank(self, one: Candidate, neediest: Candidate) -> int:
        if self._spent >= self._slack or _ahead(one.need, neediest.need) > self._slack:
            return _LAST
        return RANK[one.group[1]]


def _ahead(need: tuple[float, ...], neediest: tuple[float, ...]) -> float:
    """At the highest level at which they differ. A batch has its owners' level only."""
    for mine, least in zip(need, neediest, strict=False):
        if mine != least:
            return mine - least
    return 0.0
