"""The modes that others are compared with: passes of one lane, and one owner after the other."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from support.core_driver import Driver, Engine, capacity, item, requests_of, sample

from openrl.config import SchedulerConfig
from openrl.scheduler.core import events as ev
from openrl.scheduler.core.sharing import Mode


def driver_of(mode: Mode, **settings: int) -> Driver:
    return Driver(SchedulerConfig(sharing=mode, **settings), Engine(capacity(blocks=400, rows=64)))


def lanes_of(driver: Driver, order: ev.Start) -> set[str]:
    return {driver.engine.items[request].lane for request in requests_of(order)}


def busy(driver: Driver, *, turns: int = 3, seed: int = 0) -> None:
    """Three owners, each with steps of training and two samplers, submitted at random times."""
    chance = random.Random(seed)
    items = []
    for name in "abc":
        driver.open(name)
        for turn in range(turns):
            items += [item(name, 2 * turn + 1, atoms=(60,) * 4, owner=name)]
            items += [item(name, 2 * turn + 2, kind="optim_step", owner=name)]
            items += [sample(f"{name}-s", turn, rows=3, owner=name)]
            items += [sample(f"{name}-t", turn, rows=2, owner=name)]
    chance.shuffle(items)
    items.sort(key=lambda one: one.seq_id)
    driver.ready()
    for one in items:
        driver.submit(one)
        if chance.random() < 0.5:
            driver.step()
    driver.drain()
    assert len(driver.resolved()) == len(items)


@pytest.mark.parametrize("mode", ["separate", "in_turn"])
@pytest.mark.parametrize("seed", range(8))
def test_no_pass_and_no_batch_has_two_lanes(mode: Mode, seed: int) -> None:
    driver = driver_of(mode)
    sampling: list[set[str]] = []
    execute = driver.engine.execute

    def watched(order: ev.Start) -> ev.Finished:
        assert len(lanes_of(driver, order)) <= 1
        if isinstance(order, ev.StartDecode):
            admitted = lanes_of(driver, order)
            rows = {driver.engine.items[row.request_id].lane for row in driver.engine.rows}
            sampling.append(rows | admitted)
        return execute(order)

    driver.engine.execute = watched  # type: ignore[method-assign]
    busy(driver, seed=seed)
    assert sampling
    assert all(len(lanes) == 1 for lanes in sampling)


def test_fused_passes_have_several_lanes() -> None:
    driver = driver_of("fused")
    busy(driver)
    assert any(len(lanes_of(driver, order)) == 3 for order in driver.orders)


def test_separate_passes_hold_several_atoms_of_their_lane() -> None:
    driver = driver_of("separate", pass_tokens=180)
    driver.open("a", "b")
    driver.submit(item("a", 1, atoms=(60,) * 4), item("b", 1, atoms=(60,) * 4))
    driver.ready()
    driver.drain()
    assert [requests_of(order) for order in driver.orders] == [
        ["a:1"] * 3,
        ["b:1"] * 3,
        ["a:1"],
        ["b:1"],
    ]


def test_a_lane_that_always_has_samples_does_not_keep_others_away() -> None:
    driver = driver_of("separate")
    driver.ready()
    driver.submit(*(sample("loud", i, rows=4, new=30) for i in range(40)))
    driver.submit(sample("quiet", 0))
    while "quiet:0" not in driver.answers:
        assert driver.step()
    assert len(driver.answers) < 40


def turns(driver: Driver) -> list[str]:
    """The owners that the passes served, without repetitions in a row."""
    owners = (driver.engine.items[r].owner for order in driver.orders for r in requests_of(order))
    return [owner for owner, _ in groupby(owners)]


def test_in_turn_an_owners_queue_is_drained_before_the_next_begins() -> None:
    driver = driver_of("in_turn")
    for name in "abc":
        driver.open(name)
        for turn in range(3):
            driver.submit(
                item(name, 2 * turn + 1, atoms=(60,) * 4, owner=name),
                item(name, 2 * turn + 2, kind="optim_step", owner=name),
                sample(f"{name}-s", turn, rows=3, owner=name),
            )
    driver.ready()
    driver.drain()
    assert sorted(turns(driver)) == ["a", "b", "c"]


def test_the_turn_passes_on_when_its_owner_has_nothing_that_could_run() -> None:
    driver = driver_of("in_turn")
    driver.open("a", "b")
    driver.ready()
    driver.submit(item("a", 1, owner="a"), item("a", 3, owner="a"), item("b", 1, owner="b"))
    driver.drain(until=1.0)
    assert driver.resolved() == ["a:1", "b:1"]


def test_what_the_engine_did_not_compute_while_something_could_run_is_counted() -> None:
    driver = driver_of("fused")
    driver.open("a")
    driver.ready()
    driver.now = 5.0  # nothing to do: not counted
    driver.submit(item("a", 1))
    assert driver.running is not None
    driver.now = 5.0 + driver.running.seconds + 0.25  # the report came late
    done, driver.running = driver.running, None
    driver.send(done)
    assert driver.state.statistics().idle_runnable_seconds == pytest.approx(0.25)
    driver.now = 9.0
    driver.send(ev.Tick())
    assert driver.state.statistics().idle_runnable_seconds == pytest.approx(0.25)


def test_a_pass_tells_how_long_those_waited_that_it_serves_first() -> None:
    driver = driver_of("fused", pass_tokens=100)
    driver.open("a", "b")
    driver.ready()
    driver.submit(item("a", 1, atoms=(100, 100)), item("b", 1), sample("s", 0))
    driver.drain()
    waits = {}
    for record, order in zip(driver.state.timeline(), driver.orders, strict=True):
        assert len(record.waits) <= 1
        waits |= {requests_of(order)[0]: record.start for _ in record.waits}
        assert all(wait == pytest.approx(record.start) for wait in record.waits)
    assert set(waits) == {"a:1", "b:1", "s:0"}
    assert sum(record.prefilled for record in driver.state.timeline()) == 20
