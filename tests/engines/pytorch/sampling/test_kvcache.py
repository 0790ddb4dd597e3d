"""The memory for keys and values: rows keep their content, shelves have no holes, the budget
holds."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.engines.pytorch.kvcache import BLOCK_TOKENS, KVMemory, KVShape, Slot, kv_class

CPU = torch.device("cpu")
SHAPE = KVShape(layers=2, kv_heads=2, head_dim=4, dtype=torch.float32)


def memory(tokens: int) -> KVMemory[int]:
    return KVMemory(SHAPE, CPU, tokens * SHAPE.token_bytes)


def mark(slot: Slot[int], filled: int) -> None:
    slot.shelf.kv[:, :, slot.index, :, :filled] = slot.owner


def check(kv: KVMemory[int], rows: dict[int, tuple[Slot[int], int]]) -> None:
    for owner, (slot, filled) in rows.items():
        assert slot.owner == owner
        assert slot.shelf.slots[slot.index] is slot
        assert (slot.shelf.kv[:, :, slot.index, :, :filled] == owner).all()
    assert sum(len(shelf.slots) for shelf in kv.shelves()) == len(rows)
    assert all(len(shelf.slots) <= shelf.rows for shelf in kv.shelves())
    really = sum(shelf.kv.numel() * 4 for shelf in kv.shelves())
    assert really + kv.reserved * SHAPE.token_bytes <= kv.total * SHAPE.token_bytes


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(200, 3000))
def test_any_order_of_joining_growing_and_leaving(rng: random.Random, tokens: int) -> None:
    kv = memory(tokens)
    rows: dict[int, tuple[Slot[int], int]] = {}
    for owner in range(1, 120):
        action = rng.random()
        if action < 0.5 or not rows:
            filled = rng.randint(1, 150)
            slot = kv.allocate(owner, filled, rng.randint(1, 8))
            if slot is not None:
                mark(slot, filled)
                rows[owner] = (slot, filled)
        elif action < 0.75:
            chosen = rng.choice(list(rows))
            slot, filled = rows[chosen]
            if kv.move(slot, slot.capacity + 1, filled):
                assert slot.capacity > filled
        else:
            kv.release(rows.pop(rng.choice(list(rows)))[0])
        check(kv, rows)
    for slot, _ in rows.values():
        kv.release(slot)
    assert kv.allocated == 0


def test_classes_depend_on_the_length_and_waste_less_than_half() -> None:
    for length in range(1, 5000):
        assert kv_class(length) >= length
        assert kv_class(length) % BLOCK_TOKENS == 0
        assert length <= 32 or kv_class(length) < 2 * length


def test_a_full_budget_refuses() -> None:
    kv = memory(128)
    slots = [kv.allocate(i, 32) for i in range(6)]
    assert [slot is not None for slot in slots] == [True] * 4 + [False] * 2
    assert not kv.reserve(32)
    assert kv.unallocated == 0


def test_reclaiming_makes_room() -> None:
    kv = memory(128)
    assert kv.reserve(96)
    asked: list[int] = []

    def give_back(tokens: int) -> None:
        asked.append(tokens)
        kv.unreserve(96)

    kv.reclaim = give_back
    assert kv.allocate(1, 64) is not None
    assert asked == [32]


def test_a_poisoned_row_leaves_nothing_behind() -> None:
    kv = memory(1024)
    other = kv.allocate(1, 32, company=2)
    last = kv.allocate(2, 32)
    assert other is not None
    assert last is not None
    mark(other, 32)
    last.shelf.kv[:, :, last.index] = float("nan")
    kv.release(last, poisoned=True)
    assert all(torch.isfinite(shelf.kv).all() for shelf in kv.shelves())
    check(kv, {1: (other, 32)})


@pytest.mark.parametrize("tokens", [0, 31])
def test_a_budget_of_less_than_a_block_holds_nothing(tokens: int) -> None:
    assert memory(tokens).allocate(1, 1) is None
