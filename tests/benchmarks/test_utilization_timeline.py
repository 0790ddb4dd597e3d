from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from utilization_timeline import Pass, figures, goodput, quantile


def test_what_lies_partly_in_the_window_counts_in_part() -> None:
    passes = [
        Pass("train", 0.0, 2.0, 1.8, 200, lanes=2, waits=(0.5,)),
        Pass("sample", 2.0, 3.0, 1.0, 30, prefilled=10, rows=4, lanes=3, waits=(0.1, 0.3)),
        Pass("sample", 9.0, 10.0, 1.0, 30, waits=(7.0,)),
    ]
    seen = figures(passes, 1.0, 5.0)
    assert seen.busy == pytest.approx(0.9 + 1.0)
    assert seen.busy_fraction == pytest.approx(1.9 / 4)
    assert seen.between == pytest.approx(0.1)  # half of what the first was on its way
    assert (seen.trained, seen.sampled) == (100.0, 20.0)
    assert seen.tokens_per_busy_second == pytest.approx(120 / 1.9)
    assert seen.passes == {"sample": 1, "train": 1}
    assert seen.jobs == {"sample": pytest.approx(3.0), "train": pytest.approx(2.0)}
    assert (seen.wait_p50, seen.wait_p95) == (0.1, 0.3)  # of what was first served in it


def test_company_is_weighed_by_engine_time() -> None:
    passes = [Pass("sample", 0, 3, 3.0, 1, lanes=1), Pass("sample", 3, 4, 1.0, 1, lanes=5)]
    assert figures(passes, 0.0, 4.0).jobs["sample"] == pytest.approx(2.0)


def test_nothing_happened() -> None:
    seen = figures([], 0.0, 2.0)
    assert (seen.busy, seen.wait_p95, seen.tokens_per_busy_second) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("part", "value"), [(0.0, 1.0), (0.5, 2.0), (0.51, 3.0), (0.95, 4.0), (1.0, 4.0)]
)
def test_quantiles(part: float, value: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], part) == value


def test_an_engine_that_always_works_as_for_one_job_has_goodput_one() -> None:
    assert goodput(500, 2000, 2.0, (500.0, 1000.0)) == 1.5
    assert goodput(500, 2000, 2.0, (500.0, 2000.0)) == 1.0
