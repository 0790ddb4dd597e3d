"""Slots are a cache: nobody can tell whether a model has been paged out, to the bit."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from support.torch_cases import KEY, add_job, gradient_of, piece, random_datum, run, succeeded
from torch.utils._python_dispatch import TorchDispatchMode

from openrl.engines.base import CreateAdapter, DropAdapter, OptimPass, OptimPiece, SaveAdapter
from openrl.engines.pytorch import paging
from openrl.engines.pytorch.lora import Layout
from openrl.engines.pytorch.paging import AdapterBudget, Jobs, job_bytes
from openrl.engines.pytorch.trainer import Trainer
from openrl.errors import OutOfMemory, ServerError
from openrl.types import AdamParams, Failed, LoraConfig, ModelId, OptimStepDone, RequestId

CONFIG = LoraConfig(rank=2, seed=1)


def _size(base, config=CONFIG):
    return job_bytes(Layout(base.linears, config), base.dtype)


def _trainer(base, jobs):
    """Room for this many jobs on the device; None: for any number."""
    budget = AdapterBudget(None if jobs is None else jobs * _size(base))
    return Trainer(base, "test", budget)


def _round(trainer, number, models, passes_of):
    """A step of every model, `passes_of` at a time; log-probabilities and norms by model."""
    seen = {}
    for start in range(0, len(models), passes_of):
        some = models[start : start + passes_of]
        pieces = []
        for model in some:
            rng = np.random.default_rng([number, *model.encode()])
            data = [random_datum(rng, int(n), "cross_entropy") for n in rng.integers(2, 12, 2)]
            pieces.append(piece(model, data, request=f"{model}:{number}"))
        for model, outcome in zip(some, run(trainer, *pieces), strict=True):
            seen[model] = [record["logprobs"] for record in succeeded(outcome).outputs]
        if number % 2:  # else the gradient is paged, too
            adam = AdamParams(learning_rate=1e-2)
            steps = tuple(OptimPiece(RequestId("o"), ModelId(m), adam) for m in some)
            for model, done in zip(
                some, trainer.optimize(OptimPass(KEY, steps)).outcomes, strict=True
            ):
                assert isinstance(done, OptimStepDone)
                seen[model].append(np.array([done.metrics["grad_norm"], done.version]))
    return seen


def _everything(trainer, model):
    job = trainer.job(ModelId(model))
    return {name: tensor.clone() for name, tensor in job.tensors().items()}


def test_64_models_with_room_for_4_equal_those_that_never_moved(base_model):
    base = base_model("qwen3")
    models = [f"m{number}" for number in range(64)]
    paged, plain = _trainer(base, 4), _trainer(base, None)
    for model in models:
        for trainer in (paged, plain):
            add_job(trainer, model, CONFIG)
    assert (paged.count, paged.resident) == (64, 4)
    assert plain.resident == 64
    for number in range(3):
        here = _round(paged, number, models, passes_of=8)  # more in a pass than there is room for
        there = _round(plain, number, models, passes_of=8)
        for model in models:
            for mine, other in zip(here[model], there[model], strict=True):
                assert np.array_equal(mine, other)
        assert paged.resident <= 4
    for model in models:
        mine, other = _everything(paged, model), _everything(plain, model)
        assert mine.keys() == other.keys() == {"weights", "exp_avg", "exp_avg_sq", "gradient"}
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        jobs = paged.job(ModelId(model)), plain.job(ModelId(model))
        assert jobs[0].version == jobs[1].version == 1


def test_pages_lie_in_the_hosts_memory_and_spill_to_disk(base_model, monkeypatch):
    """What a device with a memory of its own does, on the only device there is here."""
    base = base_model("llama")
    layout = Layout(base.linears, CONFIG)
    budget = AdapterBudget(_size(base), host=layout.size * 4)
    jobs = Jobs(budget, base.device, base.dtype)
    monkeypatch.setattr(jobs, "_device", torch.device("meta"))
    donor = _trainer(base, None)
    for model in "abc":
        add_job(donor, model, CONFIG)
        jobs.make_room(_size(base))
        jobs.add(ModelId(model), donor.job(ModelId(model)))
    assert jobs.resident == 1
    assert [page.path is None for page in jobs._pages.values()] == [False, True]
    monkeypatch.setattr(jobs, "_device", base.device)
    for model in "abc":
        weights = jobs.get(ModelId(model)).adapter.weights.flat
        assert torch.equal(weights, donor.job(ModelId(model)).adapter.weights.flat)
    assert not list(jobs._directory.iterdir())
    jobs.close()


def test_half_a_request_keeps_its_job_on_the_device(base_model):
    rng = np.random.default_rng(0)
    trainer = _trainer(base_model("llama"), 1)
    for model in "ab":
        add_job(trainer, model, CONFIG)
    data = [random_datum(rng, n, "cross_entropy") for n in (5, 7)]
    run(trainer, piece("a", data[:1], last=False))
    run(trainer, piece("b", data))
    run(trainer, piece("a", data[1:], start=1))
    whole = _trainer(base_model("llama"), None)
    add_job(whole, "a", CONFIG)
    run(whole, piece("a", data[:1], last=False), piece("a", data[1:], start=1))
    assert torch.equal(gradient_of(trainer, "a"), gradient_of(whole, "a"))


def test_a_paged_model_is_saved_and_dropped_like_any_other(base_model, tmp_path):
    trainer = _trainer(base_model("llama"), 1)
    for model in "abc":
        add_job(trainer, model, CONFIG)
    (tmp_path / "a").mkdir()
    trainer.save(SaveAdapter(ModelId("a"), tmp_path / "a", with_optimizer=True))
    copy = _trainer(base_model("llama"), None)
    copy.create(CreateAdapter(ModelId("a"), CONFIG, tmp_path / "a"))
    mine = trainer.job(ModelId("a")).adapter.weights.flat
    assert torch.equal(mine, copy.job(ModelId("a")).adapter.weights.flat)
    directory = trainer._jobs._directory
    for model in "abc":
        trainer.drop(DropAdapter(ModelId(model)).model_id)
    assert trainer.count == 0
    assert not list(directory.iterdir())
    trainer.close()
    assert not directory.exists()


def test_an_adapter_that_never_fits_is_refused_with_its_size(base_model):
    base = base_model("llama")
    trainer = _trainer(base, 1)
    with pytest.raises(OutOfMemory, match=r"rank 8 takes .* engine.adapter_bytes"):
        trainer.create(CreateAdapter(ModelId("a"), LoraConfig(rank=8)))
    assert trainer.count == 0


def test_a_full_disk_keeps_jobs_in_memory_and_a_lost_page_fails_its_requests(
    base_model, monkeypatch, caplog
):
    base = base_model("llama")
    trainer = _trainer(base, 1)
    add_job(trainer, "a", CONFIG)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "openrl"):
        broken.setattr(paging.tempfile, "tempdir", "/nowhere")
        broken.setattr(trainer._jobs, "_directory", None)
        add_job(trainer, "b", CONFIG)
    assert trainer.resident == 2
    assert "a stays in memory" in caplog.text
    add_job(trainer, "c", CONFIG)
    for file in trainer._jobs._directory.iterdir():
        file.unlink()
    data = [random_datum(np.random.default_rng(0), 5, "cross_entropy")]
    lost, fine = run(trainer, piece("a", data), piece("c", data))
    assert isinstance(lost, Failed)
    assert isinstance(lost.error, ServerError)
    succeeded(fine)


class _NoRoomForCopies(TorchDispatchMode):
    """No memory for copies of so many elements, which is how a page comes in."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self._elements = elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "_to_copy" in str(func) and out.numel() == self._elements:
            raise torch.OutOfMemoryError("out of memory")
        return out


def test_a_page_without_room_fails_its_own_requests_and_stays(base_model):
    """What the others in its pass have done counts, once."""
    trainer = _trainer(base_model("qwen3"), 1)
    for model in "ab":
        add_job(trainer, model, CONFIG)
        data = [random_datum(np.random.default_rng(1), 6, "cross_entropy")]
        succeeded(run(trainer, piece(model, data))[0])
    trainer.job(ModelId("a"))
    steps = tuple(
        OptimPiece(RequestId(f"{model}:2"), ModelId(model), AdamParams()) for model in "ab"
    )
    with _NoRoomForCopies(Layout(trainer._base.linears, CONFIG).size):
        done, failed = trainer.optimize(OptimPass(KEY, steps)).outcomes
    assert isinstance(done, OptimStepDone)
    assert done.version == 1
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, OutOfMemory)
    (again,) = trainer.optimize(OptimPass(KEY, steps[1:])).outcomes
    assert isinstance(again, OptimStepDone)
    assert again.version == 1
