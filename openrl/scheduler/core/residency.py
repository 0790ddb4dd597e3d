"""Which rows are in the engine's decode batch, and the KV memory that they need.

A row reserves what it is expected to need: its tokens, and as many new ones as its owner's
rows have made on average. Before each slice the reservations of its rows are raised to what
the slice can write; when that is more than there is, rows are preempted, but never the one
that has been running for the longest. Since any row fits into the memory alone, that one
always comes to its end: there is no deadlock.

Free memory is what the engine last reported, plus what has left since, less what the rows may
still grow by. Blocks that rows share are so counted as the engine counts them. Where base weights
have memory of their own, all this is so for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeAlias

from openrl.engines.base import Capacity, KVPool, RowId, WeightsKey
from openrl.scheduler.core.requests import Row
from openrl.types import OwnerId

GUESSED_LENGTH = 256.0
"""New tokens of a row whose owner has not had any before."""

MARGIN = 1.25
"""Rows are expected to be this much longer than the mean."""

OWNERS = 4096
"""Of how many owners the mean is remembered; those that came first go first."""

KEPT_BACK = 20
"""One part in so many of the memory is not given to joining rows."""

Pool: TypeAlias = WeightsKey | None
"""Whose memory it is: that of some base weights, or the common one."""


class Residency:
    """`running` is by owner, in the order of admission. `doomed` rows are out for us and leave
    the engine with the next decode pass of their weights."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is resident, and the engine is not there."""
        self.capacity: Capacity | None = None
        self.running: dict[OwnerId, dict[RowId, Row]] = {}
        self.doomed: dict[WeightsKey, dict[RowId, Row]] = {}
        self.counts: dict[WeightsKey, int] = {}
        self.blocks: dict[OwnerId, int] = {}
        self.rows = 0
        self._growth: Counter[Pool] = Counter()
        self._freed: Counter[Pool] = Counter()
        self._joined = 0
        self._lengths: dict[OwnerId, float] = {}

    def report(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._freed.clear()

    @property
    def known(self) -> Capacity:
        if self.capacity is None:
            raise AssertionError("the engine has not reported its capacity")
        return self.capacity

    def all_rows(self) -> Iterator[Row]:
        for rows in self.running.values():
            yield from rows.values()

    def rows_of(self, weights: WeightsKey) -> list[Row]:
        return [row for row in self.all_rows() if row.weights == weights]

    # --- memory ---

    @property
    def growth(self) -> int:
        """Blocks that are reserved and not held yet, of all rows."""
        return self._growth.total()

    def pool(self, weights: WeightsKey) -> KVPool:
        return self.known.pool(weights)

    def _whose(self, weights: WeightsKey) -> Pool:
        return weights if weights in self.known.kv_pools else None

    def _sharing(self, weights: WeightsKey) -> list[Row]:
        """The running rows that have the same memory."""
        pool = self._whose(weights)
        return [row for row in self.all_rows() if self._whose(row.weights) == pool]

    def _used(self, weights: WeightsKey) -> bool:
        pool = self._whose(weights)
        return any(n and self._whose(key) == pool for key, n in self.counts.items())

    def _reserved(self, weights: WeightsKey) -> Counter[OwnerId]:
        """Blocks of that memory, by owner."""
        held: Counter[OwnerId] = Counter()
        for row in self._sharing(weights):
            held[row.owner] += row.blocks
        return held

    def need(self, tokens: int) -> int:
        return -(-tokens // self.known.block_tokens)

    def expected_blocks(self, row: Row, steps: int) -> int:
        """What a row that joins reserves; at least room for one slice."""
        mean = self._lengths.get(row.owner, GUESSED_LENGTH)
        more = max(steps, int(MARGIN * mean) - (row.tokens - row.prompt))
        return self.need(min(row.most_tokens, row.tokens + more))

    def fits(self, blocks: int, weights: WeightsKey) -> bool:
        """Whether one more row may join the next decode pass of these weights. A little is
        kept back, lest the rows that run outgrow their reservations at once."""
        kept = self.pool(weights).total // KEPT_BACK if self._used(weights) else 0
        return self._free_rows(weights) >= 1 and blocks + kept <= self._free_blocks(weights)

    def lack(self, weights: WeightsKey) -> int:
        """Blocks that are reserved beyond what there is; negative when some are free."""
        return -self._free_blocks(weights)

    def _free_rows(self, weights: WeightsKey) -> int:
        staying = sum(len(rows) for key, rows in self.doomed.items() if key != weights)
        return self.known.max_rows - self.rows - staying

    def _free_blocks(self, weights: WeightsKey) -> int:
        memory, pool = self.pool(weights), self._whose(weights)
        others = any(key != weights and self._whose(key) == pool for key in self.doomed)
        if not others and not self._used(weights):
            return memory.total  # whatever the engine keeps cached, it can evict
        dropping = sum(row.held for row in self.doomed.get(weights, {}).values())
        return memory.free + self._freed[pool] + dropping - self._growth[pool]

    # --- coming and going ---

    def admit(self, row: Row, blocks: int) -> None:
        self._joined += 1
        row.joined = self._joined
        row.blocks = blocks
        self.running.setdefault(row.owner, {})[row.id] = row
        self.counts[row.weights] = self.counts.get(row.weights, 0) + 1
        self.blocks[row.owner] = self.blocks.get(row.owner, 0) + row.blocks
        self.rows += 1
        self._growth[self._whose(row.weights)] += row.growth

    def reserve(self, row: Row, steps: int) -> None:
        """Raises the reservation of a running row to what it can write in a slice."""
        blocks = self.need(min(row.most_tokens, row.tokens + steps))
        if blocks > row.blocks:
            pool = self._whose(row.weights)
            self._growth[pool] -= row.growth
            self.blocks[row.owner] += blocks - row.blocks
            row.blocks = blocks
            self._growth[pool] += row.growth

    def ended(self, row: Row) -> None:
        self.leave(row)
        made = row.tokens - row.prompt
        mean = self._lengths.get(row.owner, float(made))
        self._lengths[row.owner] = mean + 0.1 * (made - mean)
        if len(self._lengths) > OWNERS:
            del self._lengths[next(iter(self._lengths))]

    def leave(self, row: Row) -> None:
        """The row is out of the batch, and the engine knows."""
        mine = self.running[row.owner]
        del mine[row.id]
        self.counts[row.weights] -= 1
        self.blocks[row.owner] -= row.blocks
        if not mine:
            del self.running[row.owner], self.blocks[row.owner]
        self.rows -= 1
        self._growth[self._whose(row.weights)] -= row.growth

    def preempt(self, row: Row) -> None:
        self.leave(row)
        self._freed[self._whose(row.weights)] += row.held
        row.held = 0

    def doom(self, row: Row) -> None:
        """The row is wanted no more, whether it runs or has been preempted."""
        if row.id in self.running.get(row.owner, ()):
            self.leave(row)
        self.doomed.setdefault(row.weights, {})[row.id] = row

    def forget_doomed(self, row: Row) -> None:
        """The engine has ended the row by itself."""
        rows = self.doomed.get(row.weights, {})
        if rows.pop(row.id, None) and not rows:
            del self.doomed[row.weights]

    def drop(self, weights: WeightsKey) -> tuple[RowId, ...]:
        """The doomed rows of these weights, for the pass that drops them."""
        rows = self.doomed.pop(weights, {})
        self._freed[self._whose(weights)] += sum(row.held for row in rows.values())
        return tuple(rows)

    def progress(self, row: Row, new_tokens: int, held: int) -> None:
        pool = self._whose(row.weights)
        self._growth[pool] -= row.growth
        row.tokens += new_tokens
        row.held = held
        self._growth[pool] += row.growth

    # --- whom to preempt ---

    def outgrown(self, weights: WeightsKey, part: Callable[[OwnerId], float]) -> list[Row]:
        """Rows to preempt when more is reserved than there is, among those with the same memory:
        of these weights as long as there are any, the last that joined of the owner that is the
        furthest over its part; never the row that has been running for the longest."""
        lack = self.lack(weights)
        chosen: list[Row] = []
        if lack <= 0:
            return chosen
        rows = sorted(self._sharing(weights), key=lambda row: row.joined)[1:]
        held = self._reserved(weights)
        while lack > 0 and rows:
            owners = {name: held[name] / part(name) for name in {row.owner for row in rows}}
            row = max(rows, key=lambda row: (row.weights == weights, owners[row.owner], row.joined))
            rows.remove(row)
            held[row.owner] -= row.blocks
            lack -= max(row.blocks, row.held)
            chosen.append(row)
        return chosen

    def victims(
        self, owner: OwnerId, blocks: int, weights: WeightsKey, part: Callable[[OwnerId], float]
    ) -> list[Row]:
        """Rows to preempt so that one more row of `owner` fits; none when that would take the
        owner over its guaranteed part of the memory, or others below theirs.

        `part` is an owner's guaranteed fraction. The last admitted rows of the owner that is
        the furthest over its part go first. Where memory lacks, only rows that have the same.
        """
        total, held = self.pool(weights).total, self._reserved(weights)
        mine = len(self.running.get(owner, ()))
        if self._over(mine + 1, held[owner] + blocks, total, part(owner)):
            return []
        lack = blocks - self._free_blocks(weights)
        lack_rows = 1 - self._free_rows(weights)
        chosen: list[Row] = []
        left = self._others(owner, None if lack <= 0 else weights)
        while lack > 0 or lack_rows > 0:
            over = [
                name
                for name in left
                if left[name] and self._over(len(left[name]), held[name], total, part(name))
            ]
            if not over:
                return []
            victim = max(over, key=lambda name: (held[name] / part(name), name))
            row = left[victim].pop()
            if self._whose(row.weights) == self._whose(weights):
                held[victim] -= row.blocks
                lack -= row.blocks
            chosen.append(row)
            lack_rows -= 1
        return chosen

    def _others(self, owner: OwnerId, weights: WeightsKey | None) -> dict[OwnerId, list[Row]]:
        """Rows of other owners, in the order of admission; with `weights` only those that share
        its memory."""
        left: dict[OwnerId, list[Row]] = {}
        for row in self.all_rows() if weights is None else self._sharing(weights):
            if row.owner != owner:
                left.setdefault(row.owner, []).append(row)
        return left

    def _over(self, rows: int, blocks: int, total: int, part: float) -> bool:
        return rows > max(1.0, part * self.known.max_rows) or blocks > part * total
