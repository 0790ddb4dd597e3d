from __future__ import annotations

import pytest
from support.core_driver import BASE, capacity

from openrl.engines.base import Capacity, KVPool, RowId, WeightsKey
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.requests import Row
from openrl.scheduler.core.residency import Residency
from openrl.types import OwnerId, RequestId

OTHER = WeightsKey("other")


def row(owner: str, index: int, weights: WeightsKey = BASE) -> Row:
    row_id = RowId(RequestId(f"{owner}:0"), index)
    return Row(row_id, OwnerId(owner), weights, Share("", None), 16, 160, 16)


def memory(blocks: int = 20, rows: int = 8) -> Residency:
    residency = Residency()
    residency.report(capacity(blocks, rows))
    return residency


def half(_: str) -> float:
    return 0.5


def test_free_memory_is_what_the_engine_says_less_what_rows_may_grow_by() -> None:
    residency, one = memory(), row("a", 0)
    residency.admit(one, 10)
    assert residency.lack(BASE) == -10
    residency.report(Capacity(20, 16, 16, 8, 8, 0, 0))
    residency.progress(one, 10, 4)  # it holds 4 and may take 6 more
    assert residency.lack(BASE) == -10
    residency.report(Capacity(20, 18, 16, 8, 8, 0, 0))  # two of its blocks are shared
    assert residency.lack(BASE) == -12


def test_a_preempted_row_gives_everything_back() -> None:
    residency, one = memory(), row("a", 0)
    residency.admit(one, 10)
    residency.admit(row("a", 1), 5)
    residency.report(Capacity(20, 16, 16, 8, 8, 0, 0))
    residency.progress(one, 10, 4)
    residency.preempt(one)
    assert residency.lack(BASE) == -15


def test_doomed_rows_count_until_a_pass_of_their_weights_drops_them() -> None:
    residency, one, other = memory(rows=1), row("a", 0), row("b", 0)
    residency.admit(one, 10)
    residency.report(Capacity(20, 16, 16, 1, 8, 0, 0))
    residency.progress(one, 10, 4)
    residency.doom(one)
    assert residency.fits(20, BASE)  # they leave first in a pass of their own weights
    assert not residency.fits(1, OTHER)
    assert residency.drop(BASE) == (one.id,)
    assert residency.fits(20, OTHER)
    residency.admit(other, 20)
    assert not residency.fits(1, BASE)


def test_an_owner_within_its_part_takes_from_the_one_that_is_over() -> None:
    residency = memory()
    greedy = [row("greedy", index) for index in range(4)]
    for one in greedy:
        residency.admit(one, 5)
    wanted = residency.victims(OwnerId("late"), 7, BASE, half)
    assert wanted == [greedy[3], greedy[2]]  # the last that came, as few as will do
    assert residency.victims(OwnerId("late"), 11, BASE, half) == []  # more than its part
    assert residency.victims(OwnerId("greedy"), 1, BASE, half) == []


def test_nobody_is_taken_below_its_part() -> None:
    residency = memory()
    for index in range(2):
        residency.admit(row("a", index), 5)
    residency.admit(row("b", 0), 5)
    residency.admit(row("b", 1), 5)
    assert residency.victims(OwnerId("late"), 6, BASE, half) == []


def test_those_that_outgrow_the_memory_go_but_never_the_oldest() -> None:
    residency = memory()
    oldest, second, third = row("a", 0), row("b", 0), row("b", 1)
    for one in (oldest, second, third):
        residency.admit(one, 6)
    oldest.tokens = second.tokens = third.tokens = 90
    for one in (oldest, second, third):
        residency.reserve(one, 32)  # eight blocks each
    assert residency.lack(BASE) == 4
    assert residency.outgrown(BASE, half) == [third]
    for one in (second, third):
        residency.preempt(one)
    assert residency.outgrown(BASE, half) == []


@pytest.fixture
def apart() -> Residency:
    """Each of two base models has ten blocks of its own."""
    residency = Residency()
    pools = {BASE: KVPool(10, 10), OTHER: KVPool(10, 10)}
    residency.report(Capacity(20, 20, 16, 8, 8, 0, 0, pools))
    return residency


def test_a_row_fits_where_its_own_weights_have_room(apart: Residency) -> None:
    apart.admit(row("a", 0), 8)
    assert not apart.fits(3, BASE)  # though twelve are free in all
    assert apart.fits(10, OTHER)
    assert (apart.lack(BASE), apart.lack(OTHER)) == (-2, -10)


def test_rows_of_other_weights_are_not_taken_out_for_memory(apart: Residency) -> None:
    elsewhere, here = row("greedy", 0, OTHER), row("greedy", 1)
    apart.admit(elsewhere, 10)
    apart.admit(here, 10)
    assert apart.victims(OwnerId("late"), 4, BASE, half) == [here]
    apart.admit(row("b", 0), 1)
    apart.admit(row("b", 1, OTHER), 1)
    assert [one.weights for one in apart.outgrown(BASE, half)] == [BASE]
    assert [one.weights for one in apart.outgrown(OTHER, half)] == [OTHER]


def test_what_one_memory_gets_back_is_not_free_in_another(apart: Residency) -> None:
    one = row("a", 0)
    apart.admit(one, 10)
    pools = {BASE: KVPool(10, 4), OTHER: KVPool(10, 10)}
    apart.report(Capacity(20, 14, 16, 8, 8, 0, 0, pools))
    apart.progress(one, 10, 6)
    apart.preempt(one)
    apart.admit(row("b", 0, OTHER), 10)
    assert (apart.lack(BASE), apart.lack(OTHER)) == (-10, 0)


def test_a_row_reserves_what_its_owners_rows_have_needed() -> None:
    residency = memory(blocks=100)
    assert residency.expected_blocks(row("a", 0), 16) == 10  # unknown: all that it may
    for index in range(50):
        short = row("a", index)
        residency.admit(short, 10)
        residency.progress(short, 16, 2)
        residency.ended(short)
    assert residency.expected_blocks(row("a", 99), 16) == 3  # 16 and a quarter more
    assert residency.expected_blocks(row("b", 0), 16) == 10
