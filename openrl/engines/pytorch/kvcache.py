"""Memory for keys and values: planned once from a budget in bytes, never exceeded.

A decoding row owns a `Slot`: contiguous room for one of a few capacities (its *class*, which
depends on the row's own length alone). Slots of one class lie side by side in `Shelf`s, always
without holes, so that a decode step attends to a whole shelf as one batch of views: nothing is
gathered or copied per step. A row that outgrows its class moves to the next.

Rejected: a pool of small pages gathered for every step, which on a CPU costs as much as the
attention itself.

All counts are tokens; the scheduler sees blocks of `BLOCK_TOKENS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

BLOCK_TOKENS = 32
"""Also the length of a prefill chunk, and so the grain of prefix sharing."""

_SHELF_TOKENS = 4096  # at most, and a sixteenth of the budget; more brings no speed
_FIRST_ROWS = 4  # a class starts with a shelf of so many rows and doubles

Owner = TypeVar("Owner")


def kv_class(length: int) -> int:
    """Room for a row of `length` tokens: 32, 64, 96, 128, 192, 256, 384, 512, 768, …"""
    blocks = -(-length // BLOCK_TOKENS)
    if blocks <= 4:
        return max(blocks, 1) * BLOCK_TOKENS
    power = 1 << (blocks - 1).bit_length()
    return (power * 3 // 4 if blocks <= power * 3 // 4 else power) * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token occupies: 2 * layers * kv_heads * head_dim elements."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class Slot(Generic[Owner]):
    """One row's room. `shelf` and `index` change when the shelf closes a hole."""

    __slots__ = ("index", "owner", "shelf")

    def __init__(self, owner: Owner, shelf: Shelf[Owner], index: int) -> None:
        self.owner = owner
        self.shelf = shelf
        self.index = index

    @property
    def capacity(self) -> int:
        return self.shelf.capacity


class Shelf(Generic[Owner]):
    """`kv` [layers, 2, rows, kv_heads, capacity, head_dim]; the first `len(slots)` rows are
    taken. Unused cells are finite: an attention mask hides them, but NaN would pass it."""

    def __init__(self, shape: KVShape, capacity: int, rows: int, device: torch.device) -> None:
        self.capacity = capacity
        self.rows = rows
        self.slots: list[Slot[Owner]] = []
        self.kv = torch.zeros(
            (shape.layers, 2, rows, shape.kv_heads, capacity, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )

    @property
    def tokens(self) -> int:
        return self.rows * self.capacity


class KVMemory(Generic[Owner]):
    """Hands out slots and staging room within the budget.

    `reclaim` is asked to give back that many tokens of what can be made again (cached
    prefixes) before an allocation fails.
    """

    def __init__(self, shape: KVShape, device: torch.device, budget_bytes: int) -> None:
        self.shape = shape
        self.device = device
        self.total = budget_bytes // shape.token_bytes // BLOCK_TOKENS * BLOCK_TOKENS
        self.reserved = 0
        self.reclaim: Callable[[int], None] = lambda tokens: None
        self._shelves: dict[int, list[Shelf[Owner]]] = {}

    @property
    def allocated(self) -> int:
        """Tokens of memory that exist: shelves, staging and cached prefixes."""
        shelves = sum(shelf.tokens for shelf in self.shelves())
        return shelves + self.reserved

    @property
    def unallocated(self) -> int:
        return self.total - self.allocated

    def shelves(self) -> Iterator[Shelf[Owner]]:
        """In the order of the decode batch."""
        for capacity in sorted(self._shelves):
            yield from self._shelves[capacity]

    def idle(self) -> int:
        """Tokens in shelves that no row holds; only rows of the same class can use them."""
        return sum(self.spare(capacity) for capacity in self._shelves)

    def spare(self, capacity: int) -> int:
        """Tokens in shelves of one class that no row holds."""
        shelves = self._shelves.get(capacity, ())
        return sum((s.rows - len(s.slots)) * capacity for s in shelves)

    # --- staging and cached prefixes: plain reservations ---

    def reserve(self, tokens: int) -> bool:
        if self.unallocated < tokens:
            self.reclaim(tokens - self.unallocated)
        if self.unallocated < tokens:
            return False
        self.reserved += tokens
        return True

    def unreserve(self, tokens: int) -> None:
        self.reserved -= tokens

    # --- slots ---

    def allocate(self, owner: Owner, tokens: int, company: int = 1) -> Slot[Owner] | None:
        """A slot with room for `tokens`, or None when the budget has none left. `company` is
        how many rows of this length are about to ask: it only sizes a new shelf."""
        shelf = self._shelf_with_room(kv_class(tokens), company)
        if shelf is None:
            return None
        slot = Slot(owner, shelf, len(shelf.slots))
        shelf.slots.append(slot)
        return slot

    def move(self, slot: Slot[Owner], tokens: int, filled: int, company: int = 1) -> bool:
        """Gives the slot room for `tokens`, keeping its first `filled`; False without memory."""
        bigger = self.allocate(slot.owner, tokens, company)
        if bigger is None:
            return False
        new, index = bigger.shelf, bigger.index
        new.kv[:, :, index, :, :filled] = slot.shelf.kv[:, :, slot.index, :, :filled]
        new.slots[index] = slot
        old = Slot(slot.owner, slot.shelf, slot.index)
        old.shelf.slots[old.index] = old
        slot.shelf, slot.index = new, index
        self.release(old)
        return True

    def release(self, slot: Slot[Owner], *, poisoned: bool = False) -> None:
        """Frees a slot and closes the hole with the last row of the class. `poisoned` clears
        it first, for a row whose values were not finite."""
        if poisoned:
            slot.shelf.kv[:, :, slot.index] = 0
        shelves = self._shelves[slot.shelf.capacity]
        last = next(s for s in reversed(shelves) if s.slots)
        mover = last.slots.pop()
        if mover is not slot:
            slot.shelf.kv[:, :, slot.index] = last.kv[:, :, mover.index]
            slot.shelf.slots[slot.index] = mover
            mover.shelf, mover.index = slot.shelf, slot.index
        if not last.slots:
            self._close(last)

    def _close(self, shelf: Shelf[Owner]) -> None:
        shelves = self._shelves[shelf.capacity]
        shelves.remove(shelf)
        if not shelves:
            del self._shelves[shelf.capacity]

    def _shelf_with_room(self, capacity: int, company: int) -> Shelf[Owner] | None:
        shelves = self._shelves.get(capacity, [])
        for shelf in shelves:
            if len(shelf.slots) < shelf.rows:
                return shelf
        if self.unallocated < capacity:
            self.reclaim(capacity - self.unallocated)
        rows = min(self._wanted_rows(capacity, company), self.unallocated // capacity)
        if rows < 1:
            return None
        shelf = Shelf[Owner](self.shape, capacity, rows, self.device)
        kept = self._absorb(shelf, self._shelves.get(capacity, []))
        self._shelves[capacity] = sorted([*kept, shelf], key=lambda s: -s.rows)
        return shelf

    def _wanted_rows(self, capacity: int, company: int) -> int:
        existing = sum(shelf.rows for shelf in self._shelves.get(capacity, ()))
        most = max(1, min(_SHELF_TOKENS, self.total // 16) // capacity)
        return min(most, max(_FIRST_ROWS, 1 << (existing + company - 1).bit_length()))

    @staticmethod
    def _absorb(shelf: Shelf[Owner], others: list[Shelf[Owner]]) -> list[Shelf[Owner]]:
        """Moves the rows of small shelves into a new one that has room for them and one more:
        few large shelves make few attention calls. Returns the shelves that stay."""
        kept = []
        for other in reversed(others):  # the smallest first
            start, count = len(shelf.slots), len(other.slots)
            if start + count >= shelf.rows:
                kept.append(other)
                continue
            shelf.kv[:, :, start : start + count] = other.kv[:, :, :count]
            shelf.slots += other.slots
            for index in range(start, start + count):
                shelf.slots[index].shelf, shelf.slots[index].index = shelf, index
        return kept
