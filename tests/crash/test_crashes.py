"""`kill -9` at the worst moments, and training that goes on: the loop is the unmodified SDK's, the
servers are real processes, and what comes of it equals an undisturbed run to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.crash_stage import Kill, Stage, compare, equal

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts on Linux's signals")

STEPS = 10
KILLS = [
    Kill("after sampler row", 1),
    Kill("before fsync", 6),
    Kill("after train", 2),
    Kill("after optim", 2),
    Kill("before outcome", 4),
    Kill("after fsync", 8),
    Kill("before manifest", 1),
    Kill("after publish", 1),
    Kill("before revive", 1),
    Kill("after row", 1),
    Kill("before replay", 2),
    Kill("after snapshot record", 1),
    Kill("after answer", 9),
    Kill(seconds=0.4),
]


@pytest.mark.slow
def test_the_loop_goes_on_and_its_numbers_are_those_of_a_quiet_day(tmp_path: Path) -> None:
    calm, storm = Stage(tmp_path / "calm"), Stage(tmp_path / "storm")
    expected = calm.undisturbed(STEPS, seconds=60)
    results = storm.survive(KILLS, STEPS, seconds=240)
    assert storm.deaths > 10
    assert len(results) == 2, "each in the other's company"
    for result in results:
        compare(expected, result)
        assert equal(storm.weights(result), calm.weights(expected))
