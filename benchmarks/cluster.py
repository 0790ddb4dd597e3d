"""Placement in a large cluster, by simulation of the pure core: how evenly homes that know of each
other by reports alone spread models, while nodes fail.

    python benchmarks/cluster.py --nodes 1000 --models 20000

Every home places by its own reports, which are up to `--refresh` seconds old. One node in a hundred
is away at any time, others every ten seconds. Nothing runs and nothing is sent: what it says is
how full the fullest node is against the mean, how often a model went to a node that had just failed
(its client is told 503 and asks again), and what a decision costs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter

from openrl.cluster.members import Members
from openrl.cluster.placement import Report

HOMES = 8
"""That place. All of a thousand would each keep a thousand reports; what is judged is a few homes
that don't see each other's newest placements."""
AWAY_SECONDS = 6.0
TURN_SECONDS = 10.0


def simulate(nodes: int, models: int, per_second: float, refresh: float, seed: int) -> dict:
    dice = random.Random(seed)
    names = [f"n{i}" for i in range(nodes)]
    alive: Counter[str] = Counter()
    homes = [Members(name, AWAY_SECONDS, -AWAY_SECONDS) for name in names[:HOMES]]
    away: set[str] = set()
    misplaced, spent, next_round, next_turn = 0, 0.0, 0.0, TURN_SECONDS
    for number in range(models):
        now = number / per_second
        if now >= next_turn:
            away = set(dice.sample(names[HOMES:], max(1, nodes // 100)))
            next_turn += TURN_SECONDS
        if now >= next_round:
            for home in homes:
                for name in names:
                    if name not in away:
                        home.heard(Report(name, name, ("m",), ("m",), alive[name]), now)
            next_round = now + refresh
        home = dice.choice(homes)
        began = time.perf_counter()
        node = home.place("m", f"s:train:{number}", now)
        spent += time.perf_counter() - began
        if node in away:
            misplaced += 1
        else:
            alive[node] += 1
    counts = [alive[name] for name in names]
    return {
        "nodes": nodes,
        "models": models,
        "fullest": max(counts),
        "mean": round(sum(counts) / nodes, 2),
        "emptiest": min(counts),
        "sent_to_a_node_that_had_failed": misplaced,
        "milliseconds_per_decision": round(1e3 * spent / models, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--models", type=int, default=20_000)
    parser.add_argument("--per-second", type=float, default=200.0)
    parser.add_argument("--refresh", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(json.dumps(simulate(**vars(given)), indent=2))


if __name__ == "__main__":
    main()
