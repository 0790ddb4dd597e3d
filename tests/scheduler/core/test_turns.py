"""Who leads before a needier one: how far ahead, for how long, and at whose cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_driver import BASE, Driver, Engine, capacity, item, requests_of, sample

from openrl.config import SchedulerConfig
from openrl.engines.base import Capacity
from openrl.scheduler.core import events as ev
from openrl.scheduler.core.packing import PassKind
from openrl.scheduler.core.passes import Candidate, Flight
from openrl.scheduler.core.turns import Turns

SLACK = 0.25


def candidate(kind: PassKind, *need: float) -> Candidate:
    return Candidate(need, (BASE, kind), None)


def kinds(turns: Turns, *candidates: Candidate) -> list[str]:
    return [one.group[1] for one in turns.order(sorted(candidates, key=turns.need))]


def passed(seconds: float, *, jumped: bool) -> tuple[Flight, float]:
    order = ev.StartOptim(ev.PassId(1), BASE, ())
    return Flight(order.pass_id, (BASE, "optim"), 0.0, order, jumped=jumped), seconds


def driver_of(room: Capacity | None = None, **config: float) -> Driver:
    settings = SchedulerConfig(**config)  # type: ignore[arg-type]
    return Driver(settings, Engine(room or capacity(blocks=2000, rows=64)))


# --- the order ----------------------------------------------------------------------------


def test_what_ends_an_operation_or_goes_on_with_one_comes_first() -> None:
    train, rows = candidate("train", 1.0), candidate("sample", 1.1)
    control, optim = candidate("control", 1.2), candidate("optim", 1.2)
    assert kinds(Turns(SLACK), train, rows, control, optim) == [
        "optim",
        "control",
        "sample",
        "train",
    ]


def test_of_one_kind_the_needier_comes_first() -> None:
    late, early = candidate("train", 1.1), candidate("train", 1.0)
    assert [one.need for one in Turns(SLACK).order([early, late])] == [(1.0,), (1.1,)]


def test_nobody_comes_before_one_that_is_needier_by_more_than_the_slack() -> None:
    assert kinds(Turns(SLACK), candidate("train", 1.0), candidate("optim", 1.26)) == [
        "train",
        "optim",
    ]


def test_within_an_owner_the_slack_is_counted_where_the_two_part() -> None:
    """Session and lane have clocks of their own."""
    turns = Turns(SLACK)
    assert kinds(turns, candidate("train", 7.0, 1.0, 0.0), candidate("optim", 7.0, 1.2, 9.0)) == [
        "optim",
        "train",
    ]
    assert kinds(turns, candidate("train", 7.0, 1.0, 9.0), candidate("optim", 7.0, 1.3, 0.0)) == [
        "train",
        "optim",
    ]


def test_each_is_told_the_neediest_that_it_comes_before() -> None:
    train, rows = candidate("train", 1.0), candidate("sample", 1.1)
    asked = [(one, one.before) for one in Turns(SLACK).order([train, rows])]
    assert asked == [(rows, train), (train, None)]
    assert [one.clock for one, _ in asked] == [1.0, 1.0]


def test_one_that_cannot_start_is_not_come_before() -> None:
    """A row that has to wait for room was asked, and the next takes its place."""
    rows, train = candidate("sample", 1.0), candidate("train", 1.1)
    assert [one.before for one in Turns(SLACK).order([rows, train])] == [None, None]


def test_when_the_slack_is_used_up_the_neediest_leads() -> None:
    turns = Turns(SLACK)
    two = (candidate("train", 1.0), candidate("sample", 1.1))
    turns.took(*passed(0.2, jumped=True))
    assert kinds(turns, *two)[0] == "sample"
    turns.took(*passed(0.2, jumped=True))
    assert kinds(turns, *two)[0] == "train"
    turns.took(*passed(0.1, jumped=False))
    assert kinds(turns, *two)[0] == "sample"


# --- in the core --------------------------------------------------------------------------


def test_a_model_steps_before_others_train() -> None:
    driver = driver_of(pass_tokens=100)
    driver.open("a", "b", "c")
    for name in "abc":
        driver.submit(item(name, 1), item(name, 2, kind="optim_step"))
    driver.ready()
    driver.drain()
    orders = [requests_of(order) for order in driver.orders]
    assert orders == [["a:1"], ["a:2"], ["b:1"], ["b:2"], ["c:1"], ["c:2"]]


def test_a_batch_that_samples_goes_on_before_training_begins() -> None:
    driver = driver_of(decode_steps=4)
    driver.open("t")
    driver.ready()
    driver.submit(sample("s", 0, new=16), item("t", 1))
    driver.drain()
    assert [type(order) for order in driver.orders] == [*[ev.StartDecode] * 4, ev.StartTrain]


@pytest.mark.parametrize("mode", ["separate", "in_turn"])
def test_the_modes_for_comparisons_go_by_need(mode: str) -> None:
    driver = Driver(SchedulerConfig(sharing=mode, pass_tokens=100))  # type: ignore[arg-type]
    driver.open("a", "b")
    driver.ready()
    driver.submit(item("a", 1, atoms=(100, 100)), item("a", 2, kind="optim_step"), item("b", 1))
    driver.drain()
    jumped = [flight for flight in driver.orders if isinstance(flight, ev.StartOptim)]
    assert len(jumped) == 1
    assert driver.state.planner.turns._slack == 0.0


def test_an_owner_that_samples_without_end_trains_as_well() -> None:
    """All needs are one owner's."""
    driver = driver_of()
    driver.open("t")
    driver.ready()
    for seq in range(60):
        driver.submit(sample("s", seq, rows=4, new=200, owner="me"))
    for seq in range(1, 31):
        driver.submit(item("t", seq, owner="me"))
    while "t:30" not in driver.answers:
        assert driver.step()
    accounts = driver.state.statistics().accounts
    trained, sampled = (accounts["lane", lane].engine_seconds for lane in "ts")
    # A quantum and a slice for each pass of training, which are shorter here by themselves.
    assert sampled <= 5.0 * trained


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 4.0]),  # weight
            st.sampled_from([20, 90, 300]),  # tokens of an atom, or of a prompt
            st.integers(1, 6),  # atoms, or samples at once
            st.booleans(),  # trains and steps, or samples
            st.booleans(),  # has the first owner's key
        ),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_between_two_turns_of_the_neediest_there_is_a_quantum_and_a_pass(
    jobs: list[tuple[float, int, int, bool, bool]],
) -> None:
    weights = {f"o{number}": weight for number, (weight, *_) in enumerate(jobs)}
    driver = driver_of(quantum_seconds=0.1, owner_weights=weights)  # type: ignore[arg-type]
    driver.ready()
    for number, (_, tokens, count, trains, shared) in enumerate(jobs):
        lane, owner = f"l{number}", "o0" if shared else f"o{number}"
        if trains:
            driver.open(lane)
        for seq in range(1, 9):
            if not trains:
                for each in range(count):
                    driver.submit(sample(lane, 10 * seq + each, prompt=tokens, owner=owner))
            elif seq % 2:
                driver.submit(item(lane, seq, atoms=(tokens,) * count, owner=owner))
            else:
                driver.submit(item(lane, seq, kind="optim_step", owner=owner))
    spent = 0.0
    while (flight := driver.state.flight) is not None:
        assert driver.running is not None
        if flight.jumped:
            assert spent < 0.1
            spent += driver.running.seconds
        else:
            spent = 0.0
        clock = driver.state.queues.root.clock
        driver.step()
        following = driver.state.flight
        if following is not None and following.jumped:
            assert driver.state.queues.root.clock == clock  # virtual time stands still
    assert set(driver.resolved()) == set(driver.submitted)
