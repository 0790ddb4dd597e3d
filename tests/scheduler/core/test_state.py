from __future__ import annotations

import dataclasses

import pytest
from support.core_driver import Driver, Engine, capacity, coin, item, requests_of, sample

from openrl.config import SchedulerConfig
from openrl.errors import Cancelled, Gone, NotFound, OutOfMemory, ServerError, UserError
from openrl.scheduler.core import events as ev
from openrl.scheduler.core import story
from openrl.types import RequestId


def started(driver: Driver, kind: type) -> list[ev.Start]:
    return [order for order in driver.orders if isinstance(order, kind)]


def test_nothing_starts_before_the_engine_is_ready() -> None:
    driver = Driver()
    driver.open("m")
    driver.submit(item("m", 1), sample("s", 0))
    assert driver.orders == []
    assert driver.state.why_waiting(RequestId("m:1"), 0.0).startswith("waiting for the engine")
    driver.ready()
    driver.drain()
    assert sorted(driver.resolved()) == ["m:1", "s:0"]


def test_one_lane_runs_in_order_whatever_the_order_of_arrival() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.submit(
        item("m", 3),
        item("m", 2, kind="optim_step"),
        item("m", 1),
        item("m", 4, kind="optim_step"),
    )
    driver.drain()
    assert driver.order_of("m") == ["m:1", "m:2", "m:3", "m:4"]
    assert driver.ends < 1.0  # no wait for a gap


def test_two_lanes_share_passes() -> None:
    driver = Driver()
    driver.open("a", "b")
    driver.submit(item("a", 1), item("a", 2, kind="optim_step"))
    driver.submit(item("b", 1), item("b", 2, kind="optim_step"))
    driver.ready()
    driver.drain()
    assert [requests_of(order) for order in driver.orders] == [["a:1", "b:1"], ["a:2", "b:2"]]


def test_a_large_request_is_sent_atom_by_atom_and_answered_once() -> None:
    driver = Driver(SchedulerConfig(pass_tokens=200))
    driver.open("m")
    driver.submit(item("m", 1, atoms=(100,) * 5), item("m", 2, kind="optim_step"))
    driver.ready()
    driver.drain()
    trains = started(driver, ev.StartTrain)
    assert [atom for order in trains for atom in order.atoms] == [("m:1", i) for i in range(5)]
    assert all(len(order.atoms) <= 2 for order in trains)
    assert driver.order_of("m") == ["m:1", "m:2"]
    assert all(len(answers) == 1 for answers in driver.answers.values())


def test_rows_join_in_portions_when_memory_is_short() -> None:
    driver = Driver(engine=Engine(capacity(blocks=4)))
    driver.submit(sample("s", 0, rows=5))  # two blocks each
    driver.ready()
    driver.drain()
    admitted = [rows for order in started(driver, ev.StartDecode) for _, rows in order.admit]
    assert sorted(index for rows in admitted for index in rows) == [0, 1, 2, 3, 4]
    assert all(len(rows) <= 2 for rows in admitted)
    assert driver.resolved() == ["s:0"]


def test_a_row_that_can_never_fit_is_refused_with_sizes() -> None:
    driver = Driver(engine=Engine(capacity(blocks=4)))
    driver.submit(sample("s", 0, prompt=60, new=20))
    driver.ready()
    error = driver.refusal("s:0").error
    assert isinstance(error, OutOfMemory)
    assert "60 + 20 tokens needs 5 KV blocks; the engine has 4" in error.message


def test_a_hole_is_waited_for_and_then_skipped() -> None:
    driver = Driver(SchedulerConfig(gap_seconds=2.0))
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 2))
    assert driver.orders == []
    assert driver.state.why_waiting(RequestId("m:2"), 0.0) == "waiting for seq 1 of this model"
    driver.drain()
    assert driver.now == pytest.approx(2.0, abs=0.2)
    driver.submit(item("m", 1))
    assert isinstance(driver.refusal("m:1").error, UserError)
    assert driver.resolved() == ["m:2"]


def test_a_hole_that_is_filled_in_time_is_kept() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 2))
    driver.now = 1.0
    driver.submit(item("m", 1))
    driver.drain()
    assert driver.order_of("m") == ["m:1", "m:2"]


def test_a_consumed_seq_is_no_hole() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 3))
    driver.send(ev.SeqConsumed("m", 2))
    assert driver.orders == []
    driver.send(ev.SeqConsumed("m", 1))
    assert driver.order_of("m") == ["m:3"]


def test_a_failed_operation_fails_itself_alone() -> None:
    driver = Driver(engine=Engine(capacity(), fails=coin(0, 1.0)))
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 1, atoms=(10, 10)), item("m", 2, kind="optim_step"))
    driver.drain()
    assert driver.resolved() == ["m:1", "m:2"]  # the actor holds what they failed by


def test_a_failed_row_ends_its_request_and_frees_the_others() -> None:
    outcomes = iter([True] + [False] * 100)
    driver = Driver(engine=Engine(capacity(), fails=lambda: next(outcomes)))
    driver.submit(sample("s", 0, rows=3, new=40))
    driver.ready()
    driver.drain()
    assert driver.resolved() == ["s:0"]
    assert driver.engine.rows == {}
    assert driver.state.residency.rows == 0


def test_cancelling_a_sample_frees_its_rows_with_the_next_pass() -> None:
    driver = Driver()
    driver.ready()
    driver.submit(sample("s", 0, rows=3, new=400))
    driver.send(ev.Cancelled(RequestId("s:0")))
    assert isinstance(driver.refusal("s:0").error, Cancelled)
    driver.drain()
    assert driver.engine.rows == {}


def test_cancelling_a_waiting_operation_lets_the_next_one_run() -> None:
    driver = Driver()
    driver.open("m")
    driver.submit(item("m", 1), item("m", 2))
    driver.send(ev.Cancelled(RequestId("m:1")))
    driver.ready()
    driver.drain()
    assert driver.resolved() == ["m:2"]
    assert driver.now < 1.0


def test_a_cancelled_operation_stops_after_the_pass_that_runs() -> None:
    driver = Driver(SchedulerConfig(pass_tokens=100))
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 1, atoms=(100, 100)), item("m", 2))
    driver.send(ev.Cancelled(RequestId("m:1")))
    assert driver.answers == {}
    driver.drain()
    assert isinstance(driver.refusal("m:1").error, Cancelled)
    assert driver.resolved() == ["m:2"]
    assert sum(len(order.atoms) for order in started(driver, ev.StartTrain)) == 2


def test_an_operation_whose_last_part_runs_is_answered_as_usual() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 1))
    driver.send(ev.Cancelled(RequestId("m:1")))
    driver.drain()
    assert driver.resolved() == ["m:1"]


def test_a_deadline_takes_waiting_work_out() -> None:
    driver = Driver()
    driver.open("m")
    driver.submit(item("m", 1, deadline=5.0), sample("s", 0, deadline=6.0))
    driver.drain()
    assert driver.now == 6.0
    assert isinstance(driver.refusal("m:1").error, Cancelled)
    assert isinstance(driver.refusal("s:0").error, Cancelled)


def test_closing_a_lane_refuses_what_waits_and_lets_the_running_pass_end() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 1), item("m", 2))
    driver.send(ev.LaneClosed("m", Gone("unloaded")))
    assert isinstance(driver.refusal("m:2").error, Gone)
    driver.drain()
    assert driver.resolved() == ["m:1"]
    driver.submit(item("m", 3))
    assert isinstance(driver.refusal("m:3").error, NotFound)


def test_a_lost_engine_refuses_what_runs_and_keeps_what_waits() -> None:
    driver = Driver(SchedulerConfig(pass_tokens=100))
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 1, atoms=(100, 100)), item("m", 2), sample("s", 0))
    driver.running = None
    driver.send(ev.EngineLost(ServerError("gone")))
    assert driver.refusal("m:1").error.message == "gone"
    driver.engine.rows.clear()
    driver.ready()
    driver.drain()
    assert sorted(driver.resolved()) == ["m:2", "s:0"]


def test_a_paused_lane_starts_nothing() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.send(ev.LanePaused("m"))
    driver.submit(item("m", 1))
    assert driver.orders == []
    assert driver.state.why_waiting(RequestId("m:1"), 0.0) == "paused"
    driver.send(ev.LaneResumed("m"))
    driver.drain()
    assert driver.resolved() == ["m:1"]


def test_a_part_without_an_outcome_is_refused() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 1))
    assert driver.running is not None
    driver.running = ev.Finished(driver.running.pass_id, 0.1, capacity())
    driver.drain()
    assert isinstance(driver.refusal("m:1").error, ServerError)


def test_a_row_that_the_engine_lost_is_refused() -> None:
    driver = Driver()
    driver.ready()
    driver.submit(sample("s", 0, rows=2, new=100), sample("t", 0, new=100))
    assert driver.running is not None
    driver.running = dataclasses.replace(driver.running, rows=driver.running.rows[:1])
    driver.drain()
    assert isinstance(driver.refusal("s:0").error, ServerError)
    assert driver.resolved() == ["t:0"]
    assert driver.engine.rows == {}


def test_a_repeated_request_is_a_bug_of_the_caller() -> None:
    driver = Driver()
    driver.open("m")
    driver.submit(item("m", 1))
    with pytest.raises(AssertionError, match="queued already"):
        driver.submit(item("m", 1))


def test_reasons_name_owners_ahead_and_operations_before() -> None:
    driver = Driver()
    driver.ready()
    driver.submit(sample("s", 0, new=300))
    for name in "abc":
        driver.open(name)
        driver.submit(item(name, 1), item(name, 2))
    reasons = [driver.state.why_waiting(RequestId(f"{name}:1"), 0.0) for name in "abc"]
    assert reasons[2].startswith("waiting for capacity: 2 owners ahead")
    assert driver.state.why_waiting(RequestId("a:2"), 0.0) == "waiting for seq 1 of this model"
    assert driver.state.why_waiting(RequestId("s:0"), 0.0) == "running"


def test_the_story_of_a_lane_and_its_account() -> None:
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.submit(item("m", 1), sample("s", 0))
    driver.drain()
    assert [line.what for line in driver.state.story("m")] == [
        "queued",
        "pass 1: 1 of 1 parts",
        "done",
    ]
    statistics = driver.state.statistics()
    seconds = sum(record.seconds for record in driver.state.timeline())
    owners = [account for (level, _), account in statistics.accounts.items() if level == "owner"]
    assert sum(account.engine_seconds for account in owners) == pytest.approx(seconds)
    assert statistics.accounts["lane", "m"].tokens == 100
    assert statistics.accounts["lane", "s"].tokens == 20 + 12
    assert statistics.requests_waiting == statistics.requests_running == 0


def test_accounts_go_that_did_nothing_for_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago they were opened: a run of days keeps its own."""
    monkeypatch.setattr(story, "ACCOUNTS", 8)
    driver = Driver()
    driver.ready()
    for number in range(24):
        driver.submit(sample("long", number), sample(f"short{number}", 0))
        driver.drain()
    accounts = driver.state.statistics().accounts
    for level in story.LEVELS:
        assert 7 <= sum(1 for each, _ in accounts if each == level) <= 8
    assert accounts["lane", "long"].requests == 24
    assert ("lane", "short23") in accounts
    assert ("lane", "short0") not in accounts


def test_deadlines_of_what_is_answered_are_forgotten() -> None:
    """Also behind one that lasts: the order of deadlines alone would keep them."""
    driver = Driver()
    driver.ready()
    driver.open("m")
    driver.send(ev.LanePaused("m"))
    driver.submit(item("m", 1, deadline=1e6))
    for number in range(500):
        driver.submit(sample("s", number, deadline=1e6 + 1.0))
        while len(driver.resolved()) <= number:
            assert driver.step()
    assert len(driver.state.queues._deadlines) < 100
