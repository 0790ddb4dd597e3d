"""Which rows are in the engine's decode batch, and the KV memory that they need.

A row is admitted only when all that it can grow to is free: prompt and `max_new_tokens`. So
every running row can run to its end, and none waits for another: there is no deadlock.
Preemption is for fairness alone (an owner's guaranteed share), never for safety.

Free memory is what the engine last reported, plus what has left since, less what the rows may
still grow by. Blocks that rows share are so counted as the engine counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from openrl.engines.base import Capacity, RowId, WeightsKey
from openrl.scheduler.requests import Row
from openrl.types import OwnerId


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
        self.growth = 0
        self._freed = 0

    def report(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._freed = 0

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

    def need(self, tokens: int) -> int:
        return -(-tokens // self.known.block_tokens)

    def fits(self, blocks: int, weights: WeightsKey) -> bool:
        """Whether one more row may join the next decode pass of these weights."""
        return self._free_rows(weights) >= 1 and blocks <= self._free_blocks(weights)

    def _free_rows(self, weights: WeightsKey) -> int:
        staying = sum(len(rows) for key, rows in self.doomed.items() if key != weights)
        return self.known.max_rows - self.rows - staying

    def _free_blocks(self, weights: WeightsKey) -> int:
        if self.rows == 0 and not any(key != weights for key in self.doomed):
            return self.known.kv_blocks_total  # whatever the engine keeps cached, it can evict
        dropping = sum(row.held for row in self.doomed.get(weights, {}).values())
        return self.known.kv_blocks_free + self._freed + dropping - self.growth

    # --- coming and going ---

    def admit(self, row: Row) -> None:
        self.running.setdefault(row.owner, {})[row.id] = row
        self.counts[row.weights] = self.counts.get(row.weights, 0) + 1
        self.blocks[row.owner] = self.blocks.get(row.owner, 0) + row.blocks
        self.rows += 1
        self.growth += row.growth

    def leave(self, row: Row) -> None:
        """The row has ended: it is out of the batch, and the engine knows."""
        mine = self.running[row.owner]
        del mine[row.id]
        self.counts[row.weights] -= 1
        self.blocks[row.owner] -= row.blocks
        if not mine:
            del self.running[row.owner], self.blocks[row.owner]
        self.rows -= 1
        self.growth -= row.growth

    def preempt(self, row: Row) -> None:
        self.leave(row)
        self._freed += row.held
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
        self._freed += sum(row.held for row in rows.values())
        return tuple(rows)

    def progress(self, row: Row, new_tokens: int, held: int) -> None:
        self.growth -= row.growth
        row.tokens += new_tokens
        row.held = held
        self.growth += row.growth

    # --- guaranteed shares ---

    def victims(
        self, owner: OwnerId, blocks: int, weights: WeightsKey, part: Callable[[OwnerId], float]
    ) -> list[Row]:
        """Rows to preempt so that one more row of `owner` fits; none when that would take the
        owner over its guaranteed part of the memory, or others below theirs.

        `part` is an owner's guaranteed fraction. The last admitted rows of the owner that is
        the furthest over its part go first.
        """
        if not self._within(owner, 1, blocks, part(owner)):
            return []
        lack = blocks - self._free_blocks(weights)
        lack_rows = 1 - self._free_rows(weights)
        chosen: list[Row] = []
        left = {name: list(rows.values()) for name, rows in self.running.items() if name != owner}
        held = dict(self.blocks)
        while lack > 0 or lack_rows > 0:
            over = [
                name
                for name in left
                if left[name] and self._over(len(left[name]), held[name], part(name))
            ]
            if not over:
                return []
            victim = max(over, key=lambda name: (held[name] / part(name), name))
            row = left[victim].pop()
            held[victim] -= row.blocks
            chosen.append(row)
            lack -= row.blocks
            lack_rows -= 1
        return chosen

    def _within(self, owner: OwnerId, rows: int, blocks: int, part: float) -> bool:
        rows += len(self.running.get(owner, ()))
        blocks += self.blocks.get(owner, 0)
        return not self._over(rows, blocks, part)

    def _over(self, rows: int, blocks: int, part: float) -> bool:
        most_rows = max(1.0, part * self.known.max_rows)
        return rows > most_rows or blocks > part * self.known.kv_blocks_total
