"""A request that fails leaves no trace, and only it fails."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.torch_cases import KEY, add_job, gradient_of, piece, random_datum, run, succeeded
from torch.utils._python_dispatch import TorchDispatchMode

from openrl.engines.base import OptimPass, OptimPiece
from openrl.engines.pytorch.trainer import Trainer
from openrl.errors import InvalidDatum, NotFound, OutOfMemory, UserError
from openrl.types import AdamParams, Datum, Failed, LoraConfig, ModelId, RequestId


def _overflowing(rng) -> Datum:
    """exp(lp + 500) is infinite."""
    datum = random_datum(rng, 10, "importance_sampling")
    datum.loss_inputs["logprobs"][7] = -500
    datum.loss_inputs["advantages"][7] = 1
    return datum


def _good(rng, length=10) -> Datum:
    return random_datum(rng, length, "importance_sampling")


def _failure(outcome):
    assert isinstance(outcome, Failed), outcome
    return outcome.error


@pytest.fixture
def trainer(base_model):
    trainer = Trainer(base_model("qwen3"), "qwen3")
    for model in "ab":
        add_job(trainer, model, LoraConfig(rank=2, seed=1))
    return trainer


def test_a_loss_that_is_not_finite_names_its_datum(trainer):
    rng = np.random.default_rng(0)
    bad = piece("a", [_good(rng), _overflowing(rng)], "importance_sampling", start=4)
    good = piece("b", [_good(rng)], "importance_sampling")
    first, second = run(trainer, bad, good)
    error = _failure(first)
    assert isinstance(error, InvalidDatum)
    assert (error.index, error.field) == (5, "loss")
    assert trainer.job(ModelId("a")).gradient is None
    succeeded(second)
    assert trainer.job(ModelId("b")).gradient is not None


def test_gradients_of_earlier_requests_stay_as_they_were(trainer):
    rng = np.random.default_rng(1)
    run(trainer, piece("a", [_good(rng)], "importance_sampling", request="a:1"))
    before = gradient_of(trainer, "a").clone()
    (outcome,) = run(trainer, piece("a", [_overflowing(rng)], "importance_sampling", request="a:2"))
    _failure(outcome)
    assert torch.equal(gradient_of(trainer, "a"), before)
    run(trainer, piece("a", [_good(rng)], "importance_sampling", request="a:3"))
    assert not torch.equal(gradient_of(trainer, "a"), before)


@pytest.mark.parametrize("together", [True, False])
def test_a_failed_atom_drops_what_its_request_had_gathered(trainer, together):
    rng = np.random.default_rng(2)
    pieces = [
        piece("a", [_good(rng)], "importance_sampling", last=False),
        piece("a", [_overflowing(rng)], "importance_sampling", start=1, last=False),
    ]
    passes = [pieces] if together else [[one] for one in pieces]
    outcomes = [outcome for some in passes for outcome in run(trainer, *some)]
    succeeded(outcomes[0])
    assert _failure(outcomes[1]).index == 1
    job = trainer.job(ModelId("a"))
    assert job.gradient is None
    assert job.open_requests == 0


def test_later_atoms_of_a_failed_request_in_the_same_pass_fail_with_it(trainer):
    rng = np.random.default_rng(3)
    first, last = run(
        trainer,
        piece("a", [_overflowing(rng)], "importance_sampling", last=False),
        piece("a", [_good(rng)], "importance_sampling", start=1),
    )
    assert _failure(first) is _failure(last)
    assert trainer.job(ModelId("a")).gradient is None


def test_a_request_that_was_cut_short_leaves_nothing_behind(trainer):
    rng = np.random.default_rng(4)
    run(trainer, piece("a", [_good(rng)], "importance_sampling", request="a:1", last=False))
    assert trainer.job(ModelId("a")).open_requests == 1
    data = [_good(rng)]
    run(trainer, piece("a", data, "importance_sampling", request="a:2"))
    assert trainer.job(ModelId("a")).open_requests == 0
    after_cut = gradient_of(trainer, "a").clone()
    fresh = Trainer(trainer._base, "qwen3")
    add_job(fresh, "a", LoraConfig(rank=2, seed=1))
    run(fresh, piece("a", data, "importance_sampling", request="a:2"))
    assert torch.equal(after_cut, gradient_of(fresh, "a"))


def test_weights_that_are_not_finite_fail_their_own_request(trainer):
    rng = np.random.default_rng(5)
    trainer.job(ModelId("a")).adapter.weights.flat.fill_(float("nan"))
    first, second = run(trainer, *(piece(m, [_good(rng)], "importance_sampling") for m in "ab"))
    error = _failure(first)
    assert (error.index, error.field) == (0, "logprobs")
    succeeded(second)


def test_a_gradient_that_is_not_finite_fails_though_its_loss_is(trainer):
    """Slopes of 1e38 overflow on their way down; the loss itself stays finite."""
    datum = random_datum(np.random.default_rng(6), 6, "cross_entropy")
    datum.loss_inputs["weights"][:] = 3e37
    (outcome,) = run(trainer, piece("a", [datum]))
    assert "gradient" in _failure(outcome).message
    assert trainer.job(ModelId("a")).gradient is None


def test_a_model_that_is_not_there_fails_alone(trainer):
    rng = np.random.default_rng(7)
    first, second = run(
        trainer, *(piece(m, [_good(rng)], "importance_sampling") for m in ("nobody", "a"))
    )
    assert isinstance(_failure(first), NotFound)
    succeeded(second)
    step = OptimPiece(RequestId("nobody:1"), ModelId("nobody"), AdamParams())
    (outcome,) = trainer.optimize(OptimPass(KEY, (step,))).outcomes
    assert isinstance(_failure(outcome), NotFound)


def test_a_step_that_explodes_keeps_the_weights_and_drops_the_gradient(trainer):
    """Else every later step would fail with it."""
    rng = np.random.default_rng(7)
    datum = _good(rng)
    run(trainer, piece("a", [datum], "importance_sampling"))
    job = trainer.job(ModelId("a"))
    weights = job.adapter.weights.flat.clone()
    twin = trainer.job(ModelId("b")).adapter.weights.flat.copy_(weights)

    def step(model: str, learning_rate: float):
        order = OptimPiece(RequestId("o"), ModelId(model), AdamParams(learning_rate=learning_rate))
        return trainer.optimize(OptimPass(KEY, (order,))).outcomes[0]

    assert isinstance(_failure(step("a", 1e38)), UserError)
    assert torch.equal(job.adapter.weights.flat, weights)
    assert job.gradient is None
    assert job.version == 0
    for model in "ab":
        run(trainer, piece(model, [datum], "importance_sampling"))
        assert not isinstance(step(model, 1e-3), Failed)
    # It goes on as its twin, which never failed.
    assert torch.equal(job.adapter.weights.flat, twin)


class _MemoryFor(TorchDispatchMode):
    """A machine that has no room for hidden states [1, T, D] of more than `rows` rows."""

    def __init__(self, rows: int, error: Exception | None = None) -> None:
        super().__init__()
        self._rows = rows
        self._error = error or torch.OutOfMemoryError("out of memory")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.ndim == 3 and out.shape[1] > self._rows:
            raise self._error
        return out


def test_out_of_memory_runs_fewer_atoms_and_names_the_one_that_never_fits(trainer):
    rng = np.random.default_rng(9)
    sizes = (20, 30, 70, 25)
    pieces = [
        piece(
            model,
            [random_datum(rng, n, "cross_entropy")],
            request=f"{model}:{number}",
        )
        for number, (model, n) in enumerate(zip("abba", sizes, strict=True))
    ]
    expected = Trainer(trainer._base, "qwen3")
    for model in "ab":
        add_job(expected, model, LoraConfig(rank=2, seed=1))
    run(expected, *(p for p, n in zip(pieces, sizes, strict=True) if n < 70))
    with _MemoryFor(rows=50):
        outcomes = run(trainer, *pieces)
    for outcome, size in zip(outcomes, sizes, strict=True):
        if size < 70:
            succeeded(outcome)
    error = _failure(outcomes[2])
    assert isinstance(error, OutOfMemory)
    assert "70 tokens" in error.message
    for model in "ab":
        assert torch.equal(gradient_of(trainer, model), gradient_of(expected, model))


class _NoRoomOnceFor(TorchDispatchMode):
    """The first time that a mask of so many elements is wanted, there is no memory for it."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements
        self.happened = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        mask = isinstance(out, torch.Tensor) and out.dtype == torch.bool
        if not self.happened and mask and out.numel() == self._elements:
            self.happened = True
            raise torch.OutOfMemoryError("out of memory")
        return out


def test_atoms_that_are_run_again_count_once(trainer):
    """Memory ends when the first atom is known to be good and the second is being judged."""
    rng = np.random.default_rng(10)
    good = piece("a", [_good(rng)], "importance_sampling")
    steep = random_datum(rng, 6, "cross_entropy")
    steep.loss_inputs["weights"][:] = 3e37
    expected = Trainer(trainer._base, "qwen3")
    add_job(expected, "a", LoraConfig(rank=2, seed=1))
    run(expected, good)
    elements = trainer.job(ModelId("b")).adapter.weights.flat.numel()
    with _NoRoomOnceFor(elements) as memory:
        first, second = run(trainer, good, piece("b", [steep]))
    assert memory.happened
    succeeded(first)
    assert "gradient" in _failure(second).message
    assert torch.equal(gradient_of(trainer, "a"), gradient_of(expected, "a"))


def test_a_defect_at_one_atom_fails_its_request_alone(trainer):
    """Whatever is raised: what shares the pass is answered, and added up, to the bit."""
    rng = np.random.default_rng(9)
    good = piece("b", [random_datum(rng, 20, "cross_entropy")], request="b:1")
    bad = piece("a", [random_datum(rng, 70, "cross_entropy")], request="a:1")
    expected = Trainer(trainer._base, "qwen3")
    add_job(expected, "b", LoraConfig(rank=2, seed=1))
    (alone,) = run(expected, good)
    with _MemoryFor(rows=50, error=KeyError("a bolt fell off")):
        first, second = run(trainer, bad, good)
    assert "KeyError: 'a bolt fell off'" in _failure(first).message
    assert np.array_equal(
        succeeded(second).outputs[0]["logprobs"], succeeded(alone).outputs[0]["logprobs"]
    )
    assert torch.equal(gradient_of(trainer, "b"), gradient_of(expected, "b"))
    assert trainer.job(ModelId("a")).gradient is None


def test_an_atom_that_cannot_be_read_fails_all_of_its_request_alone(trainer):
    """Those before it in the pass, too, and what they have gathered."""
    rng = np.random.default_rng(9)
    good = piece("b", [_good(rng)], "importance_sampling", request="b:1")
    unknown = [_good(rng)]
    del unknown[0].loss_inputs["advantages"]
    parts = [
        piece("a", [_good(rng)], "importance_sampling", request="a:1", last=False),
        piece("a", unknown, "importance_sampling", request="a:1", start=1, last=False),
        piece("a", [_good(rng)], "importance_sampling", request="a:1", start=2),
    ]
    *outcomes, beside = run(trainer, *parts, good)
    assert [type(each) for each in outcomes[1:]] == [Failed, Failed]
    succeeded(beside)
    assert trainer.job(ModelId("a")).gradient is None
    assert trainer.job(ModelId("a")).open_requests == 0


def test_a_model_that_cannot_be_seated_counts_nothing_twice(trainer, monkeypatch):
    """Where nothing was booked the engine may raise; behind a part that was, it may not."""
    rng = np.random.default_rng(9)
    pieces = [piece(model, [_good(rng)], "importance_sampling") for model in "ab"]
    steps = OptimPass(
        KEY, tuple(OptimPiece(p.request_id, p.model_id, AdamParams()) for p in pieces)
    )

    def seatings(missing):
        def one_by_one(models):
            for place, model in enumerate(models):
                if model == missing:
                    raise OSError("its page cannot be read")
                yield [place]

        return one_by_one

    monkeypatch.setattr(trainer, "_seatings", seatings("a"))
    with pytest.raises(OSError, match="page"):
        run(trainer, *pieces)
    assert trainer.job(ModelId("b")).gradient is None
    monkeypatch.setattr(trainer, "_seatings", seatings("b"))
    first, second = run(trainer, *pieces)
    succeeded(first)
    assert "its page cannot be read" in _failure(second).message
    first, second = trainer.optimize(steps).outcomes
    assert first.version == 1
    assert "its page cannot be read" in _failure(second).message
