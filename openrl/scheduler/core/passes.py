"""A pass while it is filled, and while it is in the engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from openrl.engines.base import RowId
from openrl.scheduler.core import fairshare
from openrl.scheduler.core.events import PassId, Start
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.packing import Budget, Group
from openrl.scheduler.core.requests import Request, Row

MISFITS = 16
"""How many heads that are too large for the room left are passed over in one pass."""


@dataclass(slots=True)
class Candidate:
    """Something that could lead a pass: a ready leaf, or (`leaf` None) the rows that run
    already. `need` is lowest for whom it is most: the owner's tag, then the session's, the lane's.
    `before` is the neediest that this one leads before, if any: see `turns`."""

    need: tuple[float, ...]
    group: Group
    leaf: Share | None
    before: Candidate | None = None

    @property
    def clock(self) -> float:
        """Virtual time among owners when it leads."""
        return (self.before or self).need[0]


@dataclass(slots=True, eq=False)
class Flight:
    """A pass in the engine. `parts` are its training requests, one entry for each atom with
    its `tokens`; `prefills` the tokens that rows joining the batch cost; `estimates` the
    seconds that were charged in advance; `waits` how long those had waited that it serves
    first; `held` for how long its heads were held for company; `jumped` whether somebody needier
    was passed over for it."""

    id: PassId
    group: Group
    started: float
    order: Start
    parts: tuple[Request, ...] = ()
    tokens: tuple[int, ...] = ()
    rows: dict[RowId, Row] = field(default_factory=dict)
    prefills: dict[RowId, int] = field(default_factory=dict)
    preempted: tuple[Row, ...] = ()
    estimates: dict[Share, float] = field(default_factory=dict)
    waits: tuple[float, ...] = ()
    held: float = 0.0
    jumped: bool = False


@dataclass(slots=True, eq=False)
class Draft:
    """A pass being filled: its leader first, then whoever needs it most and fits.

    Company must not be more than `slack` seconds of service ahead of the leader: an owner that
    rides along with everybody would otherwise get more than its weight. With `only`, all of it
    is that lane's. With `jumps`, its leader comes before a needier one, and moves no virtual time.
    """

    group: Group
    root: Share
    clock: float
    slack: float
    budget: Budget
    jumps: bool = False
    estimates: dict[Share, float] = field(default_factory=dict)
    aside: list[Share] = field(default_factory=list)
    riders_only: bool = False
    only: Share | None = None

    def next(self) -> Share | None:
        if self.only is not None:
            return self.only if self.group in self.only.groups else None
        leaf = fairshare.first(self.root, self.group)
        if leaf is None or not (self.budget.pieces or self.riders_only):
            return leaf
        owner = leaf.owner
        ahead = (owner.tag - self.clock) * owner.weight
        return leaf if ahead <= self.slack and len(self.aside) < MISFITS else None

    def take(self, leaf: Share, seconds: float, tokens: int) -> None:
        self.budget.take(seconds, tokens)
        self.estimates[leaf] = self.estimates.get(leaf, 0.0) + seconds
        fairshare.charge(leaf, seconds)

    def pass_over(self, leaf: Share) -> None:
        fairshare.unready(leaf, self.group)
        self.aside.append(leaf)


@contextmanager
def filling(draft: Draft) -> Iterator[Draft]:
    """Leaves that were passed over are ready again afterwards."""
    yield draft
    for leaf in draft.aside:
        fairshare.ready(leaf, draft.group)
