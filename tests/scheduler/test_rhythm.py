"""When a snapshot is due: replay stays within its budget, and snapshots stay cheap."""

from openrl.scheduler.rhythm import Rhythm
from openrl.types import ModelId

A, B = ModelId("a"), ModelId("b")
PLENTY = 1 << 40


def test_one_model_alone_may_owe_half_the_budget() -> None:
    rhythm = Rhythm(60.0, PLENTY)
    rhythm.worked(A, 29.9)
    assert not rhythm.due(A, 0)
    rhythm.worked(A, 0.2)
    assert rhythm.due(A, 0)


def test_all_debts_together_stay_within_the_budget() -> None:
    """Many models that work in turn, each given its snapshot as soon as it is due."""
    rhythm, models = Rhythm(60.0, PLENTY), [ModelId(str(n)) for n in range(20)]
    debts = dict.fromkeys(models, 0.0)
    for turn in range(2000):
        model = models[turn % 20 if turn % 3 else 0]
        rhythm.worked(model, 0.3)
        debts[model] += 0.3
        if rhythm.due(model, 0):
            rhythm.taken(model, 0.001)
            rhythm.counted(model)
            debts[model] = 0.0
        assert sum(debts.values()) <= 60.0


def test_snapshots_take_at_most_a_twentieth() -> None:
    rhythm = Rhythm(1.0, PLENTY)
    spent = worked = 0.0
    for _ in range(500):
        rhythm.worked(A, 0.5)
        worked += 0.5
        if rhythm.due(A, 0):
            rhythm.taken(A, 2.0)
            rhythm.counted(A)
            spent += 2.0
    assert 0 < spent <= worked / 20 + 2.0


def test_what_is_done_while_a_snapshot_is_written_is_owed_still() -> None:
    rhythm = Rhythm(60.0, PLENTY)
    rhythm.worked(A, 40.0)
    rhythm.taken(A, 0.1)
    assert rhythm.in_debt() == ()
    rhythm.worked(A, 31.0)
    assert not rhythm.due(A, 0), "one at a time"
    assert rhythm.in_debt() == (A,)
    rhythm.counted(A)
    assert rhythm.due(A, 0)


def test_one_that_failed_is_not_tried_again_at_each_step() -> None:
    rhythm = Rhythm(60.0, PLENTY)
    rhythm.worked(A, 40.0)
    rhythm.taken(A, 0.1)
    rhythm.failed(A)
    rhythm.worked(A, 19.0)
    assert not rhythm.due(A, 0)
    rhythm.worked(A, 2.0)
    assert rhythm.due(A, 0)


def test_bytes_press_too_and_then_even_a_gradient_is_written() -> None:
    rhythm = Rhythm(60.0, 1000)
    rhythm.worked(A, 0.1)
    rhythm.worked(B, 0.1)
    assert not rhythm.due(A, 249)
    assert rhythm.due(A, 250)
    assert not rhythm.due(A, 499, with_gradient=True)
    assert rhythm.due(A, 500, with_gradient=True)


def test_a_model_that_has_ended_owes_nothing() -> None:
    rhythm = Rhythm(60.0, PLENTY)
    rhythm.worked(A, 100.0)
    rhythm.forget(A)
    assert not rhythm.due(A, 0)
    assert rhythm.in_debt() == ()
