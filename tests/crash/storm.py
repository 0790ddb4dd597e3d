"""A hundred deaths: at random moments, then at each of the chosen points.

    python tests/crash/storm.py [--engine fake|torch] [--kills 100] [--steps 400] [--jobs 2]

Prints how it went; exits with an AssertionError at the first number that differs from those of
an undisturbed run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.crash_server import PASSES, POINTS
from support.crash_stage import Kill, Stage, at_random, compare, equal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="fake", choices=["fake", "torch"])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--jobs", type=int, default=2, help="loops side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=1.0, help="seconds between two kills")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        calm, storm = (Stage(Path(root) / name, given.engine) for name in ("calm", "storm"))
        expected = calm.undisturbed(given.steps, seconds=1800)
        kills = [
            *chosen(given.engine, given.longest),
            *at_random(given.seed, given.kills, given.longest),
        ]
        results = storm.survive(kills, given.steps, seconds=60 + 30 * len(kills), jobs=given.jobs)
        for result in results:
            compare(expected, result)
            assert equal(storm.weights(result), calm.weights(expected)), "the weights differ"
        print(f"{storm.deaths} deaths in {given.steps} steps, and every bit is the same")
        print(f"the door was open within {max(storm.starts):.1f} s")
        assert storm.deaths >= given.kills, "the loop ended before all kills: give more --steps"


def chosen(engine: str, longest: float) -> list[Kill]:
    """Some points are not reached a second time: then the kill comes from outside. Passes of the
    torch engine run in another process, where nobody counts them."""
    names = [*POINTS, *(PASSES if engine == "fake" else ())]
    return [
        Kill(f"{when} {name}", 1 + place % 3, longest)
        for name in names
        for place, when in enumerate(("before", "after"))
    ]


if __name__ == "__main__":
    main()
