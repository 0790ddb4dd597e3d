"""Curves are bounded, keep their beginning, and are read on from a number."""

from openrl.scheduler.curves import ALL_POINTS, METRICS, MODELS, POINTS, Curves


def test_points_are_numbered_over_all_models_and_read_on() -> None:
    curves = Curves()
    curves.add("a", "alice", 1.0, {"loss": 3.0})
    curves.add("b", "bob", 2.0, {"loss": 2.0})
    curves.stepped("a", 7)
    curves.add("a", "alice", 3.0, {"loss": 1.0})
    curves.add("a", "alice", 4.0, {"reward": 1.0}, step=0.5)
    assert [(p.number, p.model_id, p.step) for p in curves.after(1)] == [
        (2, "b", 0),
        (3, "a", 7),
        (4, "a", 0.5),
    ]
    assert curves.after(4) == []


def test_a_long_curve_thins_out_and_keeps_its_ends() -> None:
    curves = Curves()
    for number in range(5 * POINTS):
        curves.add("a", "alice", float(number), {"loss": float(number)})
    kept = [point.at for point in curves.of("a")]
    assert len(kept) <= POINTS
    assert kept[0] == 0.0
    assert kept[-100:] == [float(n) for n in range(5 * POINTS - 100, 5 * POINTS)]
    assert kept == sorted(set(kept))


def test_the_model_that_was_silent_for_longest_goes() -> None:
    curves = Curves()
    for number in range(MODELS):
        curves.add(str(number), "alice", 0.0, {"loss": 0.0})
    curves.add("0", "alice", 1.0, {"loss": 1.0})
    curves.add("one more", "alice", 1.0, {"loss": 1.0})
    assert curves.of("1") == []
    assert len(curves.of("0")) == 2
    curves.add("0", "alice", 2.0, {str(n): 0.0 for n in range(METRICS + 5)})
    assert len(curves.of("0")[-1].values) == METRICS


def test_many_long_curves_share_what_there_is() -> None:
    """Those that are silent thin out too, and keep their ends."""
    curves = Curves()
    for model in range(2 * ALL_POINTS // POINTS):
        for number in range(POINTS):
            curves.add(str(model), "alice", float(number), {"loss": float(number)})
    kept = [curves.of(str(model)) for model in range(2 * ALL_POINTS // POINTS)]
    assert ALL_POINTS / 4 < sum(map(len, kept)) <= ALL_POINTS
    assert {points[0].at for points in kept} == {0.0}
    assert {points[-1].at for points in kept} == {POINTS - 1.0}
