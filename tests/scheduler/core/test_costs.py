from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.scheduler.core.costs import CostModel


@pytest.mark.parametrize("scale", [0.001, 0.1, 1.0, 30.0])
def test_a_wrong_guess_is_mended_within_some_passes(scale: float) -> None:
    """The engine's true cost is linear; passes vary in size."""
    flip = random.Random(0)
    model = CostModel((0.01, 2e-4, 1e-3))
    true = (0.02 * scale, 5e-5 * scale, 3e-3 * scale)
    for _ in range(60):
        features = (1.0, float(flip.randint(100, 4000)), float(flip.randint(1, 8)))
        model.learn(features, sum(t * x for t, x in zip(true, features, strict=True)))
    features = (1.0, 2000.0, 4.0)
    seconds = sum(t * x for t, x in zip(true, features, strict=True))
    assert model.estimate(features) == pytest.approx(seconds, rel=0.3)


def test_one_slow_pass_is_not_taken_at_its_word() -> None:
    model = CostModel((0.01, 1e-4))
    before = model.estimate((1.0, 1000.0))
    model.learn((1.0, 1000.0), 100 * before)
    assert model.estimate((1.0, 1000.0)) < 3 * before


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e4)), min_size=1, max_size=8),
    st.floats(0, 10),
)
@settings(max_examples=100, deadline=None)
def test_the_parts_are_the_whole_and_never_negative(
    participants: list[tuple[float, float]], seconds: float
) -> None:
    model = CostModel((0.01, 1e-4))
    model.learn((1.0, 500.0), 0.0)  # weights may fall to nothing
    parts = model.split(participants, seconds)
    assert sum(parts) == pytest.approx(seconds)
    assert min(parts) >= 0.0


def test_parts_follow_what_each_brought() -> None:
    model = CostModel((0.0, 1e-3))
    assert model.split([(0.5, 100.0), (0.5, 300.0)], 2.0) == pytest.approx([0.5, 1.5])
