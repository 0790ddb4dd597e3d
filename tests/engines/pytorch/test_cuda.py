"""On a GPU: what holds to the bit on a CPU holds there within rounding."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from support.torch_cases import KEY, add_job, gradient_of, piece, random_datum, run, succeeded

from openrl.engines.base import OptimPass, OptimPiece
from openrl.engines.pytorch.loading import load_base_model
from openrl.engines.pytorch.lora import Layout
from openrl.engines.pytorch.numerics import examine
from openrl.engines.pytorch.paging import AdapterBudget, job_bytes
from openrl.engines.pytorch.trainer import Trainer
from openrl.types import AdamParams, LoraConfig, ModelId, OptimStepDone, RequestId

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
FAMILIES = ("llama", "qwen3", "gemma3")
LOSSES = ("cross_entropy", "ppo", "gspo")


@pytest.fixture(params=FAMILIES)
def directory(request, model_directory):
    return model_directory(request.param)


def _data(number, loss):
    rng = np.random.default_rng(number)
    return [random_datum(rng, int(n), loss) for n in rng.integers(1, 80, 3)]


def _train(base, numbers, *, filler=0, **options):
    """One pass; log-probabilities and gradient by job. `filler` shifts everything by a
    neighbour's tokens, which packs the same jobs another way."""
    trainer = Trainer(base, "test", **options)
    pieces = []
    if filler:
        add_job(trainer, "filler")
        rng = np.random.default_rng(filler)
        pieces.append(piece("filler", [random_datum(rng, filler, "cross_entropy")]))
    for number in numbers:
        loss = LOSSES[number % len(LOSSES)]
        add_job(trainer, f"job{number}", LoraConfig(rank=2 << number % 3, seed=number))
        pieces.append(piece(f"job{number}", _data(number, loss), loss))
    outcomes = run(trainer, *pieces)[len(pieces) - len(numbers) :]
    return {
        number: (
            np.concatenate([record["logprobs"] for record in succeeded(outcome).outputs]),
            gradient_of(trainer, f"job{number}").float().cpu(),
        )
        for number, outcome in zip(numbers, outcomes, strict=True)
    }


def _gap(one, other):
    return float((one - other).norm() / other.norm())


def test_fp32_equals_the_cpu(directory):
    numbers = range(4)
    here = _train(load_base_model(directory, CUDA, torch.float32), numbers)
    there = _train(load_base_model(directory, torch.device("cpu"), torch.float32), numbers)
    for number in numbers:
        np.testing.assert_allclose(here[number][0], there[number][0], atol=2e-4)
        assert _gap(here[number][1], there[number][1]) < 1e-4


def test_fp32_in_company_equals_alone(directory):
    base = load_base_model(directory, CUDA, torch.float32)
    together = _train(base, range(6))
    for number in range(6):
        alone = _train(base, [number])
        np.testing.assert_allclose(together[number][0], alone[number][0], atol=1e-5)
        assert _gap(together[number][1], alone[number][1]) < 1e-5


def test_bf16_in_company_is_no_further_than_alone_packed_otherwise(directory):
    """The yardstick is the job alone behind a neighbour of so many tokens; twice the largest of
    a few, since both sides are draws of the same rounding."""
    base = load_base_model(directory, CUDA, torch.bfloat16)
    together = _train(base, range(6))
    for number in range(6):
        alone = _train(base, [number])[number][1]
        repacked = [
            _gap(_train(base, [number], filler=filler)[number][1], alone)
            for filler in (1, 17, 40, 100)
        ]
        assert _gap(together[number][1], alone) <= 2 * max(repacked) + 1e-6


def test_recomputed_layers_give_the_same_numbers(directory):
    base = load_base_model(directory, CUDA, torch.float32)
    kept, recomputed = _train(base, range(3)), _train(base, range(3), activation_bytes=0)
    for number in range(3):
        np.testing.assert_allclose(recomputed[number][0], kept[number][0], atol=1e-5)
        assert _gap(recomputed[number][1], kept[number][1]) < 1e-5


@pytest.mark.parametrize("host", [None, 0])
def test_paging_through_the_host_and_the_disk_keeps_every_bit(host, model_directory):
    base = load_base_model(model_directory("qwen3"), CUDA, torch.bfloat16)
    config = LoraConfig(rank=4, seed=1)
    size = job_bytes(Layout(base.linears, config), base.dtype)
    trainer = Trainer(base, "test", AdapterBudget(2 * size, host))
    models = [f"m{number}" for number in range(8)]
    for model in models:
        add_job(trainer, model, config)
    assert trainer.resident == 2
    for model in models:
        run(trainer, piece(model, _data(1, "cross_entropy")))
    steps = tuple(OptimPiece(RequestId("o"), ModelId(m), AdamParams()) for m in models)
    for done in trainer.optimize(OptimPass(KEY, steps)).outcomes:
        assert isinstance(done, OptimStepDone)
    before = {m: {n: t.cpu() for n, t in trainer.job(ModelId(m)).tensors().items()} for m in models}
    for model in models:
        job = trainer.job(ModelId(model))
        assert job.adapter.weights.flat.is_cuda
        for name, tensor in job.tensors().items():
            assert torch.equal(tensor.cpu(), before[model][name])
        assert torch.equal(job.adapter.compute.flat, job.adapter.weights.flat.bfloat16())
    trainer.close()


def test_a_pass_waits_for_the_device_once(model_directory):
    """torch counts its own waits; the results' transfer is one of them."""
    base = load_base_model(model_directory("qwen3"), CUDA, torch.float32)
    trainer = Trainer(base, "test")
    pieces = []
    for number in range(4):
        add_job(trainer, f"job{number}")
        pieces.append(piece(f"job{number}", _data(number, "cross_entropy")))
    run(trainer, *pieces)
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(trainer, *pieces)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    caught = [one for one in caught if "synchroniz" in str(one.message)]
    # Uploads from pageable memory count as waits, too: for each atom its targets and weights, for
    # the pass its tokens, positions and the two maps of attention.
    assert len(caught) <= 1 + 2 * len(pieces) + 4


def test_the_fingerprint_names_the_device(model_directory):
    numerics = examine(load_base_model(model_directory("llama"), CUDA, torch.float32))
    assert torch.cuda.get_device_name(CUDA) in numerics.fingerprint
    assert numerics.gap < 1e-4
