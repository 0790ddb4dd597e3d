"""Tokens per minute, on a clock of our own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_driver import item, sample

from openrl.scheduler.allowance import BUCKETS, Allowances, cost
from openrl.scheduler.core.events import Item
from openrl.types import OwnerId, RequestId


def work(seq: int, tokens: int, owner: str = "a") -> Item:
    return item("m", seq, owner=owner, atoms=(tokens,))


def limited(tokens_per_minute: int) -> Allowances:
    return Allowances(lambda _: tokens_per_minute)


def gone(allowances: Allowances, now: float) -> list[int]:
    return [each.seq_id for each in allowances.due(now)]


def test_without_a_rate_everything_goes() -> None:
    allowances = limited(0)
    assert allowances.admit(work(1, 10**9), 0.0)
    assert allowances.wake_at() is None


def test_a_minutes_worth_goes_at_once_and_the_rest_when_it_is_there() -> None:
    allowances = limited(600)  # 10 a second
    assert allowances.admit(work(1, 600), 0.0)
    assert not allowances.admit(work(2, 50), 0.0)
    assert not allowances.admit(work(3, 50), 0.0)
    assert gone(allowances, 0.0) == []
    assert allowances.wake_at() == 0.1  # one token
    assert gone(allowances, 0.1) == [2]  # into debt
    assert allowances.wake_at() == 0.1 + 5.0
    assert gone(allowances, 5.0) == []
    assert gone(allowances, 5.1) == [3]
    assert allowances.wake_at() is None


def test_more_than_a_minutes_worth_goes_too_and_is_paid_for_afterwards() -> None:
    allowances = limited(60)
    assert allowances.admit(work(1, 6000), 0.0)
    assert not allowances.admit(work(2, 1), 0.0)
    assert allowances.seconds_left(OwnerId("a"), RequestId("m:2"), 0.0) == 6000 - 60 + 1


def test_a_new_rate_holds_for_what_waits_already() -> None:
    rates = {"a": 60}
    allowances = Allowances(lambda owner: rates[owner])
    assert allowances.admit(work(1, 6000), 0.0)
    assert not allowances.admit(work(2, 10), 0.0)
    rates["a"] = 6000
    assert allowances.wake_at() == pytest.approx(59.41, abs=0.01)
    rates["a"] = 0
    assert allowances.wake_at() == 0.0
    assert gone(allowances, 1.0) == [2]
    assert allowances.admit(work(3, 10**9), 1.0)


def test_nothing_overtakes_what_its_owner_sent_before() -> None:
    allowances = limited(60)
    assert allowances.admit(work(1, 61), 0.0)
    assert not allowances.admit(work(2, 10), 0.0)
    step = item("m", 3, kind="optim_step", owner="a")
    assert cost(step) == 0
    assert not allowances.admit(step, 0.0)
    assert gone(allowances, 2.0) == [2]
    assert gone(allowances, 100.0) == [3]


def test_owners_do_not_wait_for_each_other() -> None:
    allowances = limited(60)
    assert allowances.admit(work(1, 1000), 0.0)
    assert not allowances.admit(work(2, 1), 0.0)
    assert allowances.admit(work(1, 1, owner="b"), 0.0)


def test_what_a_sample_did_not_use_comes_back() -> None:
    allowances = limited(600)
    one = sample("s", 1, owner="a", prompt=100, rows=2, new=250)
    assert cost(one) == 600
    assert allowances.admit(one, 0.0)
    assert not allowances.admit(work(2, 1), 0.0)
    allowances.refund(OwnerId("a"), 400)
    assert gone(allowances, 0.0) == [2]
    allowances.refund(OwnerId("a"), 10**6)
    assert allowances.admit(work(3, 600), 0.0)
    assert not allowances.admit(work(4, 1), 0.0), "a bucket holds no more than a minute's worth"


def test_what_is_taken_back_costs_nothing_and_blocks_nobody() -> None:
    allowances = limited(60)
    assert allowances.admit(work(1, 60), 0.0)
    assert not allowances.admit(work(2, 6000), 0.0)
    assert not allowances.admit(work(3, 1), 0.0)
    assert allowances.withdraw(OwnerId("a"), RequestId("m:1")) is None
    withdrawn = allowances.withdraw(OwnerId("a"), RequestId("m:2"))
    assert withdrawn is not None
    assert withdrawn.seq_id == 2
    assert gone(allowances, 1.0) == [3]


def test_full_buckets_are_forgotten() -> None:
    allowances = limited(60)
    assert allowances.admit(work(1, 1000, owner="poor"), 0.0)
    for number in range(2 * BUCKETS):
        assert allowances.admit(work(1, 1, owner=f"o{number}"), number / 10)
    assert len(allowances._buckets) < 2 * BUCKETS
    assert not allowances.admit(work(2, 1, owner="poor"), 10.0), "a debt is not forgotten"


@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(0, 300)), min_size=1, max_size=40),
    st.integers(1, 6000),
)
def test_the_rate_holds_over_any_time(arrivals: list[tuple[float, int]], rate: int) -> None:
    """All that has gone by a time is at most a minute's worth, the time's, and the last one's
    debt; and everything goes, in order."""
    allowances, now, spent, last, order = limited(rate), 0.0, 0, 0, []

    def went(seq: int, tokens: int) -> None:
        nonlocal spent, last
        spent, last = spent + tokens, tokens
        order.append(seq)
        assert spent - last <= rate + now * rate / 60 + 1e-3

    for seq, (gap, tokens) in enumerate(arrivals):
        now += gap
        for each in allowances.due(now):
            went(each.seq_id, cost(each))
        if allowances.admit(work(seq, tokens), now):
            went(seq, tokens)
    while (then := allowances.wake_at()) is not None:
        now = max(now, then)
        before = len(order)
        for each in allowances.due(now):
            went(each.seq_id, cost(each))
        assert len(order) > before, "it woke for nothing"
    assert order == list(range(len(arrivals)))
