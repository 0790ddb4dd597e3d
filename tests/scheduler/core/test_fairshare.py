"""Against the definition of start-time fair queueing, written out, and as long-run shares."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.engines.base import WeightsKey
from openrl.scheduler.core import fairshare
from openrl.scheduler.core.fairshare import Share
from openrl.scheduler.core.packing import Group

TRAIN: Group = (WeightsKey("base"), "train")
OPTIM: Group = (WeightsKey("base"), "optim")


def leaf(
    root: Share, owner: str, session: str = "s", lane: str = "l", weight: float = 1.0
) -> Share:
    return root.child(owner, weight).child(session).child(lane)


def serve(root: Share, seconds: float, group: Group = TRAIN) -> str:
    chosen = fairshare.first(root, group)
    assert chosen is not None
    fairshare.serve(chosen)
    fairshare.charge(chosen, seconds)
    return chosen.owner.name


def run(root: Share, rounds: int, cost: dict[str, float]) -> dict[str, float]:
    served = dict.fromkeys(cost, 0.0)
    for _ in range(rounds):
        chosen = fairshare.first(root, TRAIN)
        assert chosen is not None
        name = chosen.owner.name
        serve(root, cost[name])
        served[name] += cost[name]
    return served


@given(st.lists(st.tuples(st.floats(0.5, 8.0), st.floats(0.01, 2.0)), min_size=2, max_size=6))
@settings(max_examples=25, deadline=None)
def test_shares_converge_to_the_weights_whatever_the_costs(
    owners: list[tuple[float, float]],
) -> None:
    root = Share("", None)
    for index, (weight, _) in enumerate(owners):
        fairshare.ready(leaf(root, str(index), weight=weight), TRAIN)
    costs = {str(index): cost for index, (_, cost) in enumerate(owners)}
    longest = max(costs.values())
    served = run(root, 2000, costs)
    for first, (weight, _) in enumerate(owners):
        for second, (other, _) in enumerate(owners):
            # The bound of the paper for two flows that always have work.
            lag = served[str(first)] / weight - served[str(second)] / other
            assert abs(lag) <= longest / weight + longest / other + 1e-6


def test_sessions_share_within_their_owner_and_lanes_within_their_session() -> None:
    root = Share("", None)
    alone = leaf(root, "alone")
    many = [leaf(root, "many", session, lane) for session in "ab" for lane in "xy"]
    single = leaf(root, "many", "c", "z")
    for one in (alone, *many, single):
        fairshare.ready(one, TRAIN)
    served = dict.fromkeys((alone, *many, single), 0)
    for _ in range(1200):
        chosen = fairshare.first(root, TRAIN)
        assert chosen is not None
        served[chosen] += 1
        serve(root, 0.1)
    assert served[alone] == pytest.approx(600, abs=2)
    assert served[single] == pytest.approx(200, abs=2)
    assert all(served[one] == pytest.approx(100, abs=2) for one in many)


def test_an_idle_owner_gains_no_credit() -> None:
    root = Share("", None)
    busy, idle = leaf(root, "busy"), leaf(root, "idle")
    fairshare.ready(busy, TRAIN)
    fairshare.ready(idle, TRAIN)
    run(root, 2, {"busy": 1.0, "idle": 1.0})
    fairshare.unready(idle, TRAIN)
    run(root, 100, {"busy": 1.0})
    fairshare.ready(idle, TRAIN)
    served = run(root, 10, {"busy": 1.0, "idle": 1.0})
    assert served["busy"] == pytest.approx(5.0, abs=1.0)


def test_nor_does_it_lose_its_debt_by_going_idle() -> None:
    root = Share("", None)
    greedy, other = leaf(root, "greedy"), leaf(root, "other")
    fairshare.ready(greedy, TRAIN)
    fairshare.ready(other, TRAIN)
    serve(root, 10.0)  # greedy leads, being first
    fairshare.unready(greedy, TRAIN)
    fairshare.release(greedy)  # the lane closes; its owner is known as long as it owes
    greedy = leaf(root, "greedy")
    fairshare.ready(greedy, TRAIN)
    assert [serve(root, 1.0) for _ in range(10)] == ["other"] * 10


def test_estimates_are_settled_to_what_was_measured() -> None:
    root = Share("", None)
    one = leaf(root, "o", weight=2.0)
    fairshare.ready(one, TRAIN)
    serve(root, 5.0)
    fairshare.charge(one, 1.0 - 5.0)
    assert one.owner.tag == pytest.approx(0.5)


def test_a_leaf_is_found_in_its_group_alone() -> None:
    root = Share("", None)
    one, two = leaf(root, "a"), leaf(root, "b")
    fairshare.ready(one, TRAIN)
    fairshare.ready(two, OPTIM)
    assert fairshare.first(root, TRAIN) is one
    assert fairshare.first(root, OPTIM) is two
    fairshare.unready(one, TRAIN)
    assert fairshare.first(root, TRAIN) is None


def test_nodes_that_say_nothing_are_forgotten() -> None:
    root = Share("", None)
    flip = random.Random(0)
    for index in range(500):
        one = leaf(root, f"o{index}")
        fairshare.ready(one, TRAIN)
        serve(root, flip.random())
        fairshare.unready(one, TRAIN)
        fairshare.release(one)
    last = leaf(root, "last")
    fairshare.ready(last, TRAIN)
    serve(root, 1.0)
    serve(root, 1.0)
    assert set(root.children) == {"last"}
    assert not root.fading


def test_owners_ahead_are_counted_once() -> None:
    root = Share("", None)
    for index in range(4):
        fairshare.ready(leaf(root, str(index), "s", "x"), TRAIN)
        fairshare.ready(leaf(root, str(index), "s", "y"), OPTIM)
    assert fairshare.ahead(root, root.children["3"]) == 3
    assert fairshare.ahead(root, root.children["0"]) == 0
