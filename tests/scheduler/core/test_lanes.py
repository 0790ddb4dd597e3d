from __future__ import annotations

import pytest
from support.core_driver import item, sample

from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.lanes import OrderedLane, SampleLane
from openrl.scheduler.core.requests import Request

GAP = 2.0


def lane(first_seq: int = 1) -> OrderedLane:
    return OrderedLane("m", Share("m", None), next_seq=first_seq)


def request(seq: int, arrived: float = 0.0) -> Request:
    return Request(item("m", seq), Share("m", None), arrived)


def test_operations_start_in_order_each_after_the_one_before() -> None:
    one, first, second = lane(), request(1), request(2)
    assert one.put(second)
    assert one.put(first)
    assert one.head(0.0, GAP) is first
    one.start(first)
    first.sent = 1
    assert one.head(0.0, GAP) is None
    one.remove(first)
    assert one.head(0.0, GAP) is second


def test_an_operation_in_parts_stays_the_head_until_all_are_sent() -> None:
    one = lane()
    parts = Request(item("m", 1, atoms=(5, 5)), one.share, 0.0)
    one.put(parts)
    one.start(parts)
    parts.sent = 1
    assert one.head(0.0, GAP) is parts
    parts.sent = 2
    assert one.head(0.0, GAP) is None


def test_a_gap_ends_when_the_lowest_waiting_operation_is_old_enough() -> None:
    one, third = lane(), request(3, arrived=1.0)
    one.put(third)
    assert one.gap_ends(GAP) == 3.0
    assert one.head(2.9, GAP) is None
    assert one.head(3.0, GAP) is third


def test_what_comes_below_a_started_operation_is_too_late() -> None:
    one, third = lane(), request(3)
    one.put(third)
    one.start(third)
    assert not one.put(request(2))
    assert one.put(request(4))


def test_consumed_and_withdrawn_operations_leave_no_hole() -> None:
    one, second, fourth = lane(), request(2), request(4)
    for waiting in (second, fourth):
        one.put(waiting)
    one.consume(3)
    one.remove(second)
    one.consume(1)
    assert one.head(0.0, GAP) is fourth
    assert one.next_seq == 4


def test_a_seq_id_is_held_once() -> None:
    one = lane()
    one.put(request(1))
    with pytest.raises(AssertionError, match="seq_id 1 already"):
        one.put(request(1))


def test_a_paused_lane_has_no_head() -> None:
    one = lane()
    one.put(request(1))
    one.paused = True
    assert one.head(0.0, GAP) is None


def test_samples_go_first_come_first_served_but_preempted_ones_come_back_first() -> None:
    one = SampleLane("s", Share("s", None))
    first, second = (Request(sample("s", seq), one.share, 0.0) for seq in (9, 3))
    one.put(first)
    one.put(second)
    assert one.head() is first
    first.next_row = first.rows
    one.admitted(first)
    assert one.head() is second
    one.preempted(first)
    assert one.head() is first
    one.remove(first)
    assert one.head() is second
