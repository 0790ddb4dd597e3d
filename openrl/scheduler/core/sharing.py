"""Who may share a pass, and whose turn it is: rules weaker than the default, for comparisons.

`scheduler.sharing`:

- `fused`: whatever is compatible shares a pass. Nothing here applies.
- `separate`: a pass, and the batch that samples, belong to one lane. Time is shared as ever.
- `in_turn`: separate, and an owner keeps the engine until nothing of it can run.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from openrl.engines.base import WeightsKey
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.passes import Candidate
from openrl.scheduler.core.residency import Residency

Mode: TypeAlias = Literal["fused", "separate", "in_turn"]


class Sharing:
    def __init__(self, mode: Mode, residency: Residency) -> None:
        self.fused = mode == "fused"
        self._in_turn = mode == "in_turn"
        self._residency = residency
        self._turn: Share | None = None

    def only(self, lead: Candidate) -> Share | None:
        """The lane that the pass is for; None when it is for everybody."""
        if self.fused:
            return None
        return lead.leaf or self._sampling(lead.group[0])

    def may_sample(self, lead: Candidate, neediest: Share | None) -> bool:
        """Whether rows may join now. The batch of a lane runs out while another is needier, lest
        it keep the others away for ever."""
        if self.fused:
            return True
        sampling = self._sampling(lead.group[0])
        return sampling is None or sampling is neediest

    def among(self, root: Share, running: list[Candidate]) -> tuple[Share, list[Candidate]]:
        """Whose ready work comes into question, and which of the running batches: the owner's
        whose turn it is while it has any, else everybody's."""
        if not self._in_turn or self._turn is None:
            return root, running
        mine = [one for one in running if self._owner(one) is self._turn]
        return (self._turn, mine) if mine or self._turn.groups else (root, running)

    def led(self, lead: Candidate) -> None:
        """A pass starts; from here on it is its leader's turn."""
        if self._in_turn:
            self._turn = self._owner(lead)

    def _owner(self, candidate: Candidate) -> Share:
        leaf = candidate.leaf or self._sampling(candidate.group[0])
        assert leaf is not None, "a batch that is a candidate has rows"
        return leaf.owner

    def _sampling(self, weights: WeightsKey) -> Share | None:
        rows = self._residency.rows_of(weights)
        return rows[0].share if rows else None
