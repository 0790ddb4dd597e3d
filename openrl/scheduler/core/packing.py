"""How requests are cut, and how much goes into one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from openrl.engines.base import WeightsKey
from openrl.scheduler.core.events import Kind

PassKind = Literal["train", "optim", "control", "sample"]

Group: TypeAlias = tuple[WeightsKey, PassKind]
"""What can share a pass: work of one kind over one set of base weights."""

PASS_KINDS: dict[Kind, PassKind] = {
    "forward_backward": "train",
    "optim_step": "optim",
    "control": "control",
    "sample": "sample",
}


def cut_atoms(tokens_per_datum: Sequence[int], atom_tokens: int) -> tuple[tuple[int, int], ...]:
    """Cuts a request into atoms: (start, stop) of its datums, in order, none left out.

    A datum is never split, so an atom is larger than `atom_tokens` only when it is one datum.
    The cut sees the request alone: company never changes it, and with it no bit of the result.
    """
    atoms: list[tuple[int, int]] = []
    start = tokens = 0
    for index, size in enumerate(tokens_per_datum):
        if index > start and tokens + size > atom_tokens:
            atoms.append((start, index))
            start, tokens = index, 0
        tokens += size
    if len(tokens_per_datum) > start:
        atoms.append((start, len(tokens_per_datum)))
    return tuple(atoms)


@dataclass(slots=True)
class Budget:
    """Room left in a pass. The first piece always fits: nothing is too large to ever run."""

    seconds: float
    tokens: int
    pieces: int = 0

    def fits(self, seconds: float, tokens: int) -> bool:
        return self.pieces == 0 or (seconds <= self.seconds and tokens <= self.tokens)

    def take(self, seconds: float, tokens: int) -> None:
        self.seconds -= seconds
        self.tokens -= tokens
        self.pieces += 1
