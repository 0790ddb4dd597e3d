"""Histograms count each value once; the hour's slices add up to the measured time."""

import random

import pytest

from openrl.scheduler.core.tallies import HOUR, SLICE_SECONDS, Tallies, Tally


def test_a_value_counts_in_the_first_bucket_that_holds_it() -> None:
    tally = Tally((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        tally.add(value)
    assert tally.counts == [2, 1, 1, 1]  # at most 1, 2, 4, and above
    assert tally.total == 16.0


def test_the_slices_hold_the_seconds_where_they_fell() -> None:
    tallies = Tallies()
    tallies.worked("train", 8.0, 14.0, 100)  # to 22: two seconds, ten, two
    tallies.worked("sample", 23.0, 1.0, 7)
    assert [(one.start, one.busy, one.tokens) for one in tallies.hour] == [
        (0.0, {"train": 2.0}, 0),
        (10.0, {"train": 10.0}, 0),
        (20.0, {"train": 2.0, "sample": 1.0}, 107),
    ]


def test_an_hour_of_passes_adds_up_and_no_more_is_kept() -> None:
    tallies, at, draw = Tallies(), 0.0, random.Random(3)
    for _ in range(30_000):
        seconds = draw.uniform(0.0, 0.3)
        tallies.worked("train", at, seconds, 1)
        at += seconds + draw.uniform(0.0, 0.05)
    assert len(tallies.hour) == HOUR // SLICE_SECONDS + 1
    for one in list(tallies.hour)[:-1]:
        assert 0.0 < one.busy["train"] <= SLICE_SECONDS + 1e-6
    assert tallies.passes["train"].seconds.total == pytest.approx(0.15 * 30_000, rel=0.02)
