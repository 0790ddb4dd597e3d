"""What every contender of `sampling.py` samples: plain token ids, nothing of this project."""

from __future__ import annotations

import numpy as np

# Of one job: prompts, and samples of each.
SHAPES = {"8 of one": (1, 8), "4 x 4": (4, 4), "64 singles": (64, 1)}


def draw_prompts(shape: str, jobs: int, vocab: int, length: int) -> list[list[np.ndarray]]:
    """int32 [length] for each prompt of each job. Two thirds are common to all of a job's."""
    prompts, _ = SHAPES[shape]
    rng = np.random.default_rng(0)

    def draw(count: int) -> np.ndarray:
        return rng.integers(3, vocab, count).astype(np.int32)

    found = []
    for _ in range(jobs):
        common = draw(length * 2 // 3)
        found.append([np.concatenate([common, draw(length - len(common))]) for _ in range(prompts)])
    return found
