"""Shares of engine time, waits and decision time, with clients that always have work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_driver import Driver, Engine, capacity, item, sample

from openrl.config import SchedulerConfig
from openrl.scheduler.core import events as ev
from openrl.types import RequestId


@dataclass
class Clients:
    """Each lane sends its next request when its last was answered, `depth` at a time."""

    driver: Driver
    makers: dict[str, Callable[[int], ev.Item]] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    seen: int = 0

    def trainer(self, lane: str, owner: str, atoms: tuple[int, ...], depth: int = 2) -> None:
        self.driver.open(lane)
        self.makers[lane] = lambda seq: item(lane, seq, owner=owner, atoms=atoms)
        self._start(lane, depth)

    def sampler(
        self, lane: str, owner: str, depth: int = 2, prompt: int = 20, rows: int = 1, new: int = 40
    ) -> None:
        self.makers[lane] = lambda seq: sample(
            lane, seq, owner=owner, prompt=prompt, rows=rows, new=new
        )
        self._start(lane, depth)

    def _start(self, lane: str, depth: int) -> None:
        self.sent[lane] = 0
        for _ in range(depth):
            self._send(lane)

    def _send(self, lane: str) -> None:
        self.sent[lane] += 1
        self.driver.submit(self.makers[lane](self.sent[lane]))

    def run(self, seconds: float) -> None:
        until = self.driver.now + seconds
        while self.driver.now < until and self.driver.step():
            answered = list(self.driver.answers)[self.seen :]
            self.seen += len(answered)
            for lane in (request.rsplit(":", 1)[0] for request in answered):
                if lane in self.makers:
                    self._send(lane)

    def used(self) -> dict[str, float]:
        accounts = self.driver.state.statistics().accounts
        return {
            name: account.engine_seconds
            for (level, name), account in accounts.items()
            if level == "owner"
        }


def clients(weights: dict[str, float] | None = None, **config: float) -> Clients:
    settings = SchedulerConfig(owner_weights=weights or {}, **config)  # type: ignore[arg-type]
    driver = Driver(settings, Engine(capacity(blocks=2000, rows=64)), check=False)
    driver.ready()
    return Clients(driver)


def parts(used: dict[str, float]) -> dict[str, float]:
    total = sum(used.values())
    return {name: seconds / total for name, seconds in used.items()}


def test_trainers_get_engine_time_by_weight() -> None:
    group = clients({"a": 1.0, "b": 2.0, "c": 4.0})
    for owner, atoms in {"a": (400,) * 3, "b": (50,), "c": (200,) * 2}.items():
        for lane in range(4):
            group.trainer(f"{owner}{lane}", owner, atoms, depth=3)
    group.run(120.0)
    got = parts(group.used())
    for owner, weight in {"a": 1, "b": 2, "c": 4}.items():
        assert got[owner] == pytest.approx(weight / 7, rel=0.05)


def test_a_flood_of_requests_or_lanes_buys_nothing() -> None:
    group = clients()
    for lane in range(50):
        group.trainer(f"flood{lane}", "flood", (100,), depth=20)
    group.trainer("one", "one", (100,), depth=8)
    group.run(60.0)
    got = parts(group.used())
    # One lane has one head at a time, but it is in every pass that it leads.
    assert got["one"] == pytest.approx(0.5, rel=0.05)


def test_a_sampler_and_a_trainer_share_the_engine_by_time() -> None:
    group = clients()
    group.trainer("t", "trainer", (150,) * 4, depth=2)
    group.sampler("s", "sampler", depth=40)
    group.run(60.0)
    assert parts(group.used())["trainer"] == pytest.approx(0.5, rel=0.05)


def test_a_sampler_of_small_weight_gains_nothing_by_going_first() -> None:
    group = clients({"trainer": 4.0})
    group.trainer("t", "trainer", (150,) * 4, depth=2)
    group.sampler("s", "sampler", depth=40)
    group.run(60.0)
    assert parts(group.used())["trainer"] == pytest.approx(0.8, rel=0.05)


def test_small_requests_that_all_fit_into_a_pass_still_share_by_weight() -> None:
    """Owners that ride along in every pass would otherwise get equal parts."""
    group = clients({"a": 1.0, "b": 2.0, "c": 4.0})
    for owner in "abc":
        group.trainer(owner, owner, (20,), depth=3)
    group.run(60.0)
    got = parts(group.used())
    for owner, weight in {"a": 1, "b": 2, "c": 4}.items():
        assert got[owner] == pytest.approx(weight / 7, rel=0.05)


def test_a_needy_row_takes_no_slices_for_itself_alone() -> None:
    """One owner decodes sixty rows and another one; a third trains. By need alone the single
    row would decode by itself for a third of the time, which helps nobody."""
    group = clients()
    group.trainer("t", "trainer", (50,) * 12, depth=2)
    group.sampler("many", "many", depth=60, new=60)
    group.sampler("one", "one", depth=1, new=5000)
    group.run(60.0)
    got = parts(group.used())
    assert got["trainer"] == pytest.approx(got["many"], rel=0.1)
    assert got["one"] <= 0.05


def test_many_rows_do_not_ride_on_rows_that_join() -> None:
    """Short samples of many owners come all the time, and each is needy when it joins."""
    group = clients()
    group.trainer("t", "trainer", (50,) * 12, depth=2)
    group.sampler("many", "many", depth=40, new=60)
    for owner in range(12):
        group.sampler(f"short{owner}", f"short{owner}", depth=1, new=1)
    group.run(60.0)
    got = parts(group.used())
    assert got["trainer"] == pytest.approx(got["many"], rel=0.1)
    short = group.driver.state.statistics().accounts["owner", "short0"]
    quantum = group.driver.config.quantum_seconds
    assert short.wait_seconds / short.requests <= 1.5 * quantum


def test_an_owner_that_comes_back_gains_nothing_by_its_absence() -> None:
    group = clients()
    group.trainer("a", "a", (100,), depth=8)
    group.run(30.0)
    before = group.used()["a"]
    group.trainer("b", "b", (100,), depth=8)
    group.run(10.0)
    used = group.used()
    assert used["b"] == pytest.approx(used["a"] - before, rel=0.1)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.5, 1.0, 4.0]),  # weight
            st.sampled_from([20, 90, 300]),  # tokens of an atom: the last is longer than a quantum
            st.integers(1, 12),  # atoms
            st.booleans(),  # trains, or samples
        ),
        min_size=1,
        max_size=10,
    ),
    st.floats(0.0, 1.0),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_first_service_comes_within_the_bound(
    owners: list[tuple[float, int, int, bool]], moment: float, newcomer_trains: bool
) -> None:
    """The running pass, and one pass of each other owner with work, each at most a quantum or
    its longest atom: whatever the weights, since one that arrives owes nothing. Before each of
    them, and before its own, a quantum and a pass may go to those that end what they are at."""
    quantum = 0.1
    group = clients(
        {f"o{i}": weight for i, (weight, *_) in enumerate(owners)}, quantum_seconds=quantum
    )
    for index, (_, tokens, atoms, trains) in enumerate(owners):
        if trains:
            group.trainer(f"l{index}", f"o{index}", (tokens,) * atoms, depth=2)
        else:
            group.sampler(f"l{index}", f"o{index}", depth=atoms, prompt=tokens, new=60)
    group.run(8.0 + moment)
    driver, came = group.driver, group.driver.now
    if newcomer_trains:
        driver.open("late")
        driver.submit(item("late", 1, owner="late"))
    else:
        driver.submit(sample("late", 1, owner="late"))
    while driver.state.queues.requests[RequestId("late:1")].started is None:
        group.run(1e-9)
    turn = max(quantum, 0.3) + 0.02  # the longest atom's seconds, and what a pass costs beside
    assert driver.now - came <= (len(owners) + 1) * (2 * turn + quantum)


def test_an_owner_gets_its_part_of_the_memory_back() -> None:
    driver = Driver(engine=Engine(capacity(blocks=40, rows=64)))
    driver.ready()
    driver.submit(sample("greedy", 0, rows=20, prompt=10, new=280))  # two fit
    driver.drain(until=0.1)
    driver.submit(sample("late", 0, prompt=10, new=100))
    driver.drain(until=driver.now + 0.3)
    assert driver.state.residency.blocks["owner-late"] == 7
    assert driver.state.statistics().rows_preempted == 1
    assert driver.state.why_waiting(RequestId("late:0"), driver.now) == "running"
    driver.drain()
    assert sorted(driver.resolved()) == ["greedy:0", "late:0"]


def test_rows_that_outgrow_their_expectation_make_room_for_the_oldest() -> None:
    lengths = iter([4] * 40 + [150] * 20)
    driver = Driver(engine=Engine(capacity(blocks=12, rows=8), length=lambda _: next(lengths)))
    driver.ready()
    driver.submit(*(sample("s", seq, prompt=10, new=150) for seq in range(40)))
    driver.drain()
    driver.submit(*(sample("s", seq, prompt=10, new=150) for seq in range(40, 60)))
    driver.drain()
    decodes = [order for order in driver.orders if isinstance(order, ev.StartDecode)]
    joined = [order for order in decodes if any(r >= "s:40" for r, _ in order.admit)]
    assert len(joined[0].admit) > 1  # ten blocks each: by their limit, one would fit
    assert any(order.preempt for order in decodes)
    assert len(driver.resolved()) == 60


@pytest.mark.parametrize("kind", ["train", "sample"])
def test_decision_time_hardly_grows_with_lanes(kind: str) -> None:
    few, many = (_decision_seconds(kind, lanes) for lanes in (100, 10_000))
    assert many <= 3.0 * few


def _decision_seconds(kind: str, lanes: int) -> float:
    """The lower quartile over passes of the time to settle one and to start the next."""
    driver = clients().driver
    endless = (1000,) * 1000
    for index in range(lanes):
        lane, owner = f"l{index}", f"o{index % (lanes // 2)}"
        if kind == "train":
            driver.open(lane)
            driver.submit(item(lane, 1, owner=owner, atoms=endless))
        else:
            driver.submit(sample(lane, 1, owner=owner, rows=1000, new=5))
    times = []
    for _ in range(50):
        done, driver.running = driver.running, None
        assert done is not None
        began = time.perf_counter()
        decisions = driver.state.handle(done, driver.now)
        times.append(time.perf_counter() - began)
        for decision in decisions:
            driver._obey(decision)
    return statistics.quantiles(times, n=4)[0]
