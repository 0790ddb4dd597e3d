from collections import Counter

import pytest

from openrl.cluster.members import Members
from openrl.cluster.placement import Report, choose
from openrl.errors import NotFound, Unavailable


def report(node: str, *bases: str, models: int = 0, **more: bool) -> Report:
    return Report(node, f"http://{node}:8000", bases or ("m",), bases or ("m",), models, **more)


def members(*reports: Report, now: float = 0.0) -> Members:
    made = Members("a", away_seconds=5.0, now=-100.0)
    for each in (report("a"), *reports):
        made.heard(each, now)
    return made


def test_models_go_to_the_node_with_most_room_that_serves_the_base() -> None:
    nodes = [report("a", "m", models=2), report("b", "m", models=1), report("c", "other")]
    assert choose(nodes, "m", "x") == "b"
    assert choose(nodes, "other", "x") == "c"


def test_weights_that_are_there_come_first() -> None:
    loading = Report("a", "", ("m",))
    assert choose([loading, report("b", "m", models=9)], "m", "x") == "b"
    assert choose([loading], "m", "x") == "a"


def test_a_draining_node_takes_nothing_new() -> None:
    draining = report("a", draining=True)
    assert choose([draining, report("b", models=9)], "m", "x") == "b"
    with pytest.raises(Unavailable):
        choose([draining], "m", "x")


def test_equals_share_names_evenly() -> None:
    nodes = [report(name) for name in "abcd"]
    drawn = Counter(choose(nodes, "m", f"s:train:{i}") for i in range(4000))
    assert all(800 < count < 1200 for count in drawn.values()), drawn


def test_a_burst_between_two_reports_is_spread() -> None:
    cluster = members(report("b"), report("c"))
    placed = Counter(cluster.place("m", f"x{i}", now=0.0) for i in range(30))
    assert placed == {"a": 10, "b": 10, "c": 10}


def test_a_silent_node_is_away_until_it_speaks() -> None:
    cluster = members(report("b"))
    assert cluster.address("b", 4.9) == "http://b:8000"
    assert cluster.address("b", 5.0) is None
    assert cluster.away(5.0) == {"b"}
    assert cluster.others(5.0) == ()
    cluster.heard(report("b"), 9.0)
    assert cluster.others(9.0) == ("b",)
    cluster.lost("b")
    assert cluster.address("b", 9.0) is None


def test_what_an_absent_node_serves_is_not_unknown() -> None:
    cluster = members(report("b", "rare"))
    assert cluster.place("rare", "x", now=1.0) == "b"
    with pytest.raises(Unavailable, match="'b', which is away"):
        cluster.place("rare", "y", now=50.0)
    with pytest.raises(NotFound):
        cluster.place("nobody's", "z", now=50.0)


def test_at_the_start_nothing_is_unknown() -> None:
    cluster = Members("a", away_seconds=5.0, now=0.0)
    cluster.heard(report("a"), 0.0)
    with pytest.raises(Unavailable):
        cluster.place("other", "x", now=1.0)


def test_a_favourite_takes_it_if_it_can() -> None:
    cluster = members(report("b", models=0))
    cluster.heard(report("a", models=7), 0.0)
    assert cluster.place("m", "x", 0.0, favourite="a") == "a"
    assert cluster.place("m", "x", 0.0, favourite="c") == "b"
