from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from utilization_ideal import ORDERS, Costs, Done, Loop, Simulation, fit, ideal, non_negative
from utilization_timeline import Pass

COSTS = Costs((0.0, 0.01, 0.001, 0.0), (0.1, 0.001, 0.0), (0.02,) * 2, (0.05,))


def loop(think: float, latency: float = 0.0) -> Loop:
    return Loop(itertools.repeat(think), [(20, 10)], [200], 16, latency)


def engine_seconds() -> float:
    """Of a step of one loop, by hand: the sampler; 16 steps of the longer and 10 of the shorter
    row, then the longer one's last 4; the training; the update."""
    slices = 16 * 0.01 + 26 * 0.001 + 4 * 0.01 + 4 * 0.001
    return 0.05 + slices + 0.1 + 200 * 0.001 + 2 * 0.02


@pytest.mark.parametrize("order", ORDERS)
def test_one_loop_takes_what_its_passes_and_thoughts_take(order: tuple[str, ...]) -> None:
    step = engine_seconds() + 0.7 + 3 * 0.01
    done = Simulation([loop(0.7, 0.01)], COSTS, order).run(200.0)
    assert done.steps == pytest.approx(done.wall / step, abs=1)
    assert done.busy == pytest.approx(done.steps * engine_seconds(), rel=0.02)
    assert done.trained == pytest.approx(200 * done.steps, abs=200)
    assert done.sampled == pytest.approx(30 * done.steps, abs=30)


def test_loops_that_leave_the_engine_alone_do_not_slow_each_other() -> None:
    one, two = (Simulation([loop(50.0) for _ in range(n)], COSTS, ()).run(2000) for n in (1, 2))
    assert two.steps == pytest.approx(2 * one.steps, abs=4)


def test_fused_work_is_cheaper_and_a_full_engine_is_always_busy() -> None:
    one, six = (Simulation([loop(0.0) for _ in range(n)], COSTS, ()).run(100) for n in (1, 6))
    assert six.busy == pytest.approx(six.wall)
    assert six.steps > 1.5 * one.steps


def test_the_best_order_is_taken() -> None:
    def worth(done: Done) -> float:
        return done.steps / done.wall

    best = ideal(lambda: [loop(0.3) for _ in range(3)], COSTS, worth, seconds=50.0)
    each = [Simulation([loop(0.3) for _ in range(3)], COSTS, o).run(50.0) for o in ORDERS]
    assert worth(best) == max(map(worth, each))


def test_costs_are_found_again() -> None:
    passes = []
    for rows, steps in itertools.product((1, 4, 9), (2, 8, 16)):
        seconds = COSTS.of("sample", steps, rows * steps, 8 * rows)
        tokens = rows * (steps + 8)
        passes.append(Pass("sample", 0, 1, seconds, tokens, prefilled=8 * rows, rows=rows))
    for tokens, lanes in itertools.product((100, 400, 900), (1, 2, 3)):
        passes.append(Pass("train", 0, 1, COSTS.of("train", tokens, lanes), tokens, lanes=lanes))
    passes += [Pass("optim", 0, 1, COSTS.of("optim", n), 0, lanes=n) for n in (1, 2, 4)]
    passes += [Pass("control", 0, 1, 0.05, 0)] * 3
    found = fit(passes)
    for kind in ("sample", "train", "optim", "control"):
        assert getattr(found, kind) == pytest.approx(getattr(COSTS, kind), abs=1e-9)


def test_no_weight_is_negative() -> None:
    rows = [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)]
    assert non_negative(rows, [3.0, 2.0, 1.0], 2) == pytest.approx((2.0, 0.0))
    assert non_negative([], [], 2) == (0.0, 0.0)
