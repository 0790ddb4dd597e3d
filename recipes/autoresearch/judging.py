"""The locked part: scores of a checkpoint on questions that no experiment has seen, and whether one
is better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np
import tinker
from transformers import PreTrainedTokenizerBase

from recipes.autoresearch.study import Study
from recipes.kit.chat import prompt_tokens
from recipes.kit.groups import sample_groups

SPLITS = {"search": 64, "validation": 192, "test": 384}
"""Questions of each. Search steers, validation decides, the test is used once."""
SAMPLES = 4
PERMUTATIONS = 20_000


async def scores(
    service: tinker.ServiceClient,
    tokenizer: PreTrainedTokenizerBase,
    study: Study,
    path: str,
    split: str,
    salt: str,
) -> list[float]:
    """The mean score of each question's samples at temperature 1, with the same seeds for all."""
    asked = list(islice(study.questions(f"{salt}:{split}"), SPLITS[split]))
    sampler = await service.create_sampling_client(model_path=path)
    groups = await sample_groups(
        sampler,
        tokenizer,
        [prompt_tokens(tokenizer, each.messages) for each in asked],
        lambda i, text: study.reward(asked[i], text),
        samples=SAMPLES,
        max_tokens=study.max_tokens,
        seed=1_000_003,
    )
    return [sum(answer.reward for answer in group) / len(group) for group in groups]


def p_value(candidate: Sequence[float], incumbent: Sequence[float]) -> float:
    """How often differences as large would come from signs thrown by a coin: a one-sided paired
    permutation test, exact but for the number of throws."""
    differences = np.subtract(candidate, incumbent)
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], size=(PERMUTATIONS, len(differences)))
    thrown = signs @ differences
    # The throw that was really made counts as one of them.
    return float((1 + np.sum(thrown >= differences.sum() - 1e-12)) / (1 + PERMUTATIONS))


def bar(alpha: float, number: int) -> float:
    """What the p-value of judgement `number` (from 1) may be at most: α 6/(π² number²), which sums
    to α over all judgements that there can be. So the chance that any experiment that is no better
    is ever kept is at most α, however long research goes on."""
    return alpha * 6 / (math.pi**2 * number**2)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Of the mean, by the bootstrap over questions."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.asarray(values), size=(4_000, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
