"""What the core remembers of a request while it is not answered."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from openrl.engines.base import RowId, WeightsKey
from openrl.scheduler.core.events import Item
from openrl.scheduler.core.fairshare import Share
from openrl.types import OwnerId, RequestId


@dataclass(slots=True, eq=False)
class Row:
    """One sequence of a sample request. `tokens` counts prompt and sampled so far, and ends at
    `most_tokens`. `blocks` of KV memory are reserved for it, `held` as the engine last said.
    `joined` counts rows in the order of joining the batch."""

    id: RowId
    owner: OwnerId
    weights: WeightsKey
    share: Share
    prompt: int
    most_tokens: int
    tokens: int
    blocks: int = 0
    held: int = 0
    joined: int = 0

    @property
    def growth(self) -> int:
        return max(0, self.blocks - self.held)


@dataclass(slots=True, eq=False)
class Request:
    """An accepted item on its way. `sent` and `back` count the parts of training work;
    `next_row` and below are for samples."""

    item: Item
    share: Share
    arrived: float
    started: float | None = None
    sent: int = 0
    back: int = 0
    next_row: int = 0
    ended_rows: int = 0
    running: dict[int, Row] = field(default_factory=dict)
    preempted: OrderedDict[int, Row] = field(default_factory=OrderedDict)

    @property
    def id(self) -> RequestId:
        return self.item.request_id

    @property
    def parts(self) -> int:
        return max(1, len(self.item.atoms))

    @property
    def unsent(self) -> bool:
        return self.sent < self.parts

    @property
    def missing(self) -> bool:
        """Parts have not come back yet."""
        return self.back < self.parts

    def tokens_of(self, atom: int) -> int:
        return self.item.atoms[atom] if self.item.atoms else 0

    @property
    def next_tokens(self) -> int:
        """The size of the next atom."""
        return self.tokens_of(self.sent)

    @property
    def rows(self) -> int:
        return self.item.sample.rows if self.item.sample else 0

    @property
    def rows_wait(self) -> bool:
        return bool(self.preempted) or self.next_row < self.rows
